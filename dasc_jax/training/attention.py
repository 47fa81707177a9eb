"""Causal attention over whole sequences, as the models' training forward asks for it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def causal_attention(
    q: Float[Array, "B T Hq Dk"],
    keys: Float[Array, "B T Hkv Dk"],
    values: Float[Array, "B T Hkv Dv"],
    scale: float,
) -> Float[Array, "B T Hq Dv"]:
    """softmax(q k scale) v over earlier tokens and the own one; queries grouped over key heads.

    cuDNN's fused attention on a GPU with half-precision inputs (it wants keys and values of one
    width, so values are padded), XLA's elsewhere.
    """
    width = values.shape[-1]
    fused = jax.default_backend() == "gpu" and q.dtype != jnp.float32
    padding = ((0, 0), (0, 0), (0, 0), (0, keys.shape[-1] - width))
    out = jax.nn.dot_product_attention(
        q,
        keys,
        jnp.pad(values, padding),
        scale=scale,
        is_causal=True,
        implementation="cudnn" if fused else "xla",
    )
    return out[..., :width]
