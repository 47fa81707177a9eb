"""The state of a run in the GDN walk: one warpgroup carries it from chunk to chunk, `gdn_walk`."""

from collections.abc import Callable
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


def carry(w: Work) -> Any:
    """Walk the state, `[V, K]` in two halves of K, through the run; how many chunks had tokens."""
    initial, final, boundary = (w.arrays[x] for x in ("initial", "final", "boundary"))
    counts = final.shape[0], w.num_boundaries

    def store(target, row, state):
        for h, x in zip(HALVES, state, strict=True):
            tile = target.at[row, w.head, pl.ds(h * HALF, HALF), w.columns]
            tile.T[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)

    def start(segment, mode, state):
        return [_started(w, segment, mode, h, x) for h, x in zip(HALVES, state, strict=True)]

    def read(chunk):
        columns = ("start", "length", "segment", "final", "boundary")
        return tuple(getattr(w.table, name)[chunk] for name in columns)

    def chunk(c, carry):
        state, values, done, row = carry
        mode, length, segment, *targets = row
        following = jnp.minimum(c + 1, w.stop - 1)

        def advance(_, carry):
            state, values, _ = carry
            return _advance(w, state, values, length, done, lambda: read(following))

        # Loops of one turn or none: values of a branch.
        some, begins = (x.astype(jnp.int32) for x in (length > 0, mode != CONTINUE))
        state = lax.fori_loop(0, begins, lambda _, x: start(segment, mode, x), state)
        state, values, row = lax.fori_loop(0, some, advance, (state, values, row))
        row = lax.fori_loop(0, 1 - some, lambda *_: read(following), row)
        for target, to, count in zip((final, boundary), targets, counts, strict=True):

            @pl.when(to < count)
            def _(target=target, to=to):
                store(target, to, state)

        return state, values, done + some, row

    zero = plgpu.layout_cast(jnp.zeros(SQUARE, jnp.float32), WGMMA)

    row = read(jnp.minimum(w.first, w.table.start.shape[0] - 1))
    carry = [zero for _ in HALVES], zero.astype(jnp.bfloat16), jnp.int32(0), row
    return lax.fori_loop(w.first, w.stop, chunk, carry)[2]


def _started(w: Work, segment, mode, half: int, state):
    """A half of the state at the start of a segment; before it, `state`."""
    channels = pl.ds(half * HALF, HALF)
    tile = w.arrays["initial"].at[segment, w.head, channels, w.columns]
    loaded = load(tile.T, plgpu.Layout.WGMMA_TRANSPOSED)
    loaded = plgpu.layout_cast(loaded, WGMMA)
    if "keep" in w.arrays:
        kept = along(load(w.arrays["keep"].at[w.head, channels], BY_COLUMN), 1) != 0
        loaded = jnp.where(kept | (mode != MERGE), loaded, state)
    return jnp.where((mode == MERGE) | (mode == SLOT), loaded, 0.0)


def _advance(w: Work, state, values, length, at, read: Callable[[], Any]):
    """The state behind a chunk, the values of the next one and its row of the table, from `read`;
    leaves what the outputter needs.

    What is no link of the chain is put between the start of a product and the wait for it.
    """
    s, slot, buffer = w.scratch, lax.rem(at, w.tiling.key_slots), lax.rem(at, 2)
    k = [seen(s["k"], w.interpret)[1].at[2 * slot + h] for h in HALVES]
    solve, vectors = s["solve"].at[slot], s["key_vectors"].at[slot]
    rounded = [x.astype(jnp.bfloat16) for x in state]
    first = (at == 0).astype(jnp.int32)
    values = lax.fori_loop(0, first, lambda *_: _values(w, 0), values)
    _zero_past(length, k)

    def hand_state():
        @pl.when(at >= 2)
        def _():
            plgpu.barrier_wait(s["taken"].at[buffer])

        for h, x in zip(HALVES, rounded, strict=True):
            s["state"].at[buffer, h][...] = x
        return _scaled(values, vectors, length), load(vectors.at[ERASE], BY_COLUMN)

    known = [None, *((x, y.T) for x, y in zip(rounded, k, strict=True))]
    known, (scaled, erase) = multiply(known, interpret=w.interpret, meanwhile=hand_state)
    fresh = scaled + known * along(erase, 1)
    part = fresh.astype(jnp.bfloat16), solve.T

    def decay_state():
        decayed = [x * vectors[OVER, 0] for x in state]
        return decayed, load(vectors.at[TO_END], BY_COLUMN), read()

    update, (decayed, to_end, row) = multiply(
        [fresh, part], interpret=w.interpret, meanwhile=decay_state
    )
    parts, rest = [], update * along(to_end, 1)
    for _ in range(w.tiling.parts):
        parts.append(rest.astype(jnp.bfloat16))
        rest = rest - parts[-1].astype(jnp.float32)

    def hand_update():
        s["update"].at[buffer][...] = update.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.barrier_arrive(s["handed"].at[buffer])
        return _values(w, at + 1)

    sums = [[x, *((part, y) for part in parts)] for x, y in zip(decayed, k, strict=True)]
    *state, values = multiply(*sums, interpret=w.interpret, meanwhile=hand_update)
    plgpu.barrier_arrive(s["keys_free"].at[slot])
    return state, values, row


def _values(w: Work, at):
    """V^T of a chunk, once its copies are there. The loader brings one more than there are."""
    s, slot = w.scratch, lax.rem(at, w.tiling.key_slots)
    plgpu.barrier_wait(s["keys_full"].at[slot])
    v = seen(s["v"], w.interpret)[1].at[slot]
    return load(v.T, WGMMA)


def _scaled(values, vectors, length):
    """beta V^T without the columns past the end of a chunk, which are other tokens, or none and
    NaN."""
    scaled = values.astype(jnp.float32) * along(load(vectors.at[STRENGTH], BY_COLUMN), 1)
    short = (length < CHUNK).astype(jnp.int32)
    return lax.fori_loop(0, short, lambda _, x: jnp.where(index(1) < length, x, 0.0), scaled)


def _zero_past(length, tiles) -> None:
    """Zeros in the rows past the end of a chunk, which hold other tokens, or none and NaN."""

    @pl.when(length < CHUNK)
    def _():
        row = index(0)
        for tile in tiles:
            tile[...] = jnp.where(row < length, load(tile, WGMMA), 0)
        plgpu.commit_smem()
