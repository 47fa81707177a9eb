"""The state of a run in the GDN walk: one warpgroup carries it from chunk to chunk, `gdn_walk`."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chunks import CHUNK, CONTINUE, MERGE, SLOT
from pallas_kernels.mgpu.common import seen
from pallas_kernels.mgpu.gdn_tiles import (
    BY_COLUMN,
    HALF,
    SQUARE,
    WGMMA,
    along,
    index,
    load,
    multiply,
)
from pallas_kernels.mgpu.gdn_within import ERASE, OVER, STRENGTH, TO_END
from pallas_kernels.mgpu.gdn_work import HALVES, Work


def carry(w: Work, stater: Any) -> Any:
    """Walk the state of a stater's columns, `[V, K]` in two halves of K, through the run; how many
    chunks had tokens."""
    initial, final, boundary = (w.arrays[x] for x in ("initial", "final", "boundary"))
    counts = final.shape[0], w.num_boundaries

    def store(target, row, state):
        for h, x in zip(HALVES, state, strict=True):
            tile = target.at[row, w.head, pl.ds(h * HALF, HALF), w.columns(stater)]
            tile.T[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)

    def start(segment, mode, state):
        return [
            _started(w, stater, segment, mode, h, x) for h, x in zip(HALVES, state, strict=True)
        ]

    def read(chunk):
        columns = ("start", "length", "segment", "final", "boundary")
        return tuple(getattr(w.table, name)[chunk] for name in columns)

    def chunk(c, carry):
        state, done, (mode, length, segment, *targets) = carry
        # A chunk ahead: device memory is slow to answer.
        ahead = read(jnp.minimum(c + 1, w.stop - 1))
        some = (length > 0).astype(jnp.int32)
        # Loops of one turn or none: values of a branch.
        begins = (mode != CONTINUE).astype(jnp.int32)
        state = lax.fori_loop(0, begins, lambda _, x: start(segment, mode, x), state)
        state = lax.fori_loop(0, some, lambda _, x: _advance(w, stater, x, length, done), state)
        for target, row, count in zip((final, boundary), targets, counts, strict=True):

            @pl.when(row < count)
            def _(target=target, row=row):
                store(target, row, state)

        return state, done + some, ahead

    zeros = [plgpu.layout_cast(jnp.zeros(SQUARE, jnp.float32), WGMMA) for _ in HALVES]

    # A segment that is not listed keeps its state.
    @pl.when(w.first > w.stop)
    def _():
        store(final, w.segment, start(w.segment, jnp.int32(SLOT), zeros))

    carry = zeros, jnp.int32(0), read(jnp.minimum(w.first, w.table.start.shape[0] - 1))
    return lax.fori_loop(w.first, w.stop, chunk, carry)[1]


def _started(w: Work, stater, segment, mode, half: int, state):
    """A half of the state at the start of a segment; before it, `state`."""
    channels = pl.ds(half * HALF, HALF)
    tile = w.arrays["initial"].at[segment, w.head, channels, w.columns(stater)]
    loaded = load(tile.T, plgpu.Layout.WGMMA_TRANSPOSED)
    loaded = plgpu.layout_cast(loaded, WGMMA)
    if "keep" in w.arrays:
        kept = along(load(w.arrays["keep"].at[w.head, channels], BY_COLUMN), 1) != 0
        loaded = jnp.where(kept | (mode != MERGE), loaded, state)
    return jnp.where((mode == MERGE) | (mode == SLOT), loaded, 0.0)


def _advance(w: Work, stater, state, length, at):
    """The state behind a chunk; leaves what the outputter needs."""
    s, slot, buffer = w.scratch, lax.rem(at, w.tiling.key_slots), lax.rem(at, 2)
    k = [seen(s["k"], w.interpret)[1].at[2 * slot + h] for h in HALVES]
    v = seen(s["v"], w.interpret)[1].at[slot * w.tiling.staters + stater]
    solve, handed = s["solve"].at[slot], 2 * stater + buffer
    vectors = s["key_vectors"].at[slot]
    rounded = [x.astype(jnp.bfloat16) for x in state]
    plgpu.barrier_wait(s["keys_full"].at[slot])
    _zero_past(length, (*k, v))

    def hand_state():
        @pl.when(at >= 2)
        def _():
            plgpu.barrier_wait(s["taken"].at[handed])

        for h, x in zip(HALVES, rounded, strict=True):
            s["state"].at[stater, buffer, h][...] = x
        values = load(v.T, WGMMA).astype(jnp.float32)
        return values * along(load(vectors.at[STRENGTH], BY_COLUMN), 1)

    known = [None, *((x, y.T) for x, y in zip(rounded, k, strict=True))]
    known, values = multiply(known, interpret=w.interpret, meanwhile=hand_state)
    fresh = values + known * along(load(vectors.at[ERASE], BY_COLUMN), 1)

    def decay_state():
        return [x * vectors[OVER, 0] for x in state]

    part = fresh.astype(jnp.bfloat16), solve.T
    update, decayed = multiply([fresh, part], interpret=w.interpret, meanwhile=decay_state)
    parts, rest = [], update * along(load(vectors.at[TO_END], BY_COLUMN), 1)
    for _ in range(w.tiling.parts):
        parts.append(rest.astype(jnp.bfloat16))
        rest = rest - parts[-1].astype(jnp.float32)

    def hand_update():
        s["update"].at[stater, buffer][...] = update.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.barrier_arrive(s["handed"].at[handed])
        return ()

    sums = [[x, *((part, y) for part in parts)] for x, y in zip(decayed, k, strict=True)]
    *state, _ = multiply(*sums, interpret=w.interpret, meanwhile=hand_update)
    plgpu.barrier_arrive(s["keys_free"].at[slot])
    return state


def _zero_past(length, tiles) -> None:
    """Zeros in the rows past the end of a chunk, which hold other tokens, or none and NaN."""

    @pl.when(length < CHUNK)
    def _():
        row = index(0)
        for tile in tiles:
            tile[...] = jnp.where(row < length, load(tile, WGMMA), 0)
        plgpu.commit_smem()
