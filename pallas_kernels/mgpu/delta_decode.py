"""One token of the delta rule for many requests, on Hopper, in place in a pool of states.

The work is moving states: 128 KB a head and token, at hardly a FLOP a byte. Tiles travel by bulk
copies between the pool and a ring in shared memory, several on their way at once. What else a tile
takes is loaded one tile ahead: device memory is slow to answer while it is that busy.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mgpu.common import LANE, no_hopper
from pallas_kernels.mgpu.delta_tile import (
    SMS,
    Refs,
    Shape,
    Tiling,
    Token,
    place,
    read,
    row_names,
    skip,
    update,
)


def default_tiling(batch: int, heads: int) -> Tiling:
    """As measured on an H200: tiles straight to registers, narrower ones while heads cannot fill
    it; through shared memory when there are very many."""
    states = batch * heads
    if states <= SMS:
        return Tiling(32, 0, 0)
    return Tiling(64, 0, 0) if states <= 2048 else Tiling(64, 1, 0)


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
    tiling = tiling or default_tiling(batch, heads)
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
    tiling = tiling or Tiling(value_dim, 0, 0)
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
        _walk(shape, dict(zip(names, refs, strict=True)), scratch)

    ref = jax.new_ref(pool)
    o = plgpu.kernel(
        delta_decode,
        out_type=jax.ShapeDtypeStruct((shape.batch, shape.heads, shape.value_dim), dtype),
        scratch_types=_scratch(shape),
        grid=(shape.ctas,),
        grid_names=("cta",),
        compiler_params=LANE,
        interpret=interpret,
    )(slots, *operands.values(), ref)
    return jax.freeze(ref), o


def _scratch(shape: Shape) -> dict[str, Any]:
    """Vectors of the tile at work; a ring of tiles, with a barrier a stage."""
    vector = plgpu.SMEM((shape.key_dim,), jnp.float32)
    scratch: dict[str, Any] = dict.fromkeys(row_names(shape), vector)
    stages = shape.tiling.stages
    if stages:
        tile = (shape.key_dim, shape.tiling.block_v)
        scratch["ring"] = plgpu.SMEM((stages, *tile), jnp.float32)
        scratch["arrived"] = plgpu.Barrier(num_barriers=stages)
    return scratch


def _walk(shape: Shape, refs: Refs, scratch: Refs) -> None:
    """The tiles of one thread block, every `ctas`-th: fetched ahead, updated, written back."""
    stages, first, stride = shape.tiling.stages, lax.axis_index("cta"), shape.ctas
    # A stage is filled again once the bulk copy out of it has read it: one tile later, so that
    # nobody waits for the copy that was just started.
    lag = min(1, stages - 1)

    def advance(i: Any, token: Token) -> None:
        @pl.when(token.slot > 0)
        def _():
            update(shape, refs, scratch, first + i * stride, i, token)
            if stages:
                plgpu.wait_smem_to_gmem(lag, wait_read_only=True)

        @pl.when(token.slot <= 0)
        def _():
            skip(shape, refs, first + i * stride)
            if stages:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def turn(i: Any, token: Token) -> Token:
        following = jnp.minimum(first + (i + 1) * stride, shape.tiles - 1)
        ahead = read(shape, refs, following)
        advance(i, token)
        refilled = i + stages - lag

        @pl.when((i >= lag) & (first + refilled * stride < shape.tiles))
        def _():
            _fetch(shape, refs, scratch, first, refilled)

        return ahead

    for i in range(stages):
        pl.when(first + i * stride < shape.tiles)(
            functools.partial(_fetch, shape, refs, scratch, first, i)
        )
    token = read(shape, refs, first)
    if stride == shape.tiles:
        advance(0, token)
    else:
        turns = lax.div(shape.tiles - first + (stride - 1), stride)
        lax.fori_loop(0, turns, turn, token)
    if stages:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _fetch(shape: Shape, refs: Refs, scratch: Refs, first: Any, i: Any) -> None:
    """Start the copy of the i-th tile into its stage; padding has none."""
    b, h, columns = place(shape, first + i * shape.ctas)
    slot, stage = refs["slots"][b], lax.rem(i, shape.tiling.stages)

    @pl.when(slot > 0)
    def _():
        plgpu.copy_gmem_to_smem(
            refs["pool"].at[shape.layer, slot, h, :, columns],
            scratch["ring"].at[stage],
            scratch["arrived"].at[stage],
        )


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
