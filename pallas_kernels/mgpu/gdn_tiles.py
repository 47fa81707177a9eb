"""Shared memory, layouts and products of the GDN prefill kernels: squares of 64 by 64."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chunks import CHUNK
from pallas_kernels.mgpu.common import LANE, SWIZZLE

KEY, HALF = 128, 64
GROUP = 2
"""Value heads of a key head."""
SQUARE = (CHUNK, CHUNK)
PARAMS = LANE.replace(
    approx_math=True,
    # Threads read what others wrote only past a commit or a barrier that the kernel names.
    unsafe_no_auto_barriers=True,
)
WGMMA = plgpu.Layout.WGMMA
BY_ROW, BY_COLUMN = WGMMA.reduce(1), WGMMA.reduce(0)


def squares(*count: int) -> Any:
    """Shared memory for bfloat16 squares of 64."""
    tiles = plgpu.TilingTransform((8, CHUNK))  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM((*count, *SQUARE), jnp.bfloat16, transforms=(tiles, SWIZZLE))


def multiply(*sums: Any, interpret: Any, meanwhile: Callable[[], Any] = tuple) -> Any:
    """For each of `sums`, [start or None, (left, right), ...], start + the sum of left @ right,
    `[64, 64]` float32; then what `meanwhile` returns. Left is in registers or shared memory."""
    if interpret:
        # The interpreter multiplies no registers.
        out = [
            sum((jnp.dot(a[...], b[...], preferred_element_type=jnp.float32) for a, b in pairs))
            + (0.0 if start is None else start)
            for start, *pairs in sums
        ]
        return *out, meanwhile()

    def issue(*accumulators):
        for accumulator, (start, *pairs) in zip(accumulators, sums, strict=True):
            if start is not None:
                accumulator[...] = start
            for left, right in pairs:
                plgpu.wgmma(accumulator, left, right)
        other = meanwhile()
        return *(a[...] for a in accumulators), other

    accumulators = (plgpu.WGMMAAccumulatorRef(SQUARE, jnp.float32) for _ in sums)
    out, tree = jax.tree.flatten(pl.run_scoped(issue, *accumulators))
    # Without the barrier, arithmetic may move ahead of the wait for the products. It takes no
    # scalars.
    arrays = iter(lax.optimization_barrier([x for x in out if x.ndim]))
    return jax.tree.unflatten(tree, [next(arrays) if x.ndim else x for x in out])


def load(ref: Any, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def along(x: jax.Array, axis: int) -> jax.Array:
    """A vector along `axis` of a square, repeated along the other."""
    return lax.broadcast_in_dim(x, SQUARE, (axis,))


def index(axis: int, columns: int = CHUNK) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (CHUNK, columns), axis, layout=WGMMA)


def rounded(x: jax.Array) -> jax.Array:
    """x in bfloat16."""
    return x.astype(jnp.bfloat16)


def parts(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x as the sum of two bfloat16, the first one cut: if it were rounded, and needed in float32
    again, numbers would be converted one by one."""
    bits = lax.bitcast_convert_type(x, jnp.int32) & -(1 << 16)
    high = lax.bitcast_convert_type(bits, jnp.float32)
    return rounded(high), rounded(x - high)
