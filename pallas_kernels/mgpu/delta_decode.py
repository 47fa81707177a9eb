"""One token of the delta rule for many requests, on Hopper, in place in a pool of states.

The work is moving states: 128 KB a head and token, at hardly a FLOP a byte. Every tile of a state
has a thread block of its own, and as many as fit into a multiprocessor keep its loads and stores on
their way.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mgpu.common import LANE, no_hopper
from pallas_kernels.mgpu.delta_tile import (
    Refs,
    Shape,
    Tiling,
    place,
    row_names,
    update,
)

SMS = 132
"""Multiprocessors of an H100 or H200."""
MANY = 2048
"""States beyond which it pays, on an H200, to send them through shared memory."""


def decode_tiling(states: int) -> Tiling:
    """As measured on an H200: narrow tiles, which wait for nothing but loads, while there are too
    few states to fill it."""
    if states <= SMS:
        return Tiling(32, 0, "registers")
    return Tiling(64, int(states > MANY))


def step_tiling(states: int, value_dim: int) -> Tiling:
    """Whole heads, over which the output norm is taken."""
    return Tiling(value_dim, int(states > MANY))


def decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    pool: jax.Array,
    slots: jax.Array,
    layer: int,
    *,
    tiling: Tiling | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """`delta_decode`: (pool, o `[B, H, V]` float32)."""
    (batch, heads, value_dim), (_, key_heads, key_dim) = v.shape, q.shape
    tiling = tiling or decode_tiling(batch * heads)
    shape = Shape(
        batch, heads, key_heads, key_dim, value_dim, layer, kda=g.ndim == 3, eps=None, tiling=tiling
    )
    arrays = (q, k, v, g.astype(jnp.float32), beta.astype(jnp.float32))
    operands: dict[str, jax.Array] = dict(zip(("q", "k", "v", "g", "beta"), arrays, strict=True))
    return _launch(shape, operands, pool, slots, jnp.float32, interpret)


def step(
    qkv: jax.Array,
    raw: jax.Array,
    beta: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    gate: jax.Array,
    weight: jax.Array,
    pool: jax.Array,
    slots: jax.Array,
    layer: int,
    eps: float,
    *,
    tiling: Tiling | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """`delta_step`: (pool, y `[B, H, V]` in qkv's dtype)."""
    (batch, heads, value_dim), key_dim = gate.shape, pool.shape[3]
    key_heads = (qkv.shape[1] - heads * value_dim) // (2 * key_dim)
    tiling = tiling or step_tiling(batch * heads, value_dim)
    if tiling.vectors == "registers":
        raise ValueError("vectors=registers: gates of delta_step are computed once a channel")
    if tiling.block_v != value_dim:
        raise ValueError(f"block_v={tiling.block_v}: the output norm spans all {value_dim} columns")
    shape = Shape(
        batch,
        heads,
        key_heads,
        key_dim,
        value_dim,
        layer,
        kda=raw.ndim == 3,
        eps=eps,
        tiling=tiling,
    )
    names = ("qkv", "g", "beta", "A_log", "dt_bias", "gate", "weight")
    arrays = (qkv, raw, beta, A_log, dt_bias, gate, weight)
    operands: dict[str, jax.Array] = dict(zip(names, arrays, strict=True))
    return _launch(shape, operands, pool, slots, qkv.dtype, interpret)


def _launch(
    shape: Shape,
    operands: dict[str, jax.Array],
    pool: jax.Array,
    slots: jax.Array,
    dtype: Any,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    names = ("slots", *operands, "pool", "o")

    def delta_decode(*refs, **scratch):
        _advance(shape, dict(zip(names, refs, strict=True)), scratch)

    ref = jax.new_ref(pool)
    o = plgpu.kernel(
        delta_decode,
        out_type=jax.ShapeDtypeStruct((shape.batch, shape.heads, shape.value_dim), dtype),
        scratch_types=_scratch(shape),
        grid=(shape.tiles,),
        grid_names=("tile",),
        compiler_params=dataclasses.replace(LANE, unsafe_no_auto_barriers=shape.tiling.unfenced),
        interpret=interpret,
    )(slots, *operands.values(), ref)
    return jax.freeze(ref), o


def _scratch(shape: Shape) -> dict[str, Any]:
    """Vectors of the tile; if it passes through, room for it and the barrier of its arrival."""
    vector = plgpu.SMEM((shape.key_dim,), jnp.float32)
    scratch: dict[str, Any] = dict.fromkeys(row_names(shape), vector)
    if shape.tiling.stages:
        scratch["state"] = plgpu.SMEM((shape.key_dim, shape.tiling.block_v), jnp.float32)
        scratch["arrived"] = plgpu.Barrier()
    return scratch


def _advance(shape: Shape, refs: Refs, scratch: Refs) -> None:
    """The tile of one thread block: fetched, updated, written back."""
    tile = lax.axis_index("tile")
    if not shape.tiling.stages:
        update(shape, refs, scratch, tile)
        return
    b, h, columns = place(shape, tile)
    slot = jnp.maximum(refs["slots"][b], 0)
    plgpu.copy_gmem_to_smem(
        refs["pool"].at[shape.layer, slot, h, :, columns], scratch["state"], scratch["arrived"]
    )
    update(shape, refs, scratch, tile)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def refuses_decode(*args: Any) -> str | None:
    """Why `decode` cannot take these arguments."""
    q, k, v, _, _, pool, *_ = args
    if len({x.dtype for x in (q, k, v)}) > 1:
        return f"q, k and v of {q.dtype}, {k.dtype} and {v.dtype}, built for one dtype"
    return no_hopper() or _unknown(pool, q)


def refuses_step(*args: Any) -> str | None:
    """Why `step` cannot take these arguments."""
    *inputs, pool, _, _, _ = args
    return no_hopper() or _unknown(pool, *inputs)


def _unknown(pool: Any, *inputs: Any) -> str | None:
    """What of these shapes and dtypes the kernel was not built and tested for."""
    if pool.shape[3:] != (128, 128):
        return f"states of {pool.shape[3:]}, built for (128, 128)"
    others = {x.dtype.name for x in inputs} - {"bfloat16", "float32"}
    if others:
        return f"inputs of {', '.join(sorted(others))}, built for bfloat16 and float32"
    return None if inputs[0].shape[0] else "no request"
