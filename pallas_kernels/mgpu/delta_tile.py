"""One tile of the decode step of the delta rule: `[K, block_v]` of one (request, head).

Both products with the old state are taken before it changes, so that a tile is read once and summed
over its rows once:

    p = S^T (k exp g),  r = S^T (q exp g);   u = beta (v - p)
    o = r + (q . k) u;   S <- diag(exp g) S + k u^T

Nothing branches before the end: a load behind a branch waits for what decides it, and device memory
is slow to answer while it is busy.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

WARPS, LANES, VECTOR = 4, 32, 4
Refs = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How states are cut and moved; every tile has a thread block of its own.

    `block_v` value columns make a tile: 32, 64 or 128. With 0 `stages` it goes straight between the
    pool and registers; with 1, by bulk copies through shared memory, so that a thread block waiting
    for its state needs no registers for it.

    The vectors of a tile reach the threads that need them through "shared" memory, after one thread
    a channel has computed them, or every thread loads and computes those of its rows in
    "registers": more work, but nothing is exchanged before the products.
    """

    block_v: int
    stages: int
    vectors: Literal["shared", "registers"] = "shared"

    def __post_init__(self):
        if self.block_v not in (32, 64, 128):
            raise ValueError(f"block_v={self.block_v} is none of 32, 64, 128")
        if self.stages not in (0, 1):
            raise ValueError(f"stages={self.stages} is neither 0 nor 1")
        if self.vectors == "registers" and self.stages:
            raise ValueError("vectors=registers needs the tile in registers too: stages=0")

    @property
    def unfenced(self) -> bool:
        """Whether what threads share is fenced by hand: automatic barriers hold loads back."""
        return self.vectors == "registers" or self.stages == 1

    @property
    def layout(self) -> Any:
        """Of a tile in registers. Its warps share the rows as far as each has 128 bytes of them;
        without an exchange through shared memory, they only share columns."""
        down = 1 if self.vectors == "registers" else WARPS * LANES // self.block_v
        return _tile_layout(self.block_v, down)


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


def place(shape: Shape, tile: Any) -> tuple[Any, Any, Any]:
    """(request, head, value columns) of a tile; the tiles of a head are neighbours."""
    head, block = lax.div(tile, shape.blocks), lax.rem(tile, shape.blocks)
    columns = pl.ds(block * shape.tiling.block_v, shape.tiling.block_v)
    return lax.div(head, shape.heads), lax.rem(head, shape.heads), columns


class Token(NamedTuple):
    """What a tile takes beside its state, in registers. q, k and KDA's gate have a channel a
    thread, or with vectors in registers lie along the rows of a tile; v and the output gate lie
    along its columns; the others are scalars.
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
    if shape.tiling.vectors == "registers":
        channel = shape.tiling.layout.reduce(1)
    by_column = shape.tiling.layout.reduce(0)
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


def update(shape: Shape, refs: Refs, scratch: Refs, tile: Any) -> None:
    """Advance the state of a tile by its token, send it back, and write o. Padding computes too, on
    slot 0; all of it is dropped."""
    b, h, columns = place(shape, tile)
    slot, layout = refs["slots"][b], shape.tiling.layout
    home = refs["pool"].at[shape.layer, jnp.maximum(slot, 0), h, :, columns]
    token = read(shape, refs, tile)
    s = None if shape.tiling.stages else _load(home, layout)
    # Converted only now: a conversion right behind a load would wait for it.
    token = Token(token.slot, *jax.tree.map(lambda x: x.astype(jnp.float32), token[1:]))

    if s is not None and shape.tiling.vectors == "registers":
        o, following = _unstaged(shape, token, s)
    else:
        o, following = _staged(shape, scratch, token, s)
    if shape.fused:
        o = _normed(shape, o.astype(refs["o"].dtype), *token.gate)
    refs["o"][b, h, columns] = jnp.where(slot > 0, o, 0.0).astype(refs["o"].dtype)
    # Behind the output: what the compiler loads earlier for it takes registers from the products.
    s = following()

    @pl.when(slot > 0)
    def _():
        if shape.tiling.stages:
            scratch["state"][...] = s
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(scratch["state"], home)
        else:
            home[...] = s


def _staged(
    shape: Shape, scratch: Refs, token: Token, s: jax.Array | None
) -> tuple[jax.Array, Callable[[], jax.Array]]:
    """o and what computes the next state, from vectors in shared memory; the old state is `s`, or
    on its way there too."""
    layout, tall = shape.tiling.layout, (shape.key_dim, shape.tiling.block_v)
    qk, decay = _prepare(shape, scratch, token)
    if shape.tiling.unfenced:
        plgpu.commit_smem()
    if s is None:
        plgpu.barrier_wait(scratch["arrived"])
        state = _load(scratch["state"], layout)
    else:
        state = s

    def row(name: str) -> jax.Array:
        vector = _load(scratch[name], layout.reduce(1))
        return _spread(vector, shape=tall, axis=0, layout=layout)

    p = jnp.sum(state * row("k_decayed"), axis=0)
    r = jnp.sum(state * row("q_decayed"), axis=0)
    u = (jax.nn.sigmoid(token.beta) if shape.fused else token.beta) * (token.v - p)

    def following() -> jax.Array:
        decayed = state * (row("decay") if shape.kda else decay)
        return decayed + row("k") * _spread(u, shape=tall, axis=1, layout=layout)

    return r + qk * u, following


def _unstaged(
    shape: Shape, token: Token, s: jax.Array
) -> tuple[jax.Array, Callable[[], jax.Array]]:
    """o and what computes the next state. Every thread has the channels of its rows, and scales of
    q and k move out of the products, so that nothing is exchanged before them."""
    layout, tall = shape.tiling.layout, (shape.key_dim, shape.tiling.block_v)
    q, k, decay = token.q, token.k, jnp.exp(token.decay[0])

    def along(x: jax.Array, axis: int) -> jax.Array:
        return _spread(x, shape=tall, axis=axis, layout=layout)

    s = s * (along(decay, 0) if shape.kda else decay)
    p = jnp.sum(s * along(k, 0), axis=0)
    r = jnp.sum(s * along(q, 0), axis=0)
    k_scale = lax.rsqrt(jnp.sum(k * k) + 1e-6)
    q_scale = lax.rsqrt(jnp.sum(q * q) + 1e-6) * shape.key_dim**-0.5
    u = k_scale * (token.beta * (token.v - k_scale * p))
    o = q_scale * (r + jnp.sum(q * k) * u)
    return o, lambda: s + along(k, 0) * along(u, 1)


def row_names(shape: Shape) -> tuple[str, ...]:
    """Vectors `[K]` that every thread needs some of; one thread a channel computes them."""
    if shape.tiling.vectors == "registers":
        return ()
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


def _tile_layout(block_v: int, down: int) -> Any:
    """Of four warps, `down` lie below each other and the others side by side; a thread has four
    columns of a row, and as many of its neighbours as a warp's columns take share the row.

    Sums over rows cross the warps below each other. A warp that touches 128 contiguous bytes of a
    row, eight threads, uses whole lines of the cache.
    """
    beside = WARPS // down
    across = block_v // beside
    rows = VECTOR * LANES // across
    warps = {1: (-5,), 2: (-5, -4), 4: (-4,)}[beside]
    tiling = plgpu.Tiling(((rows * down, block_v), (rows, across), (VECTOR,)))
    return plgpu.Layout.TILED(tiling, warp_dims=warps, lane_dims=(-3, -2), vector_dim=-1)
