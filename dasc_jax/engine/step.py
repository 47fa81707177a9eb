"""What runs on the device: prefill and decode of a model, store and load of its checkpoints.

Each takes what it changes first and returns it first, so that the engine can donate it; nothing
else in the engine touches device memory. Only the checkpoint steps know the selection plan, so that
a model is compiled once for all plans.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int32

from dasc_jax.checkpoint_state import CheckpointPool, load, restore, store
from dasc_jax.config import ModelConfig
from dasc_jax.engine.sampling import Sampled, Scores, greedy, score
from dasc_jax.models import DecodeBatch, Params, PrefillBatch, State, functions, merge
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


class CheckpointSteps(NamedTuple):
    """The device functions of one selection plan."""

    store: Callable[[CheckpointPool, RecurrentState, jax.Array], CheckpointPool]
    load: Callable[[State, CheckpointPool, jax.Array, jax.Array], State]


def model_steps(config: ModelConfig, dtype: str) -> ModelSteps:
    """The steps of a model; pure, not yet compiled."""
    model = functions(config, dtype)

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
        return score(merge(config, dtype, params).logits(hidden[rows]), targets)

    return ModelSteps(prefill, decode, score_rows)


def checkpoint_steps(plan: SelectionPlan) -> CheckpointSteps:
    """The steps of a selection plan; pure, not yet compiled."""

    def store_slots(
        pool: CheckpointPool, boundary: RecurrentState, slots: Int32[Array, "NB"]
    ) -> CheckpointPool:
        """Pack boundary states into pool slots (0: drop)."""
        return store(plan, pool, slots, *boundary)

    def load_slots(
        state: State,
        pool: CheckpointPool,
        checkpoints: Int32[Array, "M"],
        slots: Int32[Array, "M"],
    ) -> State:
        """Unpack checkpoints into active slots: retained units exact, the others zero."""
        return State(restore(plan, state.recurrent, pool, checkpoints, slots), state.pages)

    return CheckpointSteps(store_slots, load_slots)


def repack(
    plan: SelectionPlan,
    exact: SelectionPlan,
    pool: CheckpointPool,
    dense: CheckpointPool,
    slots: Int32[Array, "M"],
) -> CheckpointPool:
    """Slots of `pool`, of any plan and quantization, from the dense float32 ones in `dense`.

    A dense checkpoint is the state itself, bit for bit, so this is what a store at the time would
    have put there.
    """
    return store(plan, pool, slots, *load(exact, dense, slots))
