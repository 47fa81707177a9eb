"""The model families, built abstractly and run as pure functions over a flat dict of parameters.

`serving_functions(config, dtype, mesh)` gives what is jitted: `(params, state, batch) -> (state,
out)`, on one device or over the ranks of a mesh. A module is merged from its parameters only while
such a function is traced, so nothing of Flax runs on the hot path.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dasc_jax.config import ModelConfig
from dasc_jax.models.attention import Attend, init_pages
from dasc_jax.models.batch import DecodeBatch, PrefillBatch, PrefillOut, State
from dasc_jax.models.hybrid import HybridModel, TrainOut
from dasc_jax.models.kimi_linear import KimiLinear
from dasc_jax.models.qwen3_next import Qwen3Next
from dasc_jax.parallel import AXIS, STATE_SPEC, page_specs, param_spec, rank_count
from dasc_jax.types import AttentionPages, RecurrentState

__all__ = [
    "DecodeBatch",
    "Functions",
    "PrefillBatch",
    "PrefillOut",
    "ServingFunctions",
    "State",
    "TrainOut",
    "abstract_params",
    "functions",
    "init_pages",
    "merge",
    "serving_functions",
    "state_shardings",
]

FAMILIES: dict[str, type[HybridModel]] = {"kimi_linear": KimiLinear, "qwen3_next": Qwen3Next}

Params = dict[str, jax.Array]


class Functions(NamedTuple):
    """The pure functions of a model: two that serve it, one that trains it."""

    prefill: Callable[[Params, State, PrefillBatch], tuple[State, PrefillOut]]
    decode: Callable[[Params, State, DecodeBatch], tuple[State, jax.Array]]
    train: Callable[[Params, jax.Array, Attend], TrainOut]


class ServingFunctions(NamedTuple):
    """The pure functions that serve a model; `logits` is of hidden rows `[R, D]` of a prefill."""

    prefill: Callable[[Params, State, PrefillBatch], tuple[State, PrefillOut]]
    decode: Callable[[Params, State, DecodeBatch], tuple[State, jax.Array]]
    logits: Callable[[Params, jax.Array], jax.Array]


def _path(path: tuple[Any, ...]) -> str:
    return ".".join(str(part) for part in path)


@lru_cache(maxsize=16)
def _abstract(
    config: ModelConfig, dtype: str, tp: int = 1
) -> tuple[nnx.GraphDef[HybridModel], Any]:
    family = FAMILIES[config.family]
    graph, state = nnx.split(nnx.eval_shape(lambda: family(config, jnp.dtype(dtype), tp)))
    return graph, nnx.to_flat_state(state)


def abstract_params(
    config: ModelConfig, dtype: str, tp: int = 1
) -> dict[str, jax.ShapeDtypeStruct]:
    """Path, shape and dtype of every parameter of `config`, or of what each of `tp` ranks holds.

    `dtype` ("bfloat16", ...) is the model dtype. Decay parameters and Kimi's router are float32
    whatever `dtype` is.
    """
    _, flat = _abstract(config, dtype, tp)
    return {_path(path): jax.ShapeDtypeStruct(v.shape, v.dtype) for path, v in flat}


def merge(config: ModelConfig, dtype: str, params: Params, tp: int = 1) -> HybridModel:
    """The module of a model, bound to its parameters: for the inside of a traced function.

    With `tp` ranks it is a rank's part, and the function one that `jax.shard_map` runs.
    """
    graph, flat = _abstract(config, dtype, tp)
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


def serving_functions(
    config: ModelConfig, dtype: str, mesh: Mesh | None = None
) -> ServingFunctions:
    """`prefill`, `decode` and `logits` of a model on one device, or over the ranks of a mesh.

    On a mesh, parameters and state are global arrays as `dasc_jax.weights.permute.placement` and
    `state_shardings` lay them out; batches are the same on every rank, and so are logits and hidden
    rows. Boundary states are split like the state.

    Raises:
        ConfigError: the ranks do not divide the model.
    """
    tp = rank_count(mesh)
    paths = abstract_params(config, dtype, tp)

    def prefill(params: Params, state: State, batch: PrefillBatch) -> tuple[State, PrefillOut]:
        return merge(config, dtype, params, tp).prefill(state, batch)

    def decode(params: Params, state: State, batch: DecodeBatch) -> tuple[State, jax.Array]:
        return merge(config, dtype, params, tp).decode(state, batch)

    def logits(params: Params, hidden: jax.Array) -> jax.Array:
        return merge(config, dtype, params, tp).logits(hidden)

    if mesh is None:
        return ServingFunctions(prefill, decode, logits)

    def over_ranks(run: Callable[..., Any], inputs: tuple[Any, ...], outputs: Any) -> Any:
        # Neither kernels nor the carries of our loops say over which ranks their values vary, so
        # the check of replicated outputs is off: they are sums over ranks or gathered.
        return jax.shard_map(run, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)

    params, state = {path: param_spec(path) for path in paths}, _state_specs(config)
    whole, by_head = _specs(PartitionSpec(), PartitionSpec(None, AXIS))
    batch = PrefillBatch(*[whole] * len(PrefillBatch._fields))._replace(keep=by_head)
    out = PrefillOut(whole, state.recurrent, whole)
    return ServingFunctions(
        over_ranks(prefill, (params, state, batch), (state, out)),
        over_ranks(decode, (params, state, whole), (state, whole)),
        over_ranks(logits, (params, whole), whole),
    )


def state_shardings(config: ModelConfig, mesh: Mesh) -> State:
    """A `State` with the sharding of each array: what `init_recurrent` and `init_pages` give."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), _state_specs(config))


def _state_specs(config: ModelConfig) -> State:
    recurrent = RecurrentState(*_specs(STATE_SPEC, STATE_SPEC))
    return State(recurrent, AttentionPages(_specs(*page_specs(config))))


def _specs(*specs: PartitionSpec) -> Any:
    """Partitions in the places of the arrays whose they are."""
    return specs
