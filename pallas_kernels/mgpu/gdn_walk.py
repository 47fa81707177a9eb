"""The walk over chunks in the prefill of the gated delta rule, on Hopper.

`gdn_within` leaves what the tokens of a chunk are to each other (T, P); here a block of threads
walks the chunks of a run, which is a segment and those that merge with it, for one value head and
some value columns:

    X = beta (V - exp(G) K^ S);    U = T X;    O = exp(G) Q^ S + P U
    S <- exp(G_last) S + K^^T (exp(G_last - G) U)

with K^, Q^ the normalised keys and queries, whose norms are in the factors. One warpgroup walks,
its state in float32 registers, of which the tensor cores read a bfloat16 copy; the other copies the
operands of chunks into a ring. U goes into the state in two halves of 8 bits: where keys are alike,
what it was rounded by would pile up.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chunks import CHUNK, MERGE, SLOT
from pallas_kernels.mgpu.gdn_within import (
    BY_ROW,
    FROM_START,
    GROUP,
    KEY,
    OVER,
    PARAMS,
    QUERY,
    STRENGTH,
    SWIZZLED,
    TO_END,
    WGMMA,
)

COLUMNS = 64
"""Value columns of a block of threads."""
STATE = (KEY, COLUMNS)
ROWS = (CHUNK, COLUMNS)
_STORED = 32
"""Columns that an incomplete chunk stores at a time: rows of 128 bytes, where copies may start."""
_LOADED = 16
"""Columns of v that are copied at a time: not tiled, for chunks start at any token, and narrow, so
that rows lie in different banks."""
FIRST, COUNT, MODE, SEGMENTS, CHUNKS = range(5)
"""Columns of the table of segments; the last two are zero but where a run starts."""


@dataclass(frozen=True)
class Tiling:
    """`stages` chunks are in shared memory: 1 or 2."""

    stages: int = 2


def walk(t: Tiling, tokens: int, values: tuple[int, ...], interpret: Any) -> Any:
    """The kernel of the walk: (k, q, T, P, vectors, v, initial, keep, segments, chunks, cu_seqlens,
    final, boundary) to o; final and boundary are changed in place."""
    heads, width = values

    def run(*args):
        return plgpu.kernel(
            partial(_body, t),
            out_type=jax.ShapeDtypeStruct((tokens, heads, width), jnp.float32),
            grid=(args[6].shape[0] * heads * (width // COLUMNS),),
            grid_names=("item",),
            num_threads=2,
            thread_name="warpgroup",
            scratch_types=_scratch(t),
            compiler_params=PARAMS,
            interpret=interpret,
            kernel_name="gdn_prefill",
        )(*args)

    return run


def _scratch(t: Tiling) -> dict[str, Any]:
    def tiles(*shape: int) -> Any:
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=SWIZZLED)

    return {
        "k": tiles(t.stages, CHUNK, KEY),
        "q": tiles(t.stages, CHUNK, KEY),
        "solve": tiles(t.stages, CHUNK, CHUNK),
        "attend": tiles(t.stages, CHUNK, CHUNK),
        "vectors": plgpu.SMEM((t.stages, 5, CHUNK), jnp.float32),
        "v": plgpu.SMEM((t.stages, COLUMNS // _LOADED, CHUNK, _LOADED), jnp.bfloat16),
        "state": tiles(*STATE),
        "fresh": tiles(*ROWS),
        "u": tiles(*ROWS),
        "u_end": tiles(2, *ROWS),
        "tail": plgpu.SMEM((CHUNK, _STORED), jnp.float32),
        "full": plgpu.Barrier(num_arrivals=5 + COLUMNS // _LOADED, num_barriers=t.stages),
        "free": plgpu.Barrier(num_barriers=t.stages),
    }


_INPUTS = ("k", "q", "solve", "attend", "vectors", "v", "initial", "keep", "segments", "chunks") + (
    "cu_seqlens",
    "final",
    "boundary",
    "o",
)


def _body(t, *refs, **scratch):
    refs = dict(zip(_INPUTS, refs, strict=True))
    heads, width = refs["v"].shape[1:]
    blocks, item = width // COLUMNS, lax.axis_index("item")
    block, row = lax.rem(item, blocks), lax.div(item, blocks)
    head, segment = lax.rem(row, heads), lax.div(row, heads)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == 1)
    def _():
        _load_run(t, refs, scratch, segment, head, block * COLUMNS)

    @pl.when(warpgroup == 0)
    def _():
        columns = pl.ds(block * COLUMNS, COLUMNS)
        _walk_run(t, refs, scratch, segment, head, columns)
        _clear(refs, scratch["tail"], segment, head, columns)


def _load_run(t, refs, scratch, segment, head, column):
    first, count = refs["segments"][segment, FIRST], refs["segments"][segment, CHUNKS]
    full, free = scratch["full"], scratch["free"]

    def load(i, _):
        chunk, slot = first + i, lax.rem(i, t.stages)
        rows = pl.ds(refs["chunks"][chunk, 0], CHUNK)

        @pl.when(i >= t.stages)
        def _():
            plgpu.barrier_wait(free.at[slot])

        key_head = lax.div(head, GROUP)
        for name in ("k", "q", "solve", "attend", "vectors"):
            source = refs[name].at[chunk, key_head if name in "kq" else head]
            plgpu.copy_gmem_to_smem(source, scratch[name].at[slot], full.at[slot])
        for n in range(COLUMNS // _LOADED):
            source = refs["v"].at[rows, head, pl.ds(column + n * _LOADED, _LOADED)]
            plgpu.copy_gmem_to_smem(source, scratch["v"].at[slot, n], full.at[slot])

    lax.fori_loop(0, count, load, None)

    def drain(i, _):
        plgpu.barrier_wait(free.at[lax.rem(i, t.stages)])

    lax.fori_loop(jnp.maximum(count - t.stages, 0), count, drain, None)


def _walk_run(t, refs, own, segment, head, columns):
    table = refs["segments"]
    run = table[segment, FIRST]

    def visit(n, state):
        first, count, mode = table[n, FIRST], table[n, COUNT], table[n, MODE]
        loaded = _load(refs["initial"].at[n, head, :, columns], WGMMA)
        kept = _spread(_load(refs["keep"].at[head], BY_ROW), STATE) != 0
        loads = jnp.where(mode == MERGE, kept, mode == SLOT)
        state = jnp.where(loads, loaded, jnp.where(mode == MERGE, state, 0.0))
        own["state"][...] = state.astype(jnp.bfloat16)
        plgpu.commit_smem()

        def step(i, state):
            slot = lax.rem(first - run + i, t.stages)
            return _step(refs, own, first + i, slot, state, head, columns)

        return lax.fori_loop(0, count, step, state)

    zeros = plgpu.layout_cast(jnp.zeros(STATE, jnp.float32), WGMMA)
    lax.fori_loop(segment, segment + table[segment, SEGMENTS], visit, zeros)


def _step(refs, own, chunk, slot, state, head, columns):
    token, length, final, boundary = (refs["chunks"][chunk, i] for i in range(4))
    k, q, solve, attend, v = (own[x].at[slot] for x in ("k", "q", "solve", "attend", "v"))
    vectors = own["vectors"].at[slot]
    plgpu.barrier_wait(own["full"].at[slot])
    known, out = _products((ROWS, [(k, own["state"])]), (ROWS, [(q, own["state"])]))
    row = plgpu.broadcasted_iota(jnp.int32, ROWS, 0, layout=WGMMA)
    values = [_load(v.at[n], WGMMA) for n in range(v.shape[0])]
    values = jnp.concatenate(values, axis=1).astype(jnp.float32)
    values = values * _spread(_load(vectors.at[STRENGTH], BY_ROW), ROWS)
    fresh = values - known * _spread(_load(vectors.at[FROM_START], BY_ROW), ROWS)
    # Selected, for what follows a segment in its last chunk may hold NaN.
    own["fresh"][...] = jnp.where(row < length, fresh, 0.0).astype(jnp.bfloat16)
    plgpu.commit_smem()
    (u,) = _products((ROWS, [(solve, own["fresh"])]))
    own["u"][...] = u.astype(jnp.bfloat16)
    u_end = u * _spread(_load(vectors.at[TO_END], BY_ROW), ROWS)
    high = u_end.astype(jnp.bfloat16)
    own["u_end"].at[0][...] = high
    own["u_end"].at[1][...] = (u_end - high.astype(jnp.float32)).astype(jnp.bfloat16)
    out = out * _spread(_load(vectors.at[QUERY], BY_ROW), ROWS)
    over = vectors[OVER, 0]
    plgpu.commit_smem()
    halves = [(k.T, own["u_end"].at[half]) for half in (0, 1)]
    (gained,) = _products((STATE, halves))
    # A chunk without tokens changes no bit.
    state = jnp.where(length > 0, state * over + gained, state)
    own["state"][...] = state.astype(jnp.bfloat16)
    # Only now: both sums at once are more than registers hold.
    (attended,) = _products((ROWS, [(attend, own["u"])]))
    plgpu.barrier_arrive(own["free"].at[slot])
    plgpu.commit_smem()
    _store(refs["o"].at[:, head, columns], own["tail"], out + attended, token, length)
    for name, target in (("final", final), ("boundary", boundary)):

        @pl.when(target < refs[name].shape[0])
        def _(name=name, target=target):
            refs[name].at[target, head, :, columns][...] = state

    return state


def _products(*products):
    """The sum of left @ right of each (shape, [(left, right), ...]), all in shared memory."""

    def multiply(*accumulators):
        for accumulator, (_, pairs) in zip(accumulators, products, strict=True):
            for left, right in pairs:
                plgpu.wgmma(accumulator, left, right)
        return tuple(a[...] for a in accumulators)

    accumulators = (plgpu.WGMMAAccumulatorRef(shape, jnp.float32) for shape, _ in products)
    return lax.optimization_barrier(pl.run_scoped(multiply, *accumulators))


def _store(o, tail, out, token, length):
    """o[token : token + length] = out[:length]."""

    @pl.when(length == CHUNK)
    def _():
        o.at[pl.ds(token, CHUNK)][...] = out

    @pl.when((length > 0) & (length < CHUNK))
    def _():
        for first in range(0, COLUMNS, _STORED):
            plgpu.commit_smem()
            tail[...] = out[:, first : first + _STORED]
            plgpu.commit_smem()
            _copy_rows(tail, o.at[:, pl.ds(first, _STORED)], token, length)
            plgpu.wait_smem_to_gmem(0)


def _copy_rows(tile, target, start, count):
    """target[start : start + count] = tile[:count], count <= 64, as copies of 2^i rows."""
    source, size = 0, CHUNK
    while size:

        @pl.when((count & size) != 0)
        def _(size=size, source=source):
            rows = target.at[pl.ds(start + source, size)]
            plgpu.copy_smem_to_gmem(tile.at[pl.ds(source, size)], rows)

        source = source + (count & size)
        size //= 2


def _clear(refs, tail, segment, head, columns):
    """Zeros in o where padding tokens are: 64 rows of every 64 * N for the block of a segment."""
    segments = refs["initial"].shape[0]
    first, tokens = refs["cu_seqlens"][segments], refs["v"].shape[0]
    tokens = min(tokens, refs["o"].shape[0])
    pieces = lax.div(jnp.maximum(tokens - first, 0) + (CHUNK - 1), CHUNK)
    plgpu.commit_smem()
    tail[...] = plgpu.layout_cast(jnp.zeros((CHUNK, _STORED), jnp.float32), WGMMA)
    plgpu.commit_smem()

    def clear(i, _):
        start = first + (segment + i * segments) * CHUNK
        count = jnp.minimum(tokens - start, CHUNK)
        for column in range(0, COLUMNS, _STORED):
            target = refs["o"].at[:, head, columns].at[:, pl.ds(column, _STORED)]
            _copy_rows(tail, target, start, count)

    lax.fori_loop(0, lax.div(pieces - segment + (segments - 1), segments), clear, None)
    plgpu.wait_smem_to_gmem(0)


def _load(ref: Any, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def _spread(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, (0,))
