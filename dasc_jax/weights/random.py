"""Weights to test and to measure with: of the right scale, with a wide spread of horizons."""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array


def random_params(
    specs: Mapping[str, jax.ShapeDtypeStruct], seed: int, zero_centred: bool
) -> dict[str, Array]:
    """Parameters of these shapes; `zero_centred` norms of the residual stream have weights 0."""
    keys = jax.random.split(jax.random.key(seed), len(specs))
    params = {
        path: _initial(path, spec, key)
        for (path, spec), key in zip(specs.items(), keys, strict=True)
    }
    if not zero_centred:
        return params
    norms = [p for p in params if p.endswith("norm.weight") and ".o_norm" not in p]
    return params | {p: jnp.zeros_like(params[p]) for p in norms}


def _initial(path: str, spec: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
    """Norms 1, horizons log-uniform over about 1 to 3,000 tokens, the rest fan-in scaled."""
    if path.endswith("norm.weight"):
        return jnp.ones(spec.shape, spec.dtype)
    if path.endswith("A_log"):
        rate = jax.random.uniform(key, spec.shape, minval=0.5, maxval=2.0)
        return jnp.log(rate).astype(spec.dtype)
    if path.endswith("dt_bias"):
        low, high = math.log(2e-3), math.log(3.0)
        step = jnp.exp(jax.random.uniform(key, spec.shape, minval=low, maxval=high))
        return (step + jnp.log(-jnp.expm1(-step))).astype(spec.dtype)
    if path.endswith("router.bias"):
        return (0.01 * jax.random.normal(key, spec.shape)).astype(spec.dtype)
    fan_in = spec.shape[-1] if path.endswith(("k_up", "v_up", "conv.weight")) else spec.shape[-2]
    scale = 1.0 if path == "embed.weight" else fan_in**-0.5
    return (scale * jax.random.normal(key, spec.shape)).astype(spec.dtype)
