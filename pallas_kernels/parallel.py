"""The delta rule over whole sequences, for training: dense products in place of a long walk.

The same algebra as `chunked`, arranged for throughput. Everything inside chunks of 64 tokens is
computed for all chunks side by side; only one short step a chunk is left to do in order. A pair
(i, j) meets at the start of i's block of 16 tokens, where exp(G_i - G_0) <= 1 and
exp(G_0 - G_j) <= exp(16 * 5): that is finite in float32 because a log decay below -5 a step is
taken as -5, which leaves 0.7 % of a state that should have left less. Products run in the
backend's fast precision, as the rest of a bfloat16 training step does.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.chunks import CHUNK
from pallas_kernels.walk import prepare

BLOCK = 16
STRONGEST = -5.0


def sequence(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array) -> jax.Array:
    """`delta_train` of one sequence: q, k `[T, Hk, K]`, v `[T, H, V]` -> o `[T, H, V]`."""
    tokens = prepare(q, k, v, jnp.maximum(g, STRONGEST), beta)
    q, k, v, g, beta = (_chunks(x) for x in tokens._replace(beta=tokens.beta[..., None]))
    group = v.shape[1] // q.shape[1]
    q, k = jnp.repeat(q, group, axis=1), jnp.repeat(k, group, axis=1)
    total = jnp.cumsum(g, axis=2)
    attend, erase = _pairs(q, k, total)
    inverse = jax.scipy.linalg.solve_triangular(
        beta * erase, jnp.broadcast_to(jnp.eye(CHUNK), erase.shape), lower=True, unit_diagonal=True
    )
    from_start = jnp.exp(total)
    # (I + A)^-1 beta (V - K S) = fresh - known S
    fresh = jnp.einsum("chij,chjv->chiv", inverse, beta * v)
    known = jnp.einsum("chij,chjk->chik", inverse, beta * from_start * k)
    last = total[:, :, -1:]
    k_end = k * jnp.exp(last - total)

    def visit(state: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q_start, attend, fresh, known, k_end, decay = chunk
        u = fresh - jnp.einsum("hik,hkv->hiv", known, state)
        o = jnp.einsum("hik,hkv->hiv", q_start, state) + jnp.einsum("hij,hjv->hiv", attend, u)
        state = decay[..., None] * state + jnp.einsum("hjk,hjv->hkv", k_end, u)
        return state, o

    zero = jnp.zeros((v.shape[1], k.shape[-1], v.shape[-1]), jnp.float32)
    per_chunk = (q * from_start, attend, fresh, known, k_end, jnp.exp(last[:, :, 0]))
    _, o = jax.lax.scan(visit, zero, per_chunk)
    return jnp.swapaxes(o, 1, 2).reshape(tokens.v.shape)


def _chunks(x: jax.Array) -> jax.Array:
    """`[T, H, D]` -> `[T / 64, H, 64, D]`."""
    return jnp.swapaxes(x.reshape(-1, CHUNK, *x.shape[1:]), 1, 2)


def _pairs(q: jax.Array, k: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
    """q_i k_j (j <= i) and k_i k_j (j < i), decayed from j to i: each `[NC, H, 64, 64]`."""
    rows = []
    for first in range(0, CHUNK, BLOCK):
        own, seen = slice(first, first + BLOCK), slice(0, first + BLOCK)
        start = total[:, :, first - 1 : first] if first else jnp.zeros_like(total[:, :, :1])
        into = jnp.exp(total[:, :, own] - start)
        left = jnp.stack([q[:, :, own] * into, k[:, :, own] * into])
        right = k[:, :, seen] * jnp.exp(start - total[:, :, seen])
        products = jnp.einsum("xchik,chjk->xchij", left, right)
        rows.append(jnp.pad(products, ((0, 0),) * 4 + ((0, CHUNK - first - BLOCK),)))
    both = jnp.concatenate(rows, axis=3)
    index = np.arange(CHUNK)
    attend = jnp.where(index[:, None] >= index, both[0], 0.0)
    return attend, jnp.where(index[:, None] > index, both[1], 0.0)
