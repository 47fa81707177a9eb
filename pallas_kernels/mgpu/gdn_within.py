"""What the 64 tokens of a chunk are to each other under the gated delta rule, on Hopper.

No state is in it, so all chunks and key heads are done side by side, a block of threads each. With
G the cumulative log decay inside the chunk and k^, q^ the normalised keys and queries:

    A_ij = beta_i k^_i . k^_j exp(G_i - G_j)  (j < i);    T = (I + A)^-1
    P_ij = q^_i . k^_j exp(G_i - G_j)  (j <= i)

The products are taken of the raw rows, which are bfloat16 and therefore exact in the tensor cores;
norms and decays multiply them in float32. The inverse is solved row by row in blocks of 16, then
merged to 32 and to 64 by products of two bfloat16 halves an operand.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chunks import CHUNK
from pallas_kernels.mgpu.common import LANE

KEY = 128
GROUP = 2
"""Value heads of a key head, which a block of threads solves together."""
FROM_START, TO_END, QUERY, OVER, STRENGTH = range(5)
"""Rows of the vectors of a chunk: what scales k^T S, k of the new state, q^T S; the decay of the
whole chunk; beta."""
_BLOCK = 16
_BLOCKS = CHUNK // _BLOCK
SQUARE = (CHUNK, CHUNK)
SWIZZLED = (
    plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)
PARAMS = LANE.replace(
    approx_math=True,
    # Threads read what others wrote only past a commit or a barrier that the kernel names.
    unsafe_no_auto_barriers=True,
)
WGMMA = plgpu.Layout.WGMMA
BY_ROW, BY_COLUMN = WGMMA.reduce(1), WGMMA.reduce(0)


class Within(NamedTuple):
    """Of all chunks: k, q `[NC, Hk, 64, K]` bfloat16, rows past a chunk's length zero; solve (T)
    and attend (P) `[NC, H, 64, 64]` bfloat16; vectors `[NC, H, 5, 64]` float32. Arbitrary in chunks
    of length 0."""

    k: jax.Array
    q: jax.Array
    solve: jax.Array
    attend: jax.Array
    vectors: jax.Array


def within(
    q: jax.Array,
    k: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    token: jax.Array,
    length: jax.Array,
    interpret: Any,
) -> Within:
    """Raw q, k `[T, Hk, K]` bfloat16; g (bounded from below), beta `[NC, H, 64]` float32, zeros
    past a chunk's length; token, length `[NC]` int32."""
    chunks, heads, _ = g.shape
    key_heads = k.shape[1]
    rows = jax.ShapeDtypeStruct((chunks, key_heads, CHUNK, KEY), jnp.bfloat16)
    square = jax.ShapeDtypeStruct((chunks, heads, *SQUARE), jnp.bfloat16)
    kernel = plgpu.kernel(
        partial(_body, key_heads),
        out_type=(
            rows,
            rows,
            square,
            square,
            jax.ShapeDtypeStruct((chunks, heads, 5, CHUNK), jnp.float32),
        ),
        grid=(chunks * key_heads,),
        grid_names=("item",),
        scratch_types={
            "norms": plgpu.SMEM((2, CHUNK), jnp.float32),
            "sums": plgpu.SMEM((GROUP, CHUNK), jnp.float32),
            "full": plgpu.Barrier(num_arrivals=2),
        },
        compiler_params=PARAMS,
        interpret=interpret,
        kernel_name="gdn_within",
    )
    return Within(*kernel(q, k, g, beta, token, length))


def _body(key_heads, q, k, g, beta, token, length, k_out, q_out, solve, attend, vectors, **scratch):
    item = lax.axis_index("item")
    chunk, head = lax.div(item, key_heads), lax.rem(item, key_heads)
    count = length[chunk]

    @pl.when(count > 0)
    def _():
        rows = pl.ds(token[chunk], CHUNK)
        sources = k.at[rows, head], q.at[rows, head]
        targets = k_out.at[chunk, head], q_out.at[chunk, head]
        plain = pl.run_scoped(
            partial(_plain, sources, targets, count, scratch),
            plgpu.SMEM((2, CHUNK, KEY), jnp.bfloat16),
            plgpu.SMEM((2, CHUNK, KEY), jnp.bfloat16, transforms=SWIZZLED),
        )
        of_heads = [
            tuple(x.at[chunk, head * GROUP + e] for x in (g, beta, solve, attend, vectors))
            for e in range(GROUP)
        ]
        pl.run_scoped(
            partial(_heads, plain, of_heads, scratch),
            plgpu.SMEM((GROUP, *SQUARE), jnp.float32),
            plgpu.SMEM((GROUP * _BLOCKS, _BLOCK, _BLOCK), jnp.float32),
            plgpu.SMEM((4, *SQUARE), jnp.bfloat16, transforms=SWIZZLED),
        )


def _plain(sources, targets, count, scratch, raw, rows):
    """K K^T and Q K^T of the raw rows; leaves 1 / |k| and K**-0.5 / |q| in `norms`.

    The raw copies are not tiled, because a chunk may start at any token.
    """
    for i, source in enumerate(sources):
        plgpu.copy_gmem_to_smem(source, raw.at[i], scratch["full"])
    plgpu.barrier_wait(scratch["full"])
    for i, scale in enumerate((1.0, KEY**-0.5)):
        x = plgpu.load(raw.at[i], layout=_wide_rows(), optimized=False)
        row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=_wide_rows())
        x = jnp.where(row < count, x, 0)
        rows.at[i][...] = x
        x = x.astype(jnp.float32)
        scratch["norms"].at[i][...] = lax.rsqrt(jnp.sum(x * x, axis=1) + 1e-6) * scale
    plgpu.commit_smem()
    for i, target in enumerate(targets):
        plgpu.copy_smem_to_gmem(rows.at[i], target)

    def product(kk, qk):
        plgpu.wgmma(kk, rows.at[0], rows.at[0].T)
        plgpu.wgmma(qk, rows.at[1], rows.at[0].T)
        return kk[...], qk[...]

    accumulator = plgpu.WGMMAAccumulatorRef(SQUARE, jnp.float32)
    plain = lax.optimization_barrier(pl.run_scoped(product, accumulator, accumulator))
    _wait_for_copies()
    return plain


def _heads(plain, of_heads, scratch, squares, diagonal, tiles):
    for e, (g, beta, _, attend, vectors) in enumerate(of_heads):
        erase, attended = _decayed(plain, g, beta, vectors, scratch, scratch["sums"].at[e])
        squares.at[e][...] = erase
        tiles.at[e][...] = attended.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tiles.at[e], attend)
    _solve_diagonal(squares, diagonal)
    _wait_for_copies()
    for e, (_, _, solve, _, _) in enumerate(of_heads):
        inverse = _merged(plgpu.load(squares.at[e], layout=WGMMA, optimized=False), tiles)
        plgpu.commit_smem()
        tiles.at[0][...] = inverse.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tiles.at[0], solve)
        _wait_for_copies()
    plgpu.wait_smem_to_gmem(0)


def _decayed(plain, g, beta, vectors, scratch, sums):
    """A and P of a value head; writes its vectors."""
    i, j = (plgpu.broadcasted_iota(jnp.int32, SQUARE, axis, layout=WGMMA) for axis in (0, 1))
    before = jnp.where(j <= i, _along(_load(g, BY_COLUMN), 1), 0.0)
    total = jnp.sum(before, axis=1)
    sums[...] = total
    plgpu.commit_smem()
    last = sums[CHUNK - 1]
    k_norm, q_norm = (_load(scratch["norms"].at[x], BY_ROW) for x in (0, 1))
    from_start = jnp.exp(total)
    strength = _load(beta, BY_ROW)
    vectors.at[STRENGTH][...] = strength
    vectors.at[FROM_START][...] = strength * from_start * k_norm
    vectors.at[TO_END][...] = jnp.exp(last - total) * k_norm
    vectors.at[QUERY][...] = from_start * q_norm
    vectors.at[OVER][...] = jnp.exp(total * 0.0 + last)
    apart = _along(total, 0) - _along(_load(sums, BY_COLUMN), 1)
    decay = jnp.exp(jnp.where(j <= i, apart, 0.0))
    decay = decay * _along(_load(scratch["norms"].at[0], BY_COLUMN), 1)
    kk, qk = plain
    erase = kk * decay * _along(k_norm * strength, 0)
    attended = qk * decay * _along(q_norm, 0)
    return jnp.where(j < i, erase, 0.0), jnp.where(j <= i, attended, 0.0)


def _solve_diagonal(squares, diagonal):
    """Replace the blocks of 16 on the diagonals of `squares` (A) by those of (I + A)^-1.

    Row i of an inverse is e_i - sum_j<i A_ij (row j); a thread has a column of one of 8 blocks.
    """
    places = [(e, pl.ds(b * _BLOCK, _BLOCK)) for e in range(GROUP) for b in range(_BLOCKS)]
    for n, (e, block) in enumerate(places):
        diagonal.at[n][...] = _load(squares.at[e, block, block], _block_layout())
    plgpu.commit_smem()
    layout, shape = _column_layout(), (len(places), _BLOCK)
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
    solved = []
    for i in range(_BLOCK):
        row = jnp.where(column == i, 1.0, 0.0)
        for j, earlier in enumerate(solved):
            factor = _load(diagonal.at[:, i, j], layout.reduce(1))
            spread = lax.broadcast_in_dim(factor, shape, (0,))
            row = row - plgpu.layout_cast(spread, layout) * earlier
        solved.append(row)
    plgpu.commit_smem()
    for i, row in enumerate(solved):
        diagonal.at[:, i, :][...] = row
    plgpu.commit_smem()
    for n, (e, block) in enumerate(places):
        squares.at[e, block, block][...] = _load(diagonal.at[n], _block_layout())
    plgpu.commit_smem()


def _merged(mixed, tiles):
    """(I + A)^-1 from A with the inverses of its diagonal blocks of 16 in their place.

    Of two blocks, [[D, 0], [C, E]]^-1 has -E^-1 C D^-1 below; done for all pairs of a size at once.
    """
    i, j = (plgpu.broadcasted_iota(jnp.int32, SQUARE, axis, layout=WGMMA) for axis in (0, 1))
    inverse = jnp.where(lax.div(i, _BLOCK) == lax.div(j, _BLOCK), mixed, 0.0)
    size = _BLOCK
    while size < CHUNK:
        own, other = lax.div(i, size), lax.div(j, size)
        below = (own == other + 1) & (lax.rem(own, 2) == 1)
        left = jnp.where(below, mixed, 0.0)
        inverse = inverse - _product(inverse, _product(left, inverse, tiles), tiles)
        size *= 2
    return inverse


def _product(left, right, tiles):
    """left @ right, `[64, 64]` float32, to about 16 bits."""
    plgpu.commit_smem()
    for n, x in enumerate((left, right)):
        high = x.astype(jnp.bfloat16)
        tiles.at[2 * n][...] = high
        tiles.at[2 * n + 1][...] = (x - high.astype(jnp.float32)).astype(jnp.bfloat16)
    plgpu.commit_smem()

    def product(acc):
        for a, b in ((0, 2), (0, 3), (1, 2)):
            plgpu.wgmma(acc, tiles.at[a], tiles.at[b])
        return acc[...]

    accumulator = plgpu.WGMMAAccumulatorRef(SQUARE, jnp.float32)
    return lax.optimization_barrier(pl.run_scoped(product, accumulator))


def _wait_for_copies() -> None:
    """Until all threads may write again where copies to device memory read."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.commit_smem()


def _load(ref: Any, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def _along(x: jax.Array, axis: int) -> jax.Array:
    """A vector along `axis` of a square, repeated along the other."""
    return lax.broadcast_in_dim(x, SQUARE, (axis,))


def _tiled(rows: int, columns: int, at_once: int, vector: int) -> Any:
    """Warps take `at_once` rows each, a lane `vector` neighbours of a row."""
    tiling = plgpu.Tiling(((rows, columns), (at_once, columns), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


_wide_rows: Callable[[], Any] = partial(_tiled, 8, KEY, 2, 8)
_block_layout: Callable[[], Any] = partial(_tiled, _BLOCK, _BLOCK, 4, 2)
_column_layout: Callable[[], Any] = partial(_tiled, GROUP * _BLOCKS, _BLOCK, 2, 1)
