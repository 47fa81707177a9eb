"""Short convolution: depthwise, causal, four taps, then silu; a window is carried between calls."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def short_conv(
    u: jax.Array, weight: jax.Array, window: jax.Array, cu_seqlens: jax.Array
) -> jax.Array:
    """`short_conv`, all tokens at once."""
    tokens = jnp.arange(u.shape[0], dtype=jnp.int32)
    # Compared with all: a binary search is a loop of small kernels on a GPU, in every layer.
    segments = jnp.searchsorted(cu_seqlens[1:], tokens, side="right", method="compare_all")
    segments = jnp.minimum(segments, window.shape[0] - 1)
    position = tokens - cu_seqlens[segments]
    taps = []
    for back in (3, 2, 1):
        inside = jnp.pad(u, ((back, 0), (0, 0)))[: u.shape[0]]
        outside = window[segments, :, jnp.clip(3 - back + position, 0, 2)]
        taps.append(jnp.where((position >= back)[:, None], inside, outside.astype(u.dtype)))
    y = _silu_sum([*taps, u], weight)
    return jnp.where((tokens < cu_seqlens[-1])[:, None], y, 0)


def whole_conv(u: Float[Array, "B T C"], weight: Float[Array, "C 4"]) -> Float[Array, "B T C"]:
    """`short_conv` of whole sequences, which nothing precedes."""
    taps = [jnp.pad(u, ((0, 0), (back, 0), (0, 0)))[:, : u.shape[1]] for back in (3, 2, 1)]
    return _silu_sum([*taps, u], weight)


def conv_windows(
    u: Float[Array, "T C"],
    window: Float[Array, "N C 3"],
    cu_seqlens: Int32[Array, "N+1"],
    segment: Int32[Array, "M"],
    end: Int32[Array, "M"],
) -> Float[Array, "M C 3"]:
    """The last three raw inputs of `segment` before packed index `end`, oldest first, in the
    window's dtype.

    Inputs before the segment's first token come from its `window`, so an empty segment keeps its
    own.
    """
    index = end[:, None] + jnp.arange(-3, 0, dtype=jnp.int32)
    position = index - cu_seqlens[segment][:, None]
    inside = jnp.take(u, index, axis=0, mode="clip").astype(window.dtype)
    outside = jnp.swapaxes(window, 1, 2)[segment[:, None], jnp.clip(3 + position, 0, 2)]
    return jnp.swapaxes(jnp.where((position >= 0)[..., None], inside, outside), 1, 2)


def short_conv_step(
    u: Float[Array, "B C"], weight: Float[Array, "C 4"], window: Float[Array, "B C 3"]
) -> Float[Array, "B C"]:
    """`short_conv` of one token of each request, in u's dtype."""
    taps = [window[..., j].astype(u.dtype) for j in range(3)] + [u]
    return _silu_sum(taps, weight)


def next_windows(
    u: Float[Array, "*rows C"], window: Float[Array, "*rows C 3"]
) -> Float[Array, "*rows C 3"]:
    """Windows moved on by one input."""
    return jnp.concatenate([window[..., 1:], u[..., None].astype(window.dtype)], axis=-1)


def _silu_sum(taps: list[jax.Array], weight: jax.Array) -> jax.Array:
    total = jnp.zeros(taps[0].shape, jnp.float32)
    for j, tap in enumerate(taps):
        total += weight[:, j].astype(jnp.float32) * tap.astype(jnp.float32)
    return jax.nn.silu(total).astype(taps[0].dtype)
