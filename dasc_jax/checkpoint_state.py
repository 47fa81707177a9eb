"""Section 4 of the DASC paper in one file: what a checkpoint holds, and what a load gives back.

A checkpoint is the *packed* state at one token depth: the retained units of all recurrent layers as
rows of one array (the ragged layout, appendix B), optionally in int8 (Eq. 10), and the convolution
windows as they are. Everything on arrays is a pure function that `jax.jit` takes with the plan (and
`quantization`) static; pack and unpack are one row gather each, through the plan's index table.

Slot 0 of a pool is the padding sink: writes to it are dropped, so it always loads as a zero state.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Shaped

from dasc_jax.config import ModelConfig
from dasc_jax.plan import SelectionPlan
from dasc_jax.types import RecurrentState
from pallas_kernels import packing, ragged_pack, ragged_unpack

Policy = Literal["dense", "nr", "wr"]
"""How a hit treats local units: there are none (`dense`), zeros (`nr`), or replayed (`wr`)."""

CONV_WINDOW = 3
"""Past inputs that a convolution of kernel 4 needs."""


class Packed(NamedTuple):
    """Packed checkpoints, one per leading index: requests `[B, ...]`, or slots `[S, ...]` of a
    pool.

    `rows`: [B, R, V] (KDA) or [B, R, K, V] (GDN), float32 or int8. `scales`: one float32 per
    (layer, head, key channel), [B, R] or [B, R, K]; None for float32 rows. `conv`: [B, L, C, 3] in
    the model's dtype.
    """

    rows: Shaped[Array, "B R *K V"]
    scales: Float32[Array, "B R *K"] | None
    conv: Float[Array, "B L C 3"]


CheckpointPool = Packed
"""A pool is a `Packed` whose leading axis counts slots; slot 0 is the sink."""


class CheckpointMeta(NamedTuple):
    """What a checkpoint describes: the state after `depth` tokens, whose ids hash to `token_hash`.

    `lineage` counts the lossy loads behind it: 0 is the state an uninterrupted run would have.
    """

    depth: int
    token_hash: bytes
    plan_id: str
    lineage: int


def pack(
    plan: SelectionPlan, state: RecurrentState, *, quantization: Literal["int8"] | None = None
) -> Packed:
    """The checkpoints of the B requests in `state`: retained units and convolution windows.

    Raises ValueError when the plan is not of this state's shape.
    """
    layers, batch, heads, key_dim, value_dim = state.temporal.shape
    check_state(plan, layers, heads, key_dim)
    unit = _row_shape(plan, key_dim, value_dim)
    rows = packing.take(state.temporal, jnp.asarray(plan.index), jnp.arange(batch), unit)
    scales = None
    if quantization == "int8":
        rows, scales = packing.quantize(rows)
    return Packed(rows, scales, jnp.swapaxes(state.conv, 0, 1))


def unpack(plan: SelectionPlan, packed: Packed) -> RecurrentState:
    """Dense states of packed checkpoints: retained units as stored, exact zeros elsewhere."""
    return RecurrentState(*load(plan, packed, jnp.arange(packed.rows.shape[0])))


def init_pool(
    plan: SelectionPlan,
    config: ModelConfig,
    slots: int,
    *,
    quantization: Literal["int8"] | None = None,
    conv_dtype: jnp.dtype | type | str | None = None,
) -> CheckpointPool:
    """A zeroed pool of `slots` checkpoints, the sink included; `conv_dtype` is by default the
    model's.

    Raises ValueError when the plan is not of this model's shape, or `slots` leaves no usable slot.
    """
    delta, layers = config.delta, len(config.recurrent_layers)
    check_state(plan, layers, delta.num_value_heads, delta.key_dim)
    if plan.kind != delta.kind:
        raise ValueError(f"the plan selects {plan.kind} units, the model has {delta.kind} layers")
    if slots < 2:
        raise ValueError(f"a pool of {slots} slots: slot 0 is the sink, so at least 2 are needed")
    shape = (slots, plan.total, *_row_shape(plan, delta.key_dim, delta.value_dim))
    return Packed(
        jnp.zeros(shape, jnp.int8 if quantization == "int8" else jnp.float32),
        jnp.zeros(shape[:-1], jnp.float32) if quantization == "int8" else None,
        jnp.zeros((slots, layers, delta.conv_channels, CONV_WINDOW), conv_dtype or config.dtype),
    )


def store(
    plan: SelectionPlan,
    pool: CheckpointPool,
    slots: Int[Array, "M"],
    temporal: Float32[Array, "L M H K V"],
    conv: Float[Array, "L M C 3"],
) -> CheckpointPool:
    """Packs M states into the slots of a pool (donate it); slot 0 takes padding and stays zero.

    Slots other than 0 must be distinct and below the pool's size; others are dropped.
    """
    layers, states, heads, key_dim, _ = temporal.shape
    check_state(plan, layers, heads, key_dim)
    rows, scales = ragged_pack(
        pool.rows, pool.scales, temporal, jnp.asarray(plan.index), slots, jnp.arange(states)
    )
    into = jnp.where(slots == 0, pool.conv.shape[0], slots)
    windows = jnp.swapaxes(conv, 0, 1).astype(pool.conv.dtype)
    return Packed(rows, scales, pool.conv.at[into].set(windows, mode="drop"))


def load(
    plan: SelectionPlan, pool: CheckpointPool, slots: Int[Array, "M"]
) -> tuple[Float32[Array, "L M H K V"], Float[Array, "L M C 3"]]:
    """Dense states of M slots: global units as stored, local ones exactly zero. Slot 0 gives zeros.

    This is `nr`, and `dense` for a plan that drops nothing; `wr` then overwrites the local units.
    """
    row_shape = pool.rows.shape[2:]
    heads, key_dim = plan.unit_shape if plan.kind == "kda" else (*plan.unit_shape, row_shape[0])
    shape = (plan.layers, slots.shape[0], heads, key_dim, row_shape[-1])
    conv = jnp.swapaxes(pool.conv[slots], 0, 1)
    if not plan.total:
        return jnp.zeros(shape, jnp.float32), conv
    inverse = jnp.asarray(plan.inverse)
    units = packing.spread(pool.rows, pool.scales, inverse, slots, plan.layers)
    return units.reshape(shape), conv


def restore(
    plan: SelectionPlan,
    state: RecurrentState,
    pool: CheckpointPool,
    checkpoints: Int[Array, "M"],
    slots: Int[Array, "M"],
) -> RecurrentState:
    """What `load` gives of M checkpoints, written to active slots of `state` (donate it).

    Pairs of checkpoint 0 and slot 0 are padding; the other slots are distinct.
    """
    temporal = ragged_unpack(
        state.temporal, pool.rows, pool.scales, jnp.asarray(plan.inverse), checkpoints, slots
    )
    windows = jnp.swapaxes(pool.conv[checkpoints], 0, 1).astype(state.conv.dtype)
    return RecurrentState(temporal, state.conv.at[:, slots].set(windows))


def verify(
    meta: CheckpointMeta, *, depth: int, token_hash: bytes, plan_id: str
) -> Literal["depth_mismatch", "token_mismatch", "plan_mismatch"] | None:
    """None when the checkpoint is the one a load expects, else why it must not be loaded."""
    if meta.depth != depth:
        return "depth_mismatch"
    if meta.token_hash != token_hash:
        return "token_mismatch"
    return None if meta.plan_id == plan_id else "plan_mismatch"


def replay_span(plan: SelectionPlan, depth: int, policy: Policy) -> tuple[int, int, int]:
    """Where a hit at `depth` starts computing: (start position, replayed tokens, lead-in tokens).

    `wr` replays min(window, depth) tokens before `depth` from a zero state, and up to three more in
    front of them so that the short convolution is exact at the first replayed one: `start` is
    `depth` minus both. Nothing is replayed under `nr` and `dense`, or when nothing is local.
    """
    units(plan, policy)
    if depth < 0:
        raise ValueError(f"depth={depth} tokens cannot be negative")
    if policy != "wr" or plan.window == 0:
        return depth, 0, 0
    replayed = min(plan.window, depth)
    lead_in = min(CONV_WINDOW, depth - replayed)
    return depth - replayed - lead_in, replayed, lead_in


def units(plan: SelectionPlan, policy: Policy) -> tuple[int, int, int]:
    """Units that a load takes from the checkpoint, leaves at zero, and refreshes by replay.

    Raises ValueError for an unknown policy, and for `dense` under a plan that drops units.
    """
    local = plan.units - plan.total
    match policy:
        case "dense":
            if local:
                raise ValueError(
                    f"policy 'dense' needs a plan that keeps every unit;"
                    f" this one (w_max={plan.w_max}) drops {local} of {plan.units}"
                )
            return plan.total, 0, 0
        case "nr":
            return plan.total, local, 0
        case "wr":
            return plan.total, 0, local
    raise ValueError(f"policy {policy!r}: expected 'dense', 'nr' or 'wr'")


def _row_shape(plan: SelectionPlan, key_dim: int, value_dim: int) -> tuple[int, ...]:
    return (value_dim,) if plan.kind == "kda" else (key_dim, value_dim)


def check_state(plan: SelectionPlan, layers: int, heads: int, key_dim: int) -> None:
    """Raises ValueError unless `plan` selects from states of these sizes."""
    expected = (heads, key_dim) if plan.kind == "kda" else (heads,)
    if (plan.layers, plan.unit_shape) != (layers, expected):
        raise ValueError(
            f"the plan selects from {plan.layers} layers of units {plan.unit_shape},"
            f" the state has {layers} layers of {expected}"
        )
