"""The output of the GDN walk: one warpgroup makes and stores it behind the state, `gdn_walk`."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chunks import CHUNK
from pallas_kernels.mgpu.common import seen, store_rows
from pallas_kernels.mgpu.gdn_tiles import BY_ROW, HALF, SQUARE, WGMMA, along, load, multiply
from pallas_kernels.mgpu.gdn_work import COLUMNS, HALVES, STORED, Work


def emit(w: Work, chunk, at) -> None:
    s, slot, buffer = w.scratch, lax.rem(at, w.tiling.query_slots), lax.rem(at, 2)
    q = [seen(s["q"], w.interpret)[1].at[2 * slot + h] for h in HALVES]
    state, update = s["state"].at[buffer], s["update"].at[buffer]
    # Before the waits: device memory is slow to answer.
    start, count = w.table.token[chunk], w.table.length[chunk]
    plgpu.barrier_wait(s["queries_full"].at[slot])
    plgpu.barrier_wait(s["handed"].at[buffer])
    known, new, scale = multiply(
        [None, *((x, state.at[h].T) for h, x in zip(HALVES, q, strict=True))],
        [None, (s["attend"].at[slot], update.T)],
        interpret=w.interpret,
        meanwhile=lambda: load(s["query_vector"].at[slot], BY_ROW),
    )
    plgpu.barrier_arrive(s["taken"].at[buffer])
    plgpu.barrier_arrive(s["queries_free"].at[slot])
    copied = _stage(w, known * along(scale, 0) + new)
    store_rows(copied, w.arrays["o"].at[:, w.head, w.columns], start, count)


def _stage(w: Work, out):
    """Put an output where copies to device memory read it."""
    copied, tiles = seen(w.scratch["out"], w.interpret)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.commit_smem()
    for n in range(COLUMNS // STORED):
        tiles.at[n][...] = out[:, n * STORED : (n + 1) * STORED]
    plgpu.commit_smem()
    return copied


def fill(w: Work) -> None:
    """States that no chunk writes: final ones stay the initial ones, boundaries are zeros."""
    initial, final, boundary = (w.arrays[name] for name in ("initial", "final", "boundary"))
    layout = plgpu.Layout.WG_STRIDED(SQUARE, vec_size=4)
    listed, used = w.listed, w.used
    if listed is None:
        listed = ((w.table.length[0] > 0) | (w.table.final[0] < 1)).astype(jnp.int32)

    def tiles(state, row) -> list[Any]:
        return [state.at[row, w.head, pl.ds(h * HALF, HALF), w.columns] for h in HALVES]

    @pl.when(w.rank >= listed)
    def _():
        for source, target in zip(tiles(initial, w.rank), tiles(final, w.rank), strict=True):
            target[...] = load(source, layout)

    if not w.num_boundaries:
        return
    if used is None:

        def count(chunk, used):
            return used + (w.table.boundary[chunk] < w.num_boundaries).astype(jnp.int32)

        used = lax.fori_loop(0, w.table.boundary.shape[0], count, jnp.int32(0))

    def clear(row, _):
        @pl.when(lax.rem(row, final.shape[0]) == w.rank)
        def _():
            for tile in tiles(boundary, row):
                tile[...] = plgpu.layout_cast(jnp.zeros(SQUARE, jnp.float32), layout)

    lax.fori_loop(used, w.num_boundaries, clear, None)


def clear(w: Work) -> None:
    """Zeros in o where padding tokens are: 64 rows of every 64 * N for the block of a segment."""
    segments = w.arrays["initial"].shape[0]
    first = w.table.cu_seqlens[segments]
    tokens = min(w.arrays["v"].shape[0], w.arrays["o"].shape[0])
    pieces = lax.div(jnp.maximum(tokens - first, 0) + (CHUNK - 1), CHUNK)
    copied = _stage(w, plgpu.layout_cast(jnp.zeros(SQUARE, jnp.float32), WGMMA))

    def clear(i, _):
        start = first + (w.rank + i * segments) * CHUNK
        target = w.arrays["o"].at[:, w.head, w.columns]
        store_rows(copied, target, start, jnp.minimum(tokens - start, CHUNK))

    mine = lax.div(pieces - w.rank + (segments - 1), segments)
    lax.fori_loop(0, mine, clear, None)
    plgpu.wait_smem_to_gmem(0)
