"""Which step runs next and what goes into it: pure functions of host values."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from dasc_jax.types import PAGE


class Prefilling(NamedTuple):
    """What the scheduler needs to know of an admitted prompt.

    `done` tokens are computed (or came from the cache), a multiple of 64; `replay` tokens in front
    of `done` must be replayed together with the next piece; `checkpoints` are the depths still to
    be stored, ascending.
    """

    id: str
    length: int
    done: int
    replay: int
    checkpoints: tuple[int, ...]


class Piece(NamedTuple):
    """Tokens `start .. stop` of a prompt, to run in one step, behind `replay` replayed ones."""

    id: str
    start: int
    stop: int
    replay: int
    checkpoints: tuple[int, ...]


def prefill_pieces(queue: Sequence[Prefilling], tokens: int, requests: int) -> list[Piece]:
    """Fill a step of at most `tokens` packed tokens and `requests` requests, first come first.

    A piece ends where its prompt ends or at a multiple of 64, so that every run cuts its chunks at
    the same absolute positions. A prompt is cut for the size of a step only, never for a
    checkpoint.
    """
    pieces: list[Piece] = []
    room = tokens
    for p in queue[:requests]:
        stop = min(p.length, p.done + room - p.replay)
        if stop < p.length:
            stop -= stop % PAGE
        if stop <= p.done:
            break
        within = tuple(depth for depth in p.checkpoints if p.done < depth <= stop)
        pieces.append(Piece(p.id, p.done, stop, p.replay, within))
        room -= p.replay + stop - p.done
    return pieces


def checkpoint_depths(
    length: int, hit_depth: int, branch_depth: int, interval: int | None
) -> tuple[int, ...]:
    """Depths at which a prompt of `length` tokens, resumed at `hit_depth`, is checkpointed.

    The last boundary that still leaves a token to compute, every `interval` tokens if set, and the
    branch point (0: none) where the cached KV went deeper than any state.
    """
    last = (length - 1) // PAGE * PAGE
    depths = {last, branch_depth}
    if interval:
        depths |= set(range(interval, last + 1, interval))
    return tuple(sorted(depth for depth in depths if hit_depth < depth <= last))


def next_step(
    prefilling: int, decoding: int, previous: Literal["prefill", "decode"]
) -> Literal["prefill", "decode", "idle"]:
    """Prompts first, but never two prefill steps in a row while requests wait for a token."""
    if prefilling and not (decoding and previous == "prefill"):
        return "prefill"
    return "decode" if decoding else "idle"
