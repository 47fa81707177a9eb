"""What Mosaic GPU kernels share: where they can run, and how their threads address memory."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chunks import CHUNK, Column

# Under warpgroup semantics Mosaic infers the layout of every register array on its own; the
# kernels here name theirs.
LANE = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


def no_hopper() -> str | None:
    """Why Hopper kernels cannot run here: no NVIDIA GPU of compute capability 9.0. None if they
    can."""
    if jax.default_backend() != "gpu":
        return f"needs an NVIDIA Hopper GPU; JAX runs on {jax.default_backend()}"
    capability = getattr(jax.devices()[0], "compute_capability", None)
    if capability != "9.0":
        return f"needs an NVIDIA Hopper GPU (compute capability 9.0), not {capability}"
    return None


def by_chunk(x: jax.Array, token: Column, length: Column) -> jax.Array:
    """`[T, H]` as `[NC, H, 64]`, the tokens of a chunk first and zeros behind them.

    `token` and `length` `[NC]` are those of a chunk table.
    """
    row = jnp.arange(CHUNK, dtype=jnp.int32)
    taken = jnp.take(x, token[:, None] + row, axis=0, mode="clip")
    real = row < length[:, None]
    return jnp.swapaxes(jnp.where(real[..., None], taken, 0.0), 1, 2)
