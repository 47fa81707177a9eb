"""The shared memory of a maker of KDA on Hopper: a half for each of its two warpgroups."""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chunks import CHUNK
from pallas_kernels.mgpu.common import rows, seen
from pallas_kernels.mgpu.kda_fetch import COPIES, HALF
from pallas_kernels.mgpu.kda_gates import DIM, PADDED, REACH
from pallas_kernels.mgpu.kda_tile import BLOCK, BLOCKS, SWIZZLED

_FACTORS = REACH + BLOCKS - 1
WARPGROUPS = 2
"""That work: as many as share the registers of a multiprocessor without spilling."""


def shared_memory(decays: Any, interpreted: bool) -> dict[str, Any]:
    """For log decays of this dtype."""

    def floats(*shape: int) -> Any:
        return plgpu.SMEM((WARPGROUPS, *shape), jnp.float32)

    def operand(*shape: int) -> Any:
        return plgpu.SMEM((WARPGROUPS, *shape), jnp.bfloat16, transforms=SWIZZLED)

    halves = rows((WARPGROUPS, 2, CHUNK, HALF), jnp.bfloat16, interpreted)
    gates, factors = floats(CHUNK, PADDED), floats(_FACTORS, BLOCKS, DIM)
    # Of as many bytes as what lies in the same place, for both warpgroups to begin together.
    row = DIM * jnp.dtype(decays).itemsize
    steps = plgpu.SMEM((WARPGROUPS, 4 * CHUNK * PADDED // row, DIM), decays)
    square = operand(4 * _FACTORS * BLOCKS * DIM // (2 * CHUNK), CHUNK)
    scratch = {
        "q": halves,
        "k": halves,
        "strength": floats(2 * CHUNK),
        "k_end": operand(CHUNK, DIM),
        "sent": operand(2, CHUNK, HALF),
        "arrived": plgpu.Barrier(num_arrivals=COPIES, num_barriers=WARPGROUPS),
    }
    if not interpreted:
        shared = {"decays": (steps, gates), "products": (factors, square)}
        return scratch | {name: plgpu.RefUnion(*refs) for name, refs in shared.items()}
    # The interpreter has no references to the same place, and cannot reshape them.
    small = floats(CHUNK, BLOCK)
    spare = plgpu.SMEM((WARPGROUPS, CHUNK, DIM), jnp.bfloat16)
    scratch |= {"spare": spare, "near": small, "inverse": small}
    return scratch | {"steps": steps, "gates": gates, "factors": factors, "square": square}


def parts(scratch, warpgroup) -> dict[str, Any]:
    """References to a warpgroup's own. There share a place rows of q and k for copies and for
    products; steps and gates; factors and, once they have served, square and two `[64, 16]`
    float32, near and inverse.
    """
    interpreted = "spare" in scratch
    (q_copy, q_rows), (k_copy, k_rows) = (seen(scratch[name], interpreted) for name in "qk")
    found = {name: x for name, x in scratch.items() if name not in (*"qk", "decays", "products")}
    found |= {"q_copy": q_copy, "q_rows": q_rows, "k_copy": k_copy, "k_rows": k_rows}
    if not interpreted:
        (steps, gates), (factors, square) = scratch["decays"], scratch["products"]
        found |= {"steps": steps, "gates": gates, "factors": factors, "square": square}
    found = {name: x.at[warpgroup] for name, x in found.items()}
    found |= {name: found[name].at[pl.ds(0, CHUNK)] for name in ("steps", "square")}
    if not interpreted:
        small = (found["factors"].at[pl.ds(i, 2)].reshape(CHUNK, BLOCK) for i in (0, 2))
        found |= dict(zip(("near", "inverse"), small, strict=True))
    return found
