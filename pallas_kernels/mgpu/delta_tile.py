"""One tile of the decode step of the delta rule: `[K, block_v]` of one (request, head).

Both products with the old state are taken before it changes, so that a tile is read once and summed
over its rows once:

    p = S^T (k exp g),  r = S^T (q exp g);   u = beta (v - p)
    o = r + (q . k) u;   S <- diag(exp g) S + k u^T
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

SMS = 132
"""Multiprocessors of an H100 or H200; another number only shares tiles out less evenly."""
WARPS, LANES, VECTOR = 4, 32, 4
Refs = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How states are cut and moved.

    `block_v` value columns make a tile: 32, 64 or 128. `stages` tiles fit into the shared memory of
    a thread block; with 0 they go straight between the pool and registers. `ctas_per_sm` thread
    blocks an SM share the tiles out; with 0 every tile has its own.
    """

    block_v: int = 128
    stages: int = 3
    ctas_per_sm: int = 1

    def __post_init__(self):
        if self.block_v not in (32, 64, 128):
            raise ValueError(f"block_v={self.block_v} is none of 32, 64, 128")
        if self.stages == 0 and self.ctas_per_sm:
            raise ValueError("a tile in registers needs a thread block of its own: ctas_per_sm=0")


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for."""

    batch: int
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    layer: int
    kda: bool
    eps: float | None
    """Of the output norm; with it, gates, q | k | v and the norm are those of `delta_step`."""
    tiling: Tiling

    @property
    def fused(self) -> bool:
        return self.eps is not None

    @property
    def blocks(self) -> int:
        return self.value_dim // self.tiling.block_v

    @property
    def tiles(self) -> int:
        return self.batch * self.heads * self.blocks

    @property
    def ctas(self) -> int:
        return min(self.tiles, self.tiling.ctas_per_sm * SMS or self.tiles)


def place(shape: Shape, tile: Any) -> tuple[Any, Any, Any]:
    """(request, head, value columns) of a tile; the tiles of a head are neighbours."""
    head, block = lax.div(tile, shape.blocks), lax.rem(tile, shape.blocks)
    columns = pl.ds(block * shape.tiling.block_v, shape.tiling.block_v)
    return lax.div(head, shape.heads), lax.rem(head, shape.heads), columns


class Token(NamedTuple):
    """What a tile takes beside its state, in registers. q, k and KDA's gate have a channel a
    thread; v and the output gate lie along the columns of a tile; the others are scalars.
    """

    slot: jax.Array
    q: jax.Array
    k: jax.Array
    v: jax.Array
    beta: jax.Array
    decay: tuple[jax.Array, ...]
    """The log decay, or what it is a function of: raw, A_log, dt_bias."""
    gate: tuple[jax.Array, ...]
    """Of the output, and the weight of its norm; empty without one."""


def read(shape: Shape, refs: Refs, tile: Any) -> Token:
    b, h, columns = place(shape, tile)
    key_head = lax.div(h, shape.heads // shape.key_heads)
    channel = plgpu.Layout.WG_STRIDED((shape.key_dim,), vec_size=1)
    by_column = _tile_layout(shape.tiling.block_v).reduce(0)
    if shape.fused:
        keys, row = shape.key_heads * shape.key_dim, refs["qkv"].at[b]
        q = row.at[pl.ds(key_head * shape.key_dim, shape.key_dim)]
        k = row.at[pl.ds(keys + key_head * shape.key_dim, shape.key_dim)]
        v = row.at[pl.ds(2 * keys + h * shape.value_dim, shape.value_dim)]
    else:
        q, k, v = refs["q"].at[b, key_head], refs["k"].at[b, key_head], refs["v"].at[b, h]
    decay, gate = [refs["g"].at[b, h]], ()
    if shape.fused:
        decay += [refs["A_log"].at[h], refs["dt_bias"].at[h]]
        gate = (_load(refs["gate"].at[b, h], by_column), _load(refs["weight"], by_column))
    return Token(
        refs["slots"][b],
        _load(q, channel),
        _load(k, channel),
        _load(v.at[columns], by_column),
        refs["beta"][b, h],
        tuple(_load(x, channel) if x.ndim else x[...] for x in decay),
        gate,
    )


def update(shape: Shape, refs: Refs, scratch: Refs, tile: Any, i: Any, token: Token) -> None:
    """Advance the state of a tile by its token, send it back, and write o."""
    b, h, columns = place(shape, tile)
    # Converted only now: a conversion right behind the load would wait for it.
    token = Token(token.slot, *jax.tree.map(lambda x: x.astype(jnp.float32), token[1:]))
    stages, layout = shape.tiling.stages, _tile_layout(shape.tiling.block_v)
    home = refs["pool"].at[shape.layer, token.slot, h, :, columns]
    if not stages:
        s = _load(home, layout)
    qk, decay = _prepare(shape, scratch, token)
    if stages:
        stage = lax.rem(i, stages)
        plgpu.barrier_wait(scratch["arrived"].at[stage])
        s = _load(scratch["ring"].at[stage], layout)

    def row(name: str) -> jax.Array:
        vector = _load(scratch[name], layout.reduce(1))
        return _spread(vector, shape=s.shape, axis=0, layout=layout)

    p = jnp.sum(s * row("k_decayed"), axis=0)
    r = jnp.sum(s * row("q_decayed"), axis=0)
    beta = jax.nn.sigmoid(token.beta) if shape.fused else token.beta
    u = beta * (token.v - p)
    s = s * (row("decay") if shape.kda else decay)
    s = s + row("k") * _spread(u, shape=s.shape, axis=1, layout=layout)
    if stages:
        scratch["ring"][stage] = s
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scratch["ring"].at[stage], home)
    else:
        home[...] = s
    o = r + qk * u
    if shape.fused:
        o = _normed(shape, o.astype(refs["o"].dtype), *token.gate)
    refs["o"][b, h, columns] = o.astype(refs["o"].dtype)


def skip(shape: Shape, refs: Refs, tile: Any) -> None:
    b, h, columns = place(shape, tile)
    by_column = _tile_layout(shape.tiling.block_v).reduce(0)
    zeros = jnp.zeros((shape.tiling.block_v,), refs["o"].dtype)
    refs["o"][b, h, columns] = plgpu.layout_cast(zeros, by_column)


def row_names(shape: Shape) -> tuple[str, ...]:
    """Vectors `[K]` that every thread needs some of; one thread a channel computes them."""
    return ("k", "k_decayed", "q_decayed", *(("decay",) if shape.kda else ()))


def _prepare(shape: Shape, scratch: Refs, token: Token) -> tuple[jax.Array, jax.Array]:
    """Put the vectors of `row_names` into shared memory; returns q . k and the decay exp g."""
    k = token.k * lax.rsqrt(jnp.sum(token.k * token.k) + 1e-6)
    q = token.q * (lax.rsqrt(jnp.sum(token.q * token.q) + 1e-6) * shape.key_dim**-0.5)
    decay = jnp.exp(_log_decay(*token.decay) if shape.fused else token.decay[0])
    vectors = {"k": k, "k_decayed": k * decay, "q_decayed": q * decay, "decay": decay}
    for name in row_names(shape):
        scratch[name][...] = vectors[name]
    return jnp.sum(q * k), decay


def _log_decay(raw: jax.Array, A_log: jax.Array, dt_bias: jax.Array) -> jax.Array:
    """`gates.kda_gate` of one head, without log1p: log(1 + e) corrected for what 1 + e rounds."""
    x = raw + dt_bias
    e = jnp.exp(jnp.minimum(x, 20.0))
    one_more = 1.0 + e
    rest = one_more - 1.0
    log1p = jnp.where(rest == 0.0, e, jnp.log(one_more) * (e / jnp.where(rest == 0.0, 1.0, rest)))
    return -jnp.exp(A_log) * jnp.where(x > 20.0, x, log1p)


def _normed(shape: Shape, o: jax.Array, gate: jax.Array, weight: jax.Array) -> jax.Array:
    """The gated output norm of a head, with the casts of `gates.kda_output` and `gdn_output`."""
    assert shape.eps is not None
    dtype, o = o.dtype, o.astype(jnp.float32)
    o = o * lax.rsqrt(jnp.sum(o * o) * (1.0 / shape.value_dim) + shape.eps)
    if shape.kda:
        return o * weight * jax.nn.sigmoid(gate)
    scaled = (weight * o.astype(dtype).astype(jnp.float32)).astype(dtype).astype(jnp.float32)
    return scaled * (gate * jax.nn.sigmoid(gate))


def _load(ref: Any, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def _spread(x: jax.Array, *, shape: tuple[int, ...], axis: int, layout: Any) -> jax.Array:
    """A vector along `axis` of a tile, repeated along the other."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, (axis,)), layout)


def _tile_layout(block_v: int) -> Any:
    """Eight threads with four columns each share a row, so that a quarter of a warp touches 128
    contiguous bytes; four rows a warp; the warps side by side as far as `block_v` reaches, so that
    sums over rows cross warps as little as they can.
    """
    across = VECTOR * LANES // 4
    beside = block_v // across
    warps = {1: (-5,), 2: (-5, -4), 4: (-4,)}[beside]
    tiling = plgpu.Tiling(((4 * WARPS // beside, block_v), (4, across), (VECTOR,)))
    return plgpu.Layout.TILED(tiling, warp_dims=warps, lane_dims=(-3, -2), vector_dim=-1)
