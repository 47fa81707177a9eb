"""Layers both families share: projections, norms, the dense feed-forward, rotary positions."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dasc_jax.parallel import own_range, sum_over_ranks
from dasc_jax.types import AnyArray

Norm = Float[Array, "*rows D"]


class Linear(nnx.Module):
    """`x @ kernel`, kernel `[in, out]`, no bias, in the kernel's dtype."""

    def __init__(self, inputs: int, outputs: int, dtype: jnp.dtype):
        self.kernel = nnx.Param(jnp.zeros((inputs, outputs), dtype))

    def __call__(self, x: Float[Array, "*rows I"]) -> Float[Array, "*rows O"]:
        return x @ self.kernel[...]


class RowParallel(Linear):
    """The product of inputs that are spread over `tp` ranks, on every rank."""

    def __init__(self, inputs: int, outputs: int, dtype: jnp.dtype, tp: int = 1):
        super().__init__(inputs, outputs, dtype)
        self.tp = tp

    def __call__(self, x: Float[Array, "*rows I"]) -> Float[Array, "*rows O"]:
        return sum_over_ranks(super().__call__(x), self.tp)


class Embedding(nnx.Module):
    """A row of `weight [vocab, D]` for every token id; `vocab` is a rank's part of `tp`."""

    def __init__(self, vocab: int, width: int, dtype: jnp.dtype, tp: int = 1):
        self.weight = nnx.Param(jnp.zeros((vocab, width), dtype))
        self.tp = tp

    def __call__(self, tokens: Int[AnyArray, "*rows"]) -> Float[Array, "*rows D"]:
        if self.tp == 1:
            return self.weight[...][tokens]
        row = own_range(jnp.asarray(tokens), self.weight.shape[0], -1, self.tp)
        found = jnp.where(row[..., None] >= 0, self.weight[...][jnp.maximum(row, 0)], 0)
        return sum_over_ranks(found, self.tp)

    def unembed(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows vocab"]:
        """Logits when the output projection is tied to the embedding."""
        return x @ self.weight[...].T


def normalise(x: Float[Array, "*rows D"], eps: float) -> Float[Array, "*rows D"]:
    """x / sqrt(mean(x^2) + eps) in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


class RMSNorm(nnx.Module):
    """Root-mean-square norm, weighted after the cast back to the activation dtype (Kimi-Linear)."""

    def __init__(self, width: int, eps: float, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.ones((width,), dtype))
        self.eps = eps

    def __call__(self, x: Norm) -> Norm:
        return self.weight[...] * normalise(x, self.eps).astype(x.dtype)


class ZeroCentredRMSNorm(nnx.Module):
    """Root-mean-square norm with weight 1 + w, in float32 up to the cast back (Qwen3-Next)."""

    def __init__(self, width: int, eps: float, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.zeros((width,), dtype))
        self.eps = eps

    def __call__(self, x: Norm) -> Norm:
        scale = 1.0 + self.weight[...].astype(jnp.float32)
        return (normalise(x, self.eps) * scale).astype(x.dtype)


def rms_norm(
    width: int, eps: float, dtype: jnp.dtype, *, zero_centred: bool
) -> RMSNorm | ZeroCentredRMSNorm:
    """The residual-stream norm of a family."""
    return (ZeroCentredRMSNorm if zero_centred else RMSNorm)(width, eps, dtype)


class FeedForward(nnx.Module):
    """down(silu(gate x) * up x); `inner` is a rank's part of `tp`."""

    def __init__(self, width: int, inner: int, dtype: jnp.dtype, tp: int = 1):
        self.gate = Linear(width, inner, dtype)
        self.up = Linear(width, inner, dtype)
        self.down = RowParallel(inner, width, dtype, tp)

    def __call__(self, x: Norm) -> Norm:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


def rotate(
    x: Float[Array, "T H D"], positions: Int[AnyArray, "T"], rotary: int, theta: float
) -> Float[Array, "T H D"]:
    """Rotary positions on the first `rotary` dims of each head, pairs (i, i + rotary/2).

    The other dims pass through. Angles in float32, cosine and sine cast to the activation dtype
    (Qwen3-Next: 64 of 256 dims).
    """
    half = rotary // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) * 2.0 / rotary)
    angle = positions.astype(jnp.float32)[:, None, None] * frequency
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    first, second, rest = x[..., :half], x[..., half:rotary], x[..., rotary:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
