"""The model families, built abstractly and run as pure functions over a flat dict of parameters.

`functions(config, dtype)` gives what is jitted: `(params, state, batch) -> (state, out)`. A module
is merged from its parameters only while such a function is traced, so nothing of Flax runs on the
hot path.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from dasc_jax.config import ModelConfig
from dasc_jax.models.attention import Attend, init_pages
from dasc_jax.models.batch import DecodeBatch, PrefillBatch, PrefillOut, State
from dasc_jax.models.hybrid import HybridModel, TrainOut
from dasc_jax.models.kimi_linear import KimiLinear
from dasc_jax.models.qwen3_next import Qwen3Next

__all__ = [
    "DecodeBatch",
    "Functions",
    "PrefillBatch",
    "PrefillOut",
    "State",
    "TrainOut",
    "abstract_params",
    "functions",
    "init_pages",
    "merge",
]

FAMILIES: dict[str, type[HybridModel]] = {"kimi_linear": KimiLinear, "qwen3_next": Qwen3Next}

Params = dict[str, jax.Array]


class Functions(NamedTuple):
    """The pure functions of a model: two that serve it, one that trains it."""

    prefill: Callable[[Params, State, PrefillBatch], tuple[State, PrefillOut]]
    decode: Callable[[Params, State, DecodeBatch], tuple[State, jax.Array]]
    train: Callable[[Params, jax.Array, Attend], TrainOut]


def _path(path: tuple[Any, ...]) -> str:
    return ".".join(str(part) for part in path)


@lru_cache(maxsize=16)
def _abstract(config: ModelConfig, dtype: str) -> tuple[nnx.GraphDef[HybridModel], Any]:
    family = FAMILIES[config.family]
    graph, state = nnx.split(nnx.eval_shape(lambda: family(config, jnp.dtype(dtype))))
    return graph, nnx.to_flat_state(state)


def abstract_params(config: ModelConfig, dtype: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Path, shape and dtype of every parameter of `config`.

    `dtype` ("bfloat16", ...) is the model dtype. Decay parameters and Kimi's router are float32
    whatever `dtype` is.
    """
    _, flat = _abstract(config, dtype)
    return {_path(path): jax.ShapeDtypeStruct(v.shape, v.dtype) for path, v in flat}


def merge(config: ModelConfig, dtype: str, params: Params) -> HybridModel:
    """The module of a model, bound to its parameters: for the inside of a traced function."""
    graph, flat = _abstract(config, dtype)
    leaves = [(path, variable.replace(params[_path(path)])) for path, variable in flat]
    return nnx.merge(graph, nnx.from_flat_state(leaves))


def functions(config: ModelConfig, dtype: str) -> Functions:
    """`prefill` and `decode` of a model as pure functions of `(params, state, batch)`, and `train`
    of `(params, tokens [B, T], attend)`."""

    def prefill(params: Params, state: State, batch: PrefillBatch) -> tuple[State, PrefillOut]:
        return merge(config, dtype, params).prefill(state, batch)

    def decode(params: Params, state: State, batch: DecodeBatch) -> tuple[State, jax.Array]:
        return merge(config, dtype, params).decode(state, batch)

    def train(params: Params, tokens: jax.Array, attend: Attend) -> TrainOut:
        return merge(config, dtype, params).train_forward(tokens, attend)

    return Functions(prefill, decode, train)
