"""Packed units change ranks: one exchange over a mesh axis, in two forms of the same result.

How many units go from which rank to which is fixed by the plan (section 4.3 of the DASC paper), so
the paper's all-to-all of variable splits needs no sizes at run time:

`all_to_all`: one collective; the block of every pair of ranks padded to the largest one.
`permute`: one collective permute for every distance (target - source) over which anything travels,
between the pairs that have something to send, padded to the largest of them.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Shaped

Form = Literal["all_to_all", "permute"]

FORMS: tuple[Form, ...] = ("all_to_all", "permute")

START_SECONDS = 20e-6
"""Of a collective between GPUs of one host before its first byte, the launch of what feeds it
included. Assumed, like the rate; `scripts/bench_transfer.py` measures both on a machine."""
BYTES_PER_SECOND = 300e9
"""That a rank sends, and receives at the same time."""


class Cost(NamedTuple):
    """What a form takes: collectives one behind the other, and bytes of the busiest rank, sent or
    received, whichever is more."""

    collectives: int
    bytes: int

    @property
    def seconds(self) -> float:
        """Estimated duration."""
        return self.collectives * START_SECONDS + self.bytes / BYTES_PER_SECOND


def exchange(
    blocks: Shaped[Array, "P N ..."], counts: Int[np.ndarray, "P P"], axis: str, form: Form
) -> Shaped[Array, "P N ..."]:
    """Sends `blocks[t, : counts[me, t]]` to every rank t; returns what the ranks sent here.

    Legal inside `shard_map` over `axis` of P ranks, with the same `counts` [source, target] on
    all; N is at least the largest count. Row s of the result starts with the counts[s, me] units
    of rank s; what follows them is unspecified.
    """
    match form:
        case "all_to_all":
            return lax.all_to_all(blocks, axis, 0, 0)
        case "permute":
            return _permute(blocks, counts, axis)
    raise ValueError(f"form {form!r}: expected one of {', '.join(FORMS)}")


def cost(counts: Int[np.ndarray, "P P"], unit_bytes: int, form: Form) -> Cost:
    """What `form` takes where a unit has `unit_bytes`; nothing where nothing moves."""
    ranks, largest = len(counts), int(counts.max(initial=0))
    if not largest:
        return Cost(0, 0)
    if form == "all_to_all":
        return Cost(1, (ranks - 1) * largest * unit_bytes)
    traffic = np.zeros((2, ranks), np.int64)
    hops = _hops(counts)
    for pairs, width in hops:
        for source, target in pairs:
            traffic[0, source] += width
            traffic[1, target] += width
    return Cost(len(hops), int(traffic.max()) * unit_bytes)


def cheapest(counts: Int[np.ndarray, "P P"], unit_bytes: int) -> Form:
    """The form of least estimated time: permutes where the distances are few or the padding of
    `all_to_all` outweighs their starts, else `all_to_all`."""
    padded, permuted = (cost(counts, unit_bytes, form) for form in ("all_to_all", "permute"))
    return "permute" if permuted.seconds <= padded.seconds else "all_to_all"


def _hops(counts: np.ndarray) -> list[tuple[list[tuple[int, int]], int]]:
    """For every distance with traffic: its (source, target) pairs, and the largest count."""
    ranks = len(counts)
    hops = []
    for distance in range(1, ranks):
        pairs = [(source, (source + distance) % ranks) for source in range(ranks)]
        pairs = [pair for pair in pairs if counts[pair]]
        if pairs:
            hops.append((pairs, int(max(counts[pair] for pair in pairs))))
    return hops


def _permute(blocks: jax.Array, counts: np.ndarray, axis: str) -> jax.Array:
    ranks, me = blocks.shape[0], lax.axis_index(axis)
    received = jnp.zeros_like(blocks)
    for pairs, width in _hops(counts):
        distance = (pairs[0][1] - pairs[0][0]) % ranks
        block = lax.dynamic_index_in_dim(blocks, (me + distance) % ranks, keepdims=False)
        block = lax.ppermute(block[:width], axis, pairs)
        received = received.at[(me - distance) % ranks, :width].set(block)
    return received
