"""Weights and states of a released model's real sizes, made on the device from nothing.

Every array is one elementwise program over its own indices: no host copy, no float32 array of its
size, so that a model fits a device that holds nothing else.
"""

import math
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from dasc_jax.config import ModelConfig
from dasc_jax.model import init_recurrent
from dasc_jax.models import Params, State, abstract_params, init_pages
from dasc_jax.types import AttentionPages, RecurrentState


def device_params(config: ModelConfig, dtype: str, seed: int = 0) -> Params:
    """Random parameters of `config`, uniform and fan-in scaled; norms as a model starts with them.

    Decays are moderate: `A_log` near 0 and `dt_bias` between -6 and 1.
    """
    return {
        path: _parameter(config, path, spec, seed + number)
        for number, (path, spec) in enumerate(abstract_params(config, dtype).items())
    }


def _parameter(config: ModelConfig, path: str, spec: jax.ShapeDtypeStruct, seed: int) -> jax.Array:
    if path.endswith("norm.weight"):
        centred = config.zero_centred_norm and "o_norm" not in path
        return jnp.full(spec.shape, 0.0 if centred else 1.0, spec.dtype)
    if path.endswith("dt_bias"):
        return uniform(spec, seed, 3.5, -2.5)
    if path.endswith(("A_log", "router.bias")):
        return uniform(spec, seed, 0.01)
    fan_in = spec.shape[-1] if path.endswith(("v_up", "conv.weight")) else spec.shape[-2]
    spread = 1.0 if path == "embed.weight" else fan_in**-0.5
    return uniform(spec, seed, math.sqrt(3.0) * spread)


def state_specs(config: ModelConfig, dtype: str, slots: int, pages: int) -> State:
    """Shapes and dtypes of recurrent states and attention pages."""
    return jax.eval_shape(
        lambda: State(
            init_recurrent(config, slots, dtype), init_pages(config, pages, jnp.dtype(dtype))
        )
    )


def device_state(config: ModelConfig, dtype: str, slots: int, pages: int) -> State:
    """Random recurrent states and attention pages; the sinks hold noise too, nothing reads them."""
    specs = state_specs(config, dtype, slots, pages)
    temporal, conv = specs.recurrent
    return State(
        RecurrentState(uniform(temporal, 1, 0.1), uniform(conv, 2, 1.0)),
        AttentionPages(
            tuple(uniform(spec, 3 + i, 1.0) for i, spec in enumerate(specs.pages.arrays))
        ),
    )


def uniform(
    spec: jax.ShapeDtypeStruct | jax.Array, seed: int, width: float, centre: float = 0.0
) -> Float[Array, "*shape"]:
    """Uniform in centre +- width, on the default device; the same for the same seed."""
    return _filler(spec.shape, jnp.dtype(spec.dtype))(
        jnp.uint32(seed), jnp.float32(width), jnp.float32(centre)
    )


@lru_cache(maxsize=256)
def _filler(shape: tuple[int, ...], dtype: jnp.dtype):
    return jax.jit(partial(_fill, shape, dtype))


def _fill(
    shape: tuple[int, ...], dtype: jnp.dtype, seed: jax.Array, width: jax.Array, centre: jax.Array
) -> jax.Array:
    index = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    unit = (_hash(index + seed * jnp.uint32(0x9E3779B9)) >> 8).astype(jnp.float32) * 2.0**-23
    return (centre + width * (unit - 1.0)).astype(dtype)


def _hash(x: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """The finaliser of MurmurHash3: every input bit moves about half of the output bits."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
