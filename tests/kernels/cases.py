"""What every implementation of the ops is run on, and the float64 recurrence it is judged by.

A new implementation joins all of these tests by adding its name to `IMPLS`. The programs below are
compiled for one bucket, so that hundreds of cases share a few compilations.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk

IMPLS = ("reference", "xla")
KINDS = ("kda", "gdn")
DECAYS = (0.0, -1e-6, -0.05, -5.0, -30.0, -50.0, -100.0)
KEY_HEADS, HEADS, KEY, VALUE = 2, 4, 32, 16
TOKENS, SEGMENTS, CHUNKS, BOUNDARIES = 208, 7, 20, 6
O_TOLERANCE, STATE_TOLERANCE = 2e-6, 5e-6


class Inputs(NamedTuple):
    """q, k `[T, Hk, K]`, v `[T, H, V]`, g `[T, H, K]` or `[T, H]`, beta `[T, H]`."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    beta: np.ndarray


class Segment(NamedTuple):
    length: int
    start: int = 0
    mode: int = pk.SLOT


def random_inputs(
    rng: np.random.Generator, kind: str, tokens: int = TOKENS, dtype=jnp.float32, decays=DECAYS
) -> Inputs:
    """Half of the units keep a log decay of `decays`, the others draw one at every token."""
    q, k = rng.normal(size=(2, tokens, KEY_HEADS, KEY)) * np.exp(rng.normal(size=(2, tokens, 1, 1)))
    v = rng.normal(size=(tokens, HEADS, VALUE))
    units = (HEADS, KEY) if kind == "kda" else (HEADS,)
    drawn = rng.choice(decays, size=(tokens, *units))
    g = np.where(rng.random(units) < 0.5, drawn[:1], drawn)
    beta = 1 / (1 + np.exp(-rng.normal(size=(tokens, HEADS))))
    q, k, v, beta = (np.array(jnp.asarray(x, dtype)) for x in (q, k, v, beta))
    return Inputs(q, k, v, g.astype(np.float32), beta)


def random_states(rng: np.random.Generator, count: int = SEGMENTS) -> np.ndarray:
    return rng.normal(size=(count, HEADS, KEY, VALUE)).astype(np.float32)


def pad(inputs: Inputs, tokens: int = TOKENS, value: float = np.nan) -> Inputs:
    """The same tokens in a larger bucket whose other rows hold `value`."""
    return Inputs(
        *(
            np.concatenate([x, np.full((tokens - len(x), *x.shape[1:]), value, x.dtype)])
            for x in inputs
        )
    )


def cut(inputs: Inputs, first: int, last: int) -> Inputs:
    return Inputs(*(x[first:last] for x in inputs))


def table(segments: list[Segment], boundaries=()) -> pk.ChunkTable:
    lengths, starts, modes = zip(*segments, strict=True)
    return pk.chunk_table(
        lengths,
        starts,
        modes,
        boundaries,
        num_tokens=TOKENS,
        num_segments=SEGMENTS,
        num_chunks=CHUNKS,
        num_boundaries=BOUNDARIES,
    )


@functools.partial(jax.jit, static_argnames=("impl", "num_boundaries"))
def prefill(q, k, v, g, beta, initial, table, keep=None, *, impl, num_boundaries=BOUNDARIES):
    return pk.delta_prefill(
        q, k, v, g, beta, initial, table, keep=keep, num_boundaries=num_boundaries, impl=impl
    )


@functools.partial(jax.jit, static_argnames=("impl", "layer"))
def decode(q, k, v, g, beta, pool, slots, *, layer, impl):
    return pk.delta_decode(q, k, v, g, beta, pool, slots, layer=layer, impl=impl)


def run(
    impl: str,
    inputs: Inputs,
    segments: list[Segment],
    initial: np.ndarray,
    boundaries=(),
    keep=None,
) -> pk.DeltaOut:
    """Prefill in the common bucket; the padding tokens hold NaN. Numpy results."""
    if keep is None:
        keep = np.ones((HEADS, KEY), bool)
    rows = np.zeros((SEGMENTS, *initial.shape[1:]), np.float32)
    rows[: len(initial)] = initial
    out = prefill(*pad(inputs), rows, table(segments, boundaries), keep, impl=impl)
    return pk.DeltaOut(*(np.asarray(x) for x in out))


def oracle(
    inputs: Inputs, segments: list[Segment], initial: np.ndarray, boundaries=(), keep=None
) -> pk.DeltaOut:
    """The recurrence token by token in float64; results without padding."""
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in inputs)
    group = v.shape[1] // q.shape[1]
    q, k = (np.repeat(x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6), group, 1) for x in (q, k))
    q *= q.shape[-1] ** -0.5
    g = g if g.ndim == 3 else g[..., None]
    state = np.zeros(initial.shape[1:])
    o, final, token = [], [], 0
    boundary = np.zeros((len(boundaries), *state.shape))
    wanted = {where: row for row, where in enumerate(boundaries)}
    for index, (length, start, mode) in enumerate(segments):
        kept = (
            np.ones(state.shape[:2], bool) if mode == pk.SLOT else np.zeros(state.shape[:2], bool)
        )
        kept = keep if mode == pk.MERGE else kept
        before = state if mode == pk.MERGE else np.zeros_like(state)
        state = np.where(kept[..., None], initial[index], before)
        for position in range(start, start + length):
            state = np.exp(g[token])[..., None] * state
            u = beta[token][:, None] * (v[token] - np.einsum("hkv,hk->hv", state, k[token]))
            state = state + np.einsum("hk,hv->hkv", k[token], u)
            o.append(np.einsum("hkv,hk->hv", state, q[token]))
            token += 1
            if (index, position + 1) in wanted:
                boundary[wanted[index, position + 1]] = state
        final.append(state)
    return pk.DeltaOut(np.array(o).reshape(-1, *v.shape[1:]), np.array(final), boundary)


def distance(value: np.ndarray, truth: np.ndarray) -> float:
    """Largest difference relative to max(1, largest true magnitude)."""
    value = np.asarray(value, np.float64)
    assert value.shape == truth.shape
    if not truth.size:
        return 0.0
    return float(np.abs(value - truth).max() / max(1.0, np.abs(truth).max()))


def assert_close(
    out: pk.DeltaOut, truth: pk.DeltaOut, o=O_TOLERANCE, state=STATE_TOLERANCE
) -> None:
    """Compare with an `oracle` result, which has no padding."""
    tokens, segments, boundaries = len(truth.o), len(truth.final), len(truth.boundary)
    assert distance(out.o[:tokens], truth.o) <= o
    assert not out.o[tokens:].any()
    assert distance(out.final[:segments], truth.final) <= state
    assert distance(out.boundary[:boundaries], truth.boundary) <= state


def assert_same_bits(value: np.ndarray, other: np.ndarray) -> None:
    value, other = np.asarray(value), np.asarray(other)
    assert value.dtype == other.dtype and value.shape == other.shape
    assert value.tobytes() == other.tobytes(), f"largest difference {np.abs(value - other).max()}"
