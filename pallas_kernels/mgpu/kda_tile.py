"""Register arrays of a chunk of 64 tokens as the KDA kernels of Hopper lay them out."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.chunks import CHUNK

BLOCK, BLOCKS = 16, 4
WGMMA = plgpu.Layout.WGMMA
"""A block of 16 rows a warp."""
SWIZZLED = (
    plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)


def operand(x: jax.Array, spare: Any) -> Any:
    """x as the left operand of a product. The interpreter takes none from registers: it gets
    `spare`, shared memory of at least x's columns, which is None everywhere else."""
    if spare is None:
        return x
    place = spare.at[:, pl.ds(0, x.shape[1])]
    place[...] = x
    return place


def index(axis: int, columns: int = CHUNK) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (CHUNK, columns), axis, layout=WGMMA)


def load(ref: Any, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def spread(x: jax.Array, axis: int, columns: int = CHUNK) -> jax.Array:
    """One number a row (axis 0), or a column, as `[64, columns]`."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (CHUNK, columns), (axis,)), WGMMA)


def own_rows(ref, spare) -> jax.Array:
    """Row b of ref `[4, 64]` in all rows of block b, `[64, 64]`."""
    if spare is not None:
        return jnp.repeat(ref[...], BLOCK, axis=0)
    returned = plgpu.ShapeDtypeStruct((CHUNK, CHUNK), jnp.float32, layout=WGMMA)
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=returned)

    def own(ctx, ref):
        del ctx
        warp = arith.index_cast(ir.IndexType.get(), mgpu.utils.warp_idx())
        row = mgpu.FragmentedArray.load_untiled(
            mgpu.memref_slice(ref, warp), layout=mgpu.WGMMA_COL_LAYOUT, optimized=False
        )
        return row.broadcast_in_dim((CHUNK, CHUNK), (1,), mgpu.WGMMA_LAYOUT)

    return inline(own)(ref)
