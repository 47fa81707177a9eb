"""What Mosaic GPU kernels share: where they can run, and how their threads address memory."""

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

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
