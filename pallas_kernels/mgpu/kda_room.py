"""The shared memory of `kda_prep` on Hopper: small enough for two blocks a multiprocessor."""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chunks import CHUNK
from pallas_kernels.mgpu.common import rows, seen
from pallas_kernels.mgpu.kda_fetch import COPIES, HALF
from pallas_kernels.mgpu.kda_gates import DIM, PADDED, REACH
from pallas_kernels.mgpu.kda_tile import BLOCK, BLOCKS, SWIZZLED


def scratch_types(decays: Any, interpreted: bool) -> dict[str, Any]:
    """For log decays of this dtype. A first dimension of 1 is for an index that is always 0."""

    def operand(*shape: int) -> Any:
        return plgpu.SMEM((1, *shape), jnp.bfloat16, transforms=SWIZZLED)

    square = operand(CHUNK, CHUNK)
    halves = rows((1, 2, CHUNK, HALF), jnp.bfloat16, interpreted)
    steps = plgpu.SMEM((CHUNK, DIM), decays)
    gates = plgpu.SMEM((CHUNK, PADDED), jnp.float32)
    factors = plgpu.SMEM((REACH + BLOCKS - 1, BLOCKS, DIM), jnp.float32)
    scratch = {
        "q": halves,
        "k": halves,
        "strength": plgpu.SMEM((1, 2 * CHUNK), jnp.float32),
        "k_end": operand(CHUNK, DIM),
        "sent": operand(2, CHUNK, HALF),
        "arrived": plgpu.Barrier(num_arrivals=COPIES),
    }
    if not interpreted:
        shared = {"decays": (steps, gates), "products": (factors, square)}
        return scratch | {name: plgpu.RefUnion(*refs) for name, refs in shared.items()}
    # The interpreter has no references to the same place, and cannot reshape them.
    small = plgpu.SMEM((CHUNK, BLOCK), jnp.float32)
    spare = plgpu.SMEM((CHUNK, DIM), jnp.bfloat16)
    scratch |= {"spare": spare, "near": small, "inverse": small}
    return scratch | {"steps": steps, "gates": gates, "factors": factors, "square": square}


def parts(scratch) -> dict[str, Any]:
    """References to what shares a place: rows of q and k for copies and for products; steps and
    gates; factors and, once they have served, square and two `[64, 16]` float32, near and inverse.
    """
    interpreted = "spare" in scratch
    (q_copy, q_rows), (k_copy, k_rows) = (seen(scratch[name], interpreted) for name in "qk")
    found = {"q_copy": q_copy, "q_rows": q_rows, "k_copy": k_copy, "k_rows": k_rows}
    if interpreted:
        return found
    (steps, gates), (factors, square) = scratch["decays"], scratch["products"]
    near, inverse = (factors.at[pl.ds(i, 2)].reshape(CHUNK, BLOCK) for i in (0, 2))
    found |= {"steps": steps, "gates": gates, "factors": factors, "square": square}
    return found | {"near": near, "inverse": inverse}
