"""What Mosaic GPU kernels share: where they can run, and how their threads address memory."""

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

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
