"""Token-serial forms of every recurrent op: the specification, and the oracle of the tests.

Per head, with S `[K, V]` and log decay g (DASC Eq. 1; read after write, decay before the delta):

    S' = diag(exp g) S;   u = beta (v - S'^T k);   S = S' + k u^T;   o = S^T q
"""

import jax
import jax.numpy as jnp

from pallas_kernels.chunks import ChunkTable
from pallas_kernels.walk import DeltaOut, Tokens, prepare, walk


def token_step(state: jax.Array, token: Tokens) -> tuple[jax.Array, jax.Array]:
    """One token, `Tokens` without its leading axis: state `[H, K, V]` -> (state, o `[H, V]`)."""
    group = token.v.shape[0] // token.q.shape[0]
    q, k = (jnp.repeat(x, group, axis=0)[:, None, :] for x in (token.q, token.k))
    state = jnp.exp(token.g)[..., None] * state
    u = token.beta[:, None] * (token.v - _dot(k, state))
    state = state + k[:, 0, :, None] * u[:, None, :]
    return state, _dot(q, state)


def _dot(row: jax.Array, state: jax.Array) -> jax.Array:
    return jnp.matmul(row, state, precision="highest")[:, 0]


def prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial: jax.Array,
    table: ChunkTable,
    keep: jax.Array | None,
    num_boundaries: int,
) -> DeltaOut:
    """`delta_prefill`, one token after the other. Rows without a token are inert: g = beta = 0."""

    def step(state, tokens):
        return jax.lax.scan(token_step, state, tokens)

    return walk(
        lambda tokens: tokens, step, (q, k, v, g, beta), initial, table, keep, num_boundaries
    )


def decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    pool: jax.Array,
    slots: jax.Array,
    layer: int,
) -> tuple[jax.Array, jax.Array]:
    """`delta_decode`, one request after the other."""

    def step(pool, item):
        slot, token = item
        old = pool[layer, slot]
        new, o = token_step(old, token)
        pool = pool.at[layer, slot].set(jnp.where(slot > 0, new, old))
        return pool, jnp.where(slot > 0, o, 0.0)

    return jax.lax.scan(step, pool, (slots, prepare(q, k, v, g, beta)))


def short_conv(
    u: jax.Array, weight: jax.Array, window: jax.Array, cu_seqlens: jax.Array
) -> jax.Array:
    """`short_conv`, one token after the other with the window `[C, 3]` carried."""
    tokens = jnp.arange(u.shape[0], dtype=jnp.int32)
    segments = jnp.searchsorted(cu_seqlens[1:], tokens, side="right").astype(jnp.int32)
    weight = weight.astype(jnp.float32)

    def step(past, item):
        token, segment, now = item
        past = jnp.where(token == cu_seqlens[segment], window[segment], past)
        taps = jnp.concatenate([past, now[:, None].astype(past.dtype)], axis=1)
        y = jax.nn.silu(jnp.sum(weight * taps.astype(jnp.float32), axis=1)).astype(u.dtype)
        return taps[:, 1:], jnp.where(token < cu_seqlens[-1], y, 0)

    _, y = jax.lax.scan(step, jnp.zeros_like(window[0]), (tokens, segments, u))
    return y


def grouped_matmul(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """`grouped_matmul`, one row after the other."""
    rows = jnp.arange(x.shape[0], dtype=jnp.int32)
    groups = jnp.searchsorted(jnp.cumsum(group_sizes), rows, side="right")

    def row(item):
        values, group = item
        y = jnp.matmul(
            values,
            jnp.take(w, group, axis=0, mode="clip"),
            precision="highest",
            preferred_element_type=jnp.float32,
        )
        return jnp.where(group < w.shape[0], y, 0.0).astype(x.dtype)

    return jax.lax.map(row, (x, groups))
