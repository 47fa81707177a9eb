"""One sequence taken through the model's pure functions pass by pass, to hold an engine against.

Nothing of the engine is used: a sequence lives in slot 1 and pages 1 .. PAGES of a state of its
own, scratch passes in slot 2, and what a load does to a recurrent state is done in the open.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dasc_jax.checkpoint_state import pack, unpack
from dasc_jax.model import init_recurrent
from dasc_jax.models import DecodeBatch, State, functions, init_pages
from dasc_jax.models.packing import SLOT, ZERO, PrefillBucket, Segment, pack_segments
from dasc_jax.plan import SelectionPlan
from dasc_jax.types import RecurrentState
from tests.engines import golden_model

PAGES = 16
OWN, SCRATCH = 1, 2
WIDTHS = (64, 320)


@lru_cache
def _compiled(name: str) -> tuple[Any, Any]:
    model = functions(golden_model(name).config, "float32")
    return jax.jit(model.prefill), jax.jit(model.decode)


def fresh(name: str) -> State:
    """Nothing seen yet."""
    config = golden_model(name).config
    pages = init_pages(config, PAGES + 1, jnp.dtype("float32"))
    return State(init_recurrent(config, 3, "float32"), pages)


def _pass(
    name: str, state: State, tokens: Sequence[int], start: int, mode: int, slot: int, writes: bool
) -> tuple[State, np.ndarray]:
    """One prefill of tokens from `start` on: the state behind them and the last logits."""
    model = golden_model(name)
    d = model.config.delta
    segment = Segment(
        np.asarray(tokens, np.int32), start, range(1, PAGES + 1), slot, slot, mode, writes
    )
    keep = np.ones((len(model.config.recurrent_layers), d.num_value_heads, d.key_dim), bool)
    width = next(w for w in WIDTHS if w >= len(tokens))
    bucket = PrefillBucket(width, 1, 0, PAGES, 1)
    batch = pack_segments([segment], [], [len(tokens) - 1], keep, bucket)
    state, out = _compiled(name)[0](model.params, state, batch)
    return state, np.asarray(out.logits[0])


def extended(
    name: str, state: State, tokens: Sequence[int], start: int
) -> tuple[State, np.ndarray]:
    """The state behind further tokens, cut at multiples of 64, and the last logits."""
    logits = np.zeros(0)
    stop = start + len(tokens)
    while start < stop:
        end = min(stop, (start // 64 * 64) + WIDTHS[-1] // 64 * 64)
        piece, tokens = tokens[: end - start], tokens[end - start :]
        state, logits = _pass(name, state, piece, start, SLOT if start else ZERO, OWN, True)
        start = end
    return state, logits


def own(state: State) -> RecurrentState:
    """The recurrent state of the sequence, `[L, 1, ...]`."""
    return RecurrentState(*(a[:, OWN : OWN + 1] for a in state.recurrent))


def with_own(state: State, recurrent: RecurrentState) -> State:
    """The same pages with another recurrent state."""
    rows = zip(state.recurrent, recurrent, strict=True)
    return State(RecurrentState(*(a.at[:, OWN].set(b[:, 0]) for a, b in rows)), state.pages)


def masks(name: str, plan: SelectionPlan) -> np.ndarray:
    """Retained units `[L, 1, H, K, 1]`."""
    key_dim = golden_model(name).config.delta.key_dim
    stacked = np.stack([plan.mask(at, key_dim) for at in range(plan.layers)])
    return stacked[:, None, :, :, None]


def stored(plan: SelectionPlan, state: State, quantization: str | None) -> RecurrentState:
    """What a checkpoint keeps of the sequence's units, as a dense state; int8 if asked for."""
    exact = own(state)
    if quantization is None:
        return exact
    return unpack(plan, pack(plan, exact, quantization=quantization))


def zeroed(name: str, plan: SelectionPlan, state: State, quantization: str | None = None) -> State:
    """No refresh: local units zero, the rest and the convolution window as stored."""
    kept = stored(plan, state, quantization)
    temporal = jnp.where(masks(name, plan), kept.temporal, 0)
    return with_own(state, RecurrentState(temporal, own(state).conv))


def refreshed(
    name: str,
    plan: SelectionPlan,
    state: State,
    tokens: Sequence[int],
    quantization: str | None = None,
) -> State:
    """Window refresh in a pass of its own: `tokens` are all those behind `state`.

    The last `window + 3` of them run from a zero state over the KV as it is and write none; the
    local units are taken from where that ends.
    """
    start = max(len(tokens) - plan.window - 3, 0)
    after, _ = _pass(name, state, tokens[start:], start, ZERO, SCRATCH, False)
    kept = stored(plan, state, quantization)
    replayed = after.recurrent.temporal[:, SCRATCH : SCRATCH + 1]
    temporal = jnp.where(masks(name, plan), kept.temporal, replayed)
    return with_own(state, RecurrentState(temporal, own(state).conv))


def generated(
    name: str, state: State, tokens: Sequence[int], start: int, count: int
) -> tuple[tuple[int, ...], np.ndarray]:
    """Run the rest of a prompt and continue greedily: tokens and their distributions."""
    model = golden_model(name)
    state, logits = extended(name, state, tokens, start)
    at, chosen, seen = start + len(tokens), [], []
    while True:
        seen.append(np.asarray(jax.nn.log_softmax(logits)))
        chosen.append(int(np.argmax(logits)))
        if len(chosen) == count:
            return tuple(chosen), np.array(seen)
        one = [np.array([value], np.int32) for value in (chosen[-1], at, OWN)]
        table = np.arange(1, PAGES + 1, dtype=np.int32)[None]
        state, out = _compiled(name)[1](model.params, state, DecodeBatch(*one, table))
        logits, at = np.asarray(out[0]), at + 1


def resumed(
    name: str,
    plan: SelectionPlan,
    policy: str,
    tokens: Sequence[int],
    depths: Sequence[int],
    *,
    quantization: str | None = None,
    count: int = 3,
) -> tuple[tuple[int, ...], np.ndarray]:
    """A prompt whose prefix was loaded from a checkpoint at every one of `depths`, ascending."""
    state, at = fresh(name), 0
    for depth in depths:
        state, _ = extended(name, state, tokens[at:depth], at)
        if policy == "wr":
            state = refreshed(name, plan, state, tokens[:depth], quantization)
        else:
            state = zeroed(name, plan, state, quantization)
        at = depth
    return generated(name, state, tokens[at:], at, count)
