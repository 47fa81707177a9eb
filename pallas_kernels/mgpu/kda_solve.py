"""The triangular system of a chunk of 64 tokens, solved by one warpgroup on Hopper.

Everything is transposed, `[j, i]`. The blocks of 16 on the diagonal are inverted by substitution in
float32; with D their inverse and N = D times the rest, which is nilpotent, the inverse of the whole
is (I - N)(I + N^2) D, of bfloat16 operands.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chunks import CHUNK
from pallas_kernels.mgpu.kda_tile import BLOCK, BLOCKS, WGMMA, index, load, operand

# A warp a block, a lane a column: twice, for a warp has 32 lanes.
_BY_BLOCK = plgpu.Layout.TILED(
    plgpu.Tiling(((BLOCKS, BLOCK), (1,))),
    warp_dims=(-3,),
    lane_dims=(plgpu.Replicated(2), -2),
    vector_dim=-1,
)


def inverted(
    erase: jax.Array,
    near: jax.Array,
    small: tuple[Any, Any],
    squares: tuple[Any, Any],
    spare: Any,
) -> jax.Array:
    """(I + L)^-1 transposed, float32 `[64, 64]`.

    `erase` bfloat16 `[64, 64]` is L^T outside the diagonal blocks, `near` float32 `[64, 16]` inside
    (row j, column i of its block). `small` are two float32 `[64, 16]` and `squares` two bfloat16
    `[64, 64]` of shared memory, the second maybe in the place of `small`, that nobody
    uses; `spare` as `operand` takes it.
    """
    interpreted = spare is not None
    small[0][...] = near
    plgpu.commit_smem()
    _substitute(small[0], small[1], interpreted)
    plgpu.commit_smem()
    block = load(small[1], WGMMA)
    inside = index(0, BLOCK)
    diagonal = jnp.concatenate(
        [
            jnp.where((inside >= b * BLOCK) & (inside < (b + 1) * BLOCK), block, 0.0)
            for b in range(BLOCKS)
        ],
        axis=1,
    )
    rounded = diagonal.astype(jnp.bfloat16)
    squares[0][...] = rounded
    plgpu.commit_smem()
    rest = product(erase, squares[0], spare).astype(jnp.bfloat16)
    squares[1][...] = rest
    plgpu.commit_smem()
    squares[0][...] = product(rest, squares[1], spare).astype(jnp.bfloat16)
    plgpu.commit_smem()
    x = diagonal + product(rounded, squares[0], spare)
    return x - product(x.astype(jnp.bfloat16), squares[1], spare)


def _substitute(erase, inverse, interpreted: bool) -> None:
    """inverse[16 b + c, i] = ((I + L_b)^-1)[i, c] where erase[16 b + s, i] = L_b[i, s], s < i."""
    column = plgpu.broadcasted_iota(jnp.int32, (BLOCKS, BLOCK), 1, layout=_BY_BLOCK)
    # Else the rows of the identity are kept in registers from one solve to the next.
    column = lax.optimization_barrier(column)
    solved = []
    for i in range(BLOCK):
        x = jnp.where(column == i, 1.0, 0.0)
        for s in range(i):
            entry = _by_block(erase, s, i, interpreted)
            entry = lax.broadcast_in_dim(entry, (BLOCKS, BLOCK), (0,))
            x = x - plgpu.layout_cast(entry, _BY_BLOCK) * solved[s]
        solved.append(x)
    if interpreted:
        inverse[...] = jnp.stack(solved, axis=-1).reshape(CHUNK, BLOCK)
        return
    for i, x in enumerate(solved):
        inverse.reshape(BLOCKS, BLOCK, BLOCK).at[:, :, i][...] = x


def _by_block(erase, s: int, i: int, interpreted: bool) -> jax.Array:
    """L_b[i, s] of every block b. The interpreter cannot reshape references."""
    if interpreted:
        return erase[...].reshape(BLOCKS, BLOCK, BLOCK)[:, s, i]
    return load(erase.reshape(BLOCKS, BLOCK, BLOCK).at[:, s, i], _BY_BLOCK.reduce(1))


def product(a: jax.Array, b: Any, spare: Any, shape: tuple[int, int] = (CHUNK, CHUNK)) -> jax.Array:
    """a b, float32: a bfloat16 in registers, b in shared memory."""

    def multiply(acc):
        plgpu.wgmma(acc, operand(a, spare), b)
        return acc[...]

    # Without the barrier, arithmetic may move ahead of the wait for the product.
    accumulator = plgpu.WGMMAAccumulatorRef(shape, jnp.float32)
    return lax.optimization_barrier(pl.run_scoped(multiply, accumulator))
