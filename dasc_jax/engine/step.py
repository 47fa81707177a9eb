"""The three functions that run on the device: prefill, decode, and loading checkpoints into slots.

Each takes what it changes first and returns it first, so that the engine can donate it; nothing
else in the engine touches device memory.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jaxtyping import Array, Int32

from dasc_jax.checkpoint_state import CheckpointPool, load, store
from dasc_jax.config import ModelConfig
from dasc_jax.engine.sampling import Sampled, SamplingBatch, sample
from dasc_jax.models import DecodeBatch, Params, PrefillBatch, State, functions
from dasc_jax.plan import SelectionPlan
from dasc_jax.types import RecurrentState


class Memory(NamedTuple):
    """All device memory of an engine but the weights: active state and the checkpoint pool."""

    state: State
    pool: CheckpointPool


class Steps(NamedTuple):
    """The device functions of one model and plan."""

    prefill: Callable[
        [Memory, Params, PrefillBatch, SamplingBatch, jax.Array], tuple[Memory, Sampled]
    ]
    decode: Callable[[State, Params, DecodeBatch, SamplingBatch], tuple[State, Sampled]]
    load: Callable[[State, CheckpointPool, jax.Array, jax.Array], State]


def make_steps(config: ModelConfig, dtype: str, plan: SelectionPlan) -> Steps:
    """The steps of a model under a selection plan; pure, not yet compiled."""
    model = functions(config, dtype)

    def prefill(
        memory: Memory,
        params: Params,
        batch: PrefillBatch,
        sampling: SamplingBatch,
        store_slots: Int32[Array, "NB"],
    ) -> tuple[Memory, Sampled]:
        """Run packed prompt tokens, checkpoint wanted boundaries into `store_slots` (0: drop)."""
        state, out = model.prefill(params, memory.state, batch)
        pool = store(plan, memory.pool, store_slots, *out.boundary)
        return Memory(state, pool), sample(out.logits, sampling)

    def decode(
        state: State, params: Params, batch: DecodeBatch, sampling: SamplingBatch
    ) -> tuple[State, Sampled]:
        """One token of every request of the batch."""
        state, logits = model.decode(params, state, batch)
        return state, sample(logits, sampling)

    def load_slots(
        state: State,
        pool: CheckpointPool,
        checkpoints: Int32[Array, "M"],
        slots: Int32[Array, "M"],
    ) -> State:
        """Unpack checkpoints into active slots: retained units exact, the others zero."""
        temporal, conv = load(plan, pool, checkpoints)
        recurrent = RecurrentState(
            state.recurrent.temporal.at[:, slots].set(temporal),
            state.recurrent.conv.at[:, slots].set(conv.astype(state.recurrent.conv.dtype)),
        )
        return State(recurrent, state.pages)

    return Steps(prefill, decode, load_slots)
