"""`delta_step` composed of its parts: gates, one step of the delta rule, gated output norm."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels import chunked, reference
from pallas_kernels.gates import gdn_gate, gdn_output, kda_gate, kda_output


def xla(*args) -> tuple[jax.Array, jax.Array]:
    """`delta_step`, all requests at once."""
    return _composed(chunked.decode, *args)


def serial(*args) -> tuple[jax.Array, jax.Array]:
    """`delta_step`, one request after the other."""
    return _composed(reference.decode, *args)


def split_channels(
    qkv: jax.Array, heads: int, key_dim: int, value_dim: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q | k | v `[T, C]` as q, k `[T, Hk, K]` and v `[T, H, V]`."""
    keys = (qkv.shape[-1] - heads * value_dim) // 2
    q, k, v = jnp.split(qkv, [keys, 2 * keys], axis=-1)
    q, k = (x.reshape(-1, keys // key_dim, key_dim) for x in (q, k))
    return q, k, v.reshape(-1, heads, value_dim)


def _composed(
    decode: Callable[..., tuple[jax.Array, jax.Array]],
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
) -> tuple[jax.Array, jax.Array]:
    log_decay, output = (kda_gate, kda_output) if raw.ndim == 3 else (gdn_gate, gdn_output)
    beta = jax.nn.sigmoid(beta.astype(jnp.float32))
    split = split_channels(qkv, *pool.shape[2:])
    pool, o = decode(*split, log_decay(raw, A_log, dt_bias), beta, pool, slots, layer)
    y = output(o.astype(qkv.dtype), gate, weight, eps)
    return pool, jnp.where((slots > 0)[:, None, None], y, 0)
