"""Gates and norms around the delta rule, in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def l2norm(x: Float[Array, "*rows D"]) -> Float32[Array, "*rows D"]:
    """x / sqrt(sum(x^2) + 1e-6) over the last axis; a zero vector stays zero."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def kda_gate(
    raw: Float[Array, "*rows H K"], A_log: Float[Array, "H"], dt_bias: Float[Array, "H K"]
) -> Float32[Array, "*rows H K"]:
    """Log decay of every (head, key channel): -exp(A_log) softplus(raw + dt_bias) <= 0 (KDA)."""
    return _log_decay(raw, A_log[:, None], dt_bias)


def gdn_gate(
    raw: Float[Array, "*rows H"], A_log: Float[Array, "H"], dt_bias: Float[Array, "H"]
) -> Float32[Array, "*rows H"]:
    """Log decay of every head: -exp(A_log) softplus(raw + dt_bias) <= 0 (Gated DeltaNet)."""
    return _log_decay(raw, A_log, dt_bias)


def kda_output(
    o: Float[Array, "*rows V"], gate: Float[Array, "*rows V"], weight: Float[Array, "V"], eps: float
) -> Float[Array, "*rows V"]:
    """norm(o) weight sigmoid(gate), norm(o) = o / sqrt(mean(o^2) + eps); in o's dtype at the end
    (KDA)."""
    gated = _unit_mean_square(o, eps) * weight.astype(jnp.float32)
    return (gated * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(o.dtype)


def gdn_output(
    o: Float[Array, "*rows V"], gate: Float[Array, "*rows V"], weight: Float[Array, "V"], eps: float
) -> Float[Array, "*rows V"]:
    """norm(o) weight silu(gate), see `kda_output`; in o's dtype behind the norm, behind the weight
    and at the end (Gated DeltaNet as Qwen3-Next computes it)."""
    scaled = weight.astype(o.dtype) * _unit_mean_square(o, eps).astype(o.dtype)
    return (scaled.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))).astype(o.dtype)


def _unit_mean_square(x: jax.Array, eps: float) -> jax.Array:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def _log_decay(raw: jax.Array, A_log: jax.Array, dt_bias: jax.Array) -> jax.Array:
    x = raw.astype(jnp.float32) + dt_bias.astype(jnp.float32)
    # The released models' softplus is the identity above 20.
    softplus = jnp.where(x > 20.0, x, jnp.log1p(jnp.exp(jnp.minimum(x, 20.0))))
    return -jnp.exp(A_log.astype(jnp.float32)) * softplus
