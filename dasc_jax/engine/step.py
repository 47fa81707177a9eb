"""What runs on the device: prefill and decode of a model, store and load of its checkpoints.

Each takes what it changes first and returns it first, so that the engine can donate it; nothing
else in the engine touches device memory. Only the checkpoint steps know the selection plan, so that
a model is compiled once for all plans.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int32

from dasc_jax import checkpoint_shards, checkpoint_state
from dasc_jax.balance import Placement, storage_schedule
from dasc_jax.checkpoint_shards import Shards
from dasc_jax.checkpoint_state import CheckpointPool
from dasc_jax.config import ConfigError, ModelConfig
from dasc_jax.engine.sampling import Sampled, Scores, greedy, score
from dasc_jax.head_order import head_order
from dasc_jax.model import Model, order_heads
from dasc_jax.models import DecodeBatch, Params, PrefillBatch, State, serving_functions
from dasc_jax.parallel import rank_count
from dasc_jax.plan import SelectionPlan
from dasc_jax.types import RecurrentState

COMPILER_OPTIONS = {"xla_gpu_dot_merger_threshold_mb": 0}
"""For steps of a model: XLA would concatenate weights of products that share their left side, which
on a GPU means to copy them in every step."""


class Memory(NamedTuple):
    """All device memory of an engine but the weights: active state and the checkpoint pool."""

    state: State
    pool: CheckpointPool


class ModelSteps(NamedTuple):
    """The device functions of one model; both steps choose the most likely tokens.

    Prefill also returns the states at wanted boundaries, and what `score` makes the logits of other
    rows from.
    """

    prefill: Callable[
        [State, Params, PrefillBatch],
        tuple[State, Sampled, RecurrentState, jax.Array],
    ]
    decode: Callable[[State, Params, jax.Array], tuple[State, Sampled]]
    score: Callable[[Params, jax.Array, jax.Array, jax.Array], Scores]


Form = SelectionPlan | Shards
"""What says how a checkpoint lies in its pool: on one device a plan, on the ranks of a mesh also
which of them stores what."""


class CheckpointSteps(NamedTuple):
    """The device functions of one form of checkpoints."""

    store: Callable[[CheckpointPool, RecurrentState, jax.Array], CheckpointPool]
    load: Callable[[State, CheckpointPool, jax.Array, jax.Array], State]


def model_steps(config: ModelConfig, dtype: str, mesh: Mesh | None = None) -> ModelSteps:
    """The steps of a model on one device or the ranks of a mesh; pure, not yet compiled."""
    model = serving_functions(config, dtype, mesh)

    def prefill(
        state: State, params: Params, batch: PrefillBatch
    ) -> tuple[State, Sampled, RecurrentState, Float[Array, "T D"]]:
        """Run packed prompt tokens."""
        state, out = model.prefill(params, state, batch)
        return state, Sampled(greedy(out.logits), out.logits), out.boundary, out.hidden

    def decode(state: State, params: Params, rows: Int32[Array, "B C"]) -> tuple[State, Sampled]:
        """One token of every request, a row of (token, position, slot, *pages) each."""
        batch = DecodeBatch(rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3:])
        state, logits = model.decode(params, state, batch)
        return state, Sampled(greedy(logits), logits)

    def score_rows(
        params: Params,
        hidden: Float[Array, "T D"],
        rows: Int32[Array, "R"],
        targets: Int32[Array, "R"],
    ) -> Scores:
        """How likely `targets` are to follow on the packed tokens `rows` of a prefill."""
        return score(model.logits(params, hidden[rows]), targets)

    return ModelSteps(prefill, decode, score_rows)


def check_order(model: Model, placement: Placement) -> None:
    """Raise ConfigError for heads in an order that is not of the model's ranks, or that only
    `hybrid` knows of."""
    if model.order is None:
        return
    if placement != "hybrid":
        raise ConfigError(f"placement={placement!r}, but the model's heads are in another order")
    if model.mesh is None or rank_count(model.mesh) != model.order.tp:
        where = "one device" if model.mesh is None else f"{rank_count(model.mesh)} ranks"
        raise ConfigError(
            f"the model's heads are in an order for tp={model.order.tp}, but it lies on {where}"
        )


def ordered(model: Model, plan: SelectionPlan, placement: Placement) -> Model:
    """The model with its heads in the order that its placement wants.

    Raises:
        ConfigError: it was loaded in an order of heads that does not fit, see `check_order`.
    """
    check_order(model, placement)
    if model.mesh is None or model.order is not None or placement != "hybrid":
        return model
    order = head_order(plan, model.config, rank_count(model.mesh))
    return model if order.identity else order_heads(model, order)


def checkpoint_form(plan: SelectionPlan, model: Model, placement: Placement) -> Form:
    """The form of checkpoints of a plan for where a model lies."""
    if model.mesh is None:
        return plan
    tp = rank_count(model.mesh)
    # Where no order is better than the released one, `hybrid` is `storage`.
    wanted = "storage" if placement == "hybrid" and model.order is None else placement
    return Shards(plan, storage_schedule(plan, tp, wanted, model.order), model.mesh)


def keep_masks(form: Form, key_dim: int) -> Bool[np.ndarray, "L H K"]:
    """Retained units in the order in which the model computes its heads: `keep` of a batch."""
    if isinstance(form, Shards):
        return checkpoint_shards.keep_masks(form, key_dim)
    return np.stack([form.mask(layer, key_dim) for layer in range(form.layers)])


def _functions(form: Form) -> Any:
    """The module whose store, load, restore and init_pool take this form."""
    return checkpoint_shards if isinstance(form, Shards) else checkpoint_state


def init_pool(form: Form, *args: Any, **kwargs: Any) -> CheckpointPool:
    """See `checkpoint_state.init_pool`."""
    return _functions(form).init_pool(form, *args, **kwargs)


def checkpoint_steps(form: Form) -> CheckpointSteps:
    """The steps of a form of checkpoints; pure, not yet compiled."""
    functions = _functions(form)

    def store_slots(
        pool: CheckpointPool, boundary: RecurrentState, slots: Int32[Array, "NB"]
    ) -> CheckpointPool:
        """Pack boundary states into pool slots (0: drop)."""
        return functions.store(form, pool, slots, *boundary)

    def load_slots(
        state: State,
        pool: CheckpointPool,
        checkpoints: Int32[Array, "M"],
        slots: Int32[Array, "M"],
    ) -> State:
        """Unpack checkpoints into active slots: retained units exact, the others zero."""
        restored = functions.restore(form, state.recurrent, pool, checkpoints, slots)
        return State(restored, state.pages)

    return CheckpointSteps(store_slots, load_slots)


def repack(
    form: Form,
    exact: Form,
    pool: CheckpointPool,
    dense: CheckpointPool,
    slots: Int32[Array, "M"],
) -> CheckpointPool:
    """Slots of `pool`, of any plan and quantization, from the dense float32 ones in `dense`.

    A dense checkpoint is the state itself, bit for bit, so this is what a store at the time would
    have put there.
    """
    return _functions(form).store(form, pool, slots, *_functions(exact).load(exact, dense, slots))
