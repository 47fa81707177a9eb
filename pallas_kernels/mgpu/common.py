"""What Mosaic GPU kernels share: where they can run, and how their threads address memory."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chunks import CHUNK

# Under warpgroup semantics Mosaic infers the layout of every register array on its own; the
# kernels here name theirs.
LANE = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
SWIZZLE = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]


def no_hopper() -> str | None:
    """Why Hopper kernels cannot run here: no NVIDIA GPU of compute capability 9.0. None if they
    can."""
    if jax.default_backend() != "gpu":
        return f"needs an NVIDIA Hopper GPU; JAX runs on {jax.default_backend()}"
    capability = getattr(jax.devices()[0], "compute_capability", None)
    if capability != "9.0":
        return f"needs an NVIDIA Hopper GPU (compute capability 9.0), not {capability}"
    return None


def rows(shape: tuple[int, ...], dtype: Any, interpret: Any) -> Any:
    """Shared memory for rows of 128 bytes, seen in two ways: as what copies that start at any row
    of device memory fill or read, and in the tiles of 8 rows that tensor cores read."""
    if interpret:
        return plgpu.SMEM(shape, dtype)
    tiles = plgpu.TilingTransform((8, shape[-1]))  # pyright: ignore[reportAbstractUsage]
    return plgpu.RefUnion(
        plgpu.SMEM(shape, dtype, transforms=(SWIZZLE,)),
        plgpu.SMEM(shape, dtype, transforms=(tiles, SWIZZLE)),
    )


def seen(ref: Any, interpret: Any) -> tuple[Any, Any]:
    """(for copies, for everything else) of what `rows` made."""
    return (ref, ref) if interpret else tuple(ref)


def store_rows(copied: Any, target: Any, start: Any, count: Any) -> None:
    """target[start : start + count] = the first rows of copied `[n, 64, C]`, whose n parts lie side
    by side in the columns of target, as copies of 2^i rows; count <= 64."""
    parts, _, columns = copied.shape
    size, row = CHUNK, 0
    while size:

        @pl.when((count & size) != 0)
        def _(size=size, row=row):
            for n in range(parts):
                place = target.at[pl.ds(start + row, size), pl.ds(n * columns, columns)]
                plgpu.copy_smem_to_gmem(copied.at[n, pl.ds(row, size)], place)

        row = row + (count & size)
        size //= 2


def visit_chunks(first: Any, stop: Any, length: Any, visit: Callable[[Any, Any], None]) -> Any:
    """`visit(chunk, done)` for the chunks with tokens, `done` of them before; how many in all."""

    def step(chunk, done):
        some = (length[chunk] > 0).astype(jnp.int32)

        @pl.when(some > 0)
        def _():
            visit(chunk, done)

        return done + some

    return lax.fori_loop(first, stop, step, jnp.int32(0))


def drain(barrier: Any, arrived: Any, begun: Any = None) -> None:
    """Wait for the last arrivals, one a slot, so that none is left when the block ends. Each use of
    a slot but its first waited for the one before; `begun` uses, if not as many as arrivals."""
    slots = math.prod(barrier.shape)

    def wait(i, _):
        plgpu.barrier_wait(barrier.at[lax.rem(i, slots)] if barrier.shape else barrier)

    begun = arrived if begun is None else begun
    lax.fori_loop(jnp.maximum(begun - slots, 0), arrived, wait, None)
