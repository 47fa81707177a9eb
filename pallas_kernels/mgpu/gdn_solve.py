"""The inverse of I + A of two value heads, A below the diagonal and 64 tokens wide, on Hopper.

With D the inverses of the blocks of 16 on the diagonal, solved row by row, and L the rest of A,
N = -D L is nilpotent and (I + A)^-1 = (I + N)(I + N^2) D. Operands are bfloat16; L, and N and N^2
where they stand on the left, are in two parts, for what they are rounded by would not cancel where
keys are alike.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chunks import CHUNK
from pallas_kernels.mgpu.gdn_tiles import GROUP, WGMMA, index, load, multiply, parts, rounded

BLOCK = 16
_BLOCKS = CHUNK // BLOCK
_SYSTEMS = GROUP * _BLOCKS


def cut(square: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The blocks on the diagonal below each other `[64, 16]`, and those below the diagonal."""
    block = lax.div(index(0, BLOCK), BLOCK)
    columns = [square[:, b * BLOCK : (b + 1) * BLOCK] for b in range(_BLOCKS)]
    near = columns[0]
    for b in range(1, _BLOCKS):
        near = jnp.where(block == b, columns[b], near)
    far = [jnp.where(block > b, x, 0.0) for b, x in enumerate(columns)]
    return near, jnp.concatenate(far, axis=1)


def solve_diagonal(diagonal: Any, interpret: Any) -> None:
    """Replace all 8 blocks, -A, by (I + A)^-1. Row i of it is e_i - sum_j<i A_ij (row j); a thread
    has a column of a block."""
    shape = (_SYSTEMS, BLOCK, BLOCK)
    blocks = diagonal[...].reshape(shape) if interpret else diagonal.reshape(*shape)
    layout = _column_layout()
    column = plgpu.broadcasted_iota(jnp.int32, shape[:2], 1, layout=layout)
    solved = []
    for i in range(BLOCK):
        row = jnp.where(column == i, 1.0, 0.0)
        for j, earlier in enumerate(solved):
            if interpret:
                factor = blocks[:, i, j]
            else:
                factor = load(blocks.at[:, i, j], layout.reduce(1))
            spread = lax.broadcast_in_dim(factor, shape[:2], (0,))
            row = row + plgpu.layout_cast(spread, layout) * earlier
        solved.append(row)
    plgpu.commit_smem()
    if interpret:
        diagonal[...] = jnp.stack(solved, axis=1).reshape(diagonal.shape)
    else:
        for i, row in enumerate(solved):
            blocks.at[:, i, :][...] = row
    plgpu.commit_smem()


def invert(raw: Any, tiles: Any, diagonal: Any, interpret: Any) -> None:
    """Put T - I of both heads where -L is, the second half of `raw`, with its rest in `tiles`."""
    heads = range(GROUP)
    first, second, third = (
        [x.at[e + n] for e in heads] for x, n in ((raw, 0), (raw, 2), (tiles, 0))
    )

    def product(*pairs, start=(None,) * GROUP):
        sums = ([start[e], *((a[e], b[e]) for a, b in pairs)] for e in heads)
        return multiply(*sums, interpret=interpret)[:GROUP]

    def put(targets, values):
        # The tensor cores may still read there for other warps.
        plgpu.commit_smem()
        for target, value in zip(targets, values, strict=True):
            target[...] = rounded(value)
        plgpu.commit_smem()

    block = lax.div(index(0, BLOCK), BLOCK)
    inverse = []
    for e in heads:
        near = load(diagonal.at[pl.ds(e * CHUNK, CHUNK)], WGMMA)
        own = [jnp.where(block == b, near, 0.0) for b in range(_BLOCKS)]
        inverse.append(rounded(jnp.concatenate(own, axis=1)))
    # The copies of P read what is written next.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    put(first, inverse)
    high, low = zip(*map(parts, product((inverse, second), (inverse, third))), strict=True)
    put(second + third, high + low)
    same = index(0) == index(1)
    square = [jnp.where(same, 1.0, x) for x in product((second, second))]
    x = product(*((part, first) for part in zip(*map(parts, square), strict=True)))
    put(first, x)
    x = product((second, first), (third, first), start=x)
    put(second, [jnp.where(same, 0.0, y) for y in x])


def _column_layout() -> Any:
    """Warps take two systems each, a lane a column."""
    tiling = plgpu.Tiling(((_SYSTEMS, BLOCK), (2, BLOCK), (1,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
