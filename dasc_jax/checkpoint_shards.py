"""Checkpoints under tensor parallelism: the twin of `checkpoint_state` over the ranks of a mesh.

The same functions under the same names, with `Shards` in place of a plan (sections 4.3 and 5.3 of
the DASC paper). States are sharded over heads and channels, in the order that the ranks compute
them; pools over rows and channels. A slot has `storage.width` rows on every rank, so the pool of a
rank is `slots` times what `layout.account` says. What a rank does is in `rank_slots`.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int

from dasc_jax import checkpoint_state, rank_slots
from dasc_jax.balance import Storage
from dasc_jax.checkpoint_state import CheckpointPool, Packed, check_state
from dasc_jax.config import ModelConfig
from dasc_jax.head_order import reorder
from dasc_jax.parallel import AXIS, STATE_SPEC
from dasc_jax.plan import SelectionPlan
from dasc_jax.rank_slots import RankTables, rank_tables
from dasc_jax.types import RecurrentState
from dasc_jax.unit_exchange import Form

STATE: Any = RecurrentState(STATE_SPEC, STATE_SPEC)  # type: ignore
ALL = PartitionSpec()


@dataclasses.dataclass(frozen=True)
class Shards:
    """What the functions here take in place of a plan; static under `jax.jit`.

    `plan` is of the model as released, whatever order `storage` gives the heads. `mesh` has an axis
    "tp" of `storage.tp` ranks. `form` is how units travel between ranks; None: the cheapest.
    Raises ValueError where the three do not belong together.
    """

    plan: SelectionPlan
    storage: Storage
    mesh: Mesh
    form: Form | None = None

    def __post_init__(self):
        if self.storage.plan_id != self.plan.id:
            raise ValueError(
                f"the storage schedule is of plan {self.storage.plan_id}, not {self.plan}"
            )
        ranks = self.mesh.shape.get(AXIS, 0)
        if ranks != self.storage.tp:
            raise ValueError(f"a schedule for tp={self.storage.tp}, a mesh of {ranks} ranks")


def keep_masks(shards: Shards, key_dim: int) -> Bool[np.ndarray, "L H K"]:
    """Retained units, the heads of rank after rank in the order they are computed in.

    What `wr` does not replay: the `keep` of a batch, sharded over H. GDN heads are repeated over
    `key_dim` columns.
    """
    plan, order = shards.plan, shards.storage.order
    plan = plan if order is None else reorder(plan, order)
    return np.stack([plan.mask(layer, key_dim) for layer in range(plan.layers)])


def init_pool(
    shards: Shards,
    config: ModelConfig,
    slots: int,
    *,
    quantization: Literal["int8"] | None = None,
    conv_dtype: jnp.dtype | type | str | None = None,
) -> CheckpointPool:
    """A zeroed pool of `slots` checkpoints, the sink included; every part is made on its own rank.

    Rows are [slots, tp width, V] (KDA) or [slots, tp width, K, V] (GDN), scales alike, windows
    [slots, L, C, 3]. Raises what `checkpoint_state.init_pool` raises.
    """
    make = partial(
        checkpoint_state.init_pool, shards.plan, config, slots,
        quantization=quantization, conv_dtype=conv_dtype,
    )  # fmt: skip
    width = shards.storage.tp * shards.storage.width

    alone = jax.eval_shape(make)

    def zeros(part: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.Array:
        shape = part.shape if part is alone.conv else (slots, width, *part.shape[2:])
        return jnp.zeros(shape, part.dtype, device=NamedSharding(shards.mesh, spec))

    return jax.tree.map(zeros, alone, _pool_specs(alone))


def store(
    shards: Shards,
    pool: CheckpointPool,
    slots: Int[Array, "M"],
    temporal: Float32[Array, "L M H K V"],
    conv: Float[Array, "L M C 3"],
) -> CheckpointPool:
    """Packs M states into the slots of a pool (donate it); slot 0 takes padding and stays zero.

    Slots other than 0 must be distinct and below the pool's size; others are dropped.
    """
    layers, _, heads, key_dim, _ = temporal.shape
    check_state(shards.plan, layers, heads, key_dim)

    def pack(tables: RankTables, rows: Any, scales: Any, slots: Any, temporal: Any) -> Any:
        return rank_slots.pack(shards.storage, shards.form, tables, rows, scales, temporal, slots)

    def keep_windows(_: RankTables, windows: Any, slots: Any, conv: Any) -> jax.Array:
        into = jnp.where(slots == 0, windows.shape[0], slots)
        return windows.at[into].set(jnp.swapaxes(conv, 0, 1).astype(windows.dtype), mode="drop")

    *parts, windows = _pool_specs(pool)
    rows, scales = pool.rows, pool.scales
    # XLA crashes on an empty result of a program of several devices.
    if shards.storage.width:
        specs = (*parts, ALL, STATE_SPEC)
        rows, scales = _on_ranks(shards, pack, specs, tuple(parts), rows, scales, slots, temporal)
    specs = (windows, ALL, STATE_SPEC)
    return Packed(
        rows, scales, _on_ranks(shards, keep_windows, specs, windows, pool.conv, slots, conv)
    )


def load(
    shards: Shards, pool: CheckpointPool, slots: Int[Array, "M"]
) -> tuple[Float32[Array, "L M H K V"], Float[Array, "L M C 3"]]:
    """Dense states of M slots: global units as stored, local ones exactly zero. Slot 0 gives zeros.

    This is `nr`, and `dense` for a plan that drops nothing; `wr` then overwrites the local units.
    """
    plan, row_shape = shards.plan, pool.rows.shape[2:]
    heads, key_dim = plan.unit_shape if plan.kind == "kda" else (*plan.unit_shape, row_shape[0])
    shape = (plan.layers, slots.shape[0], heads // shards.storage.tp, key_dim, row_shape[-1])

    def rank(tables: RankTables, pool: Packed, slots: Any) -> tuple[jax.Array, jax.Array]:
        temporal = rank_slots.unpack(
            shards.storage, shards.form, tables, jnp.zeros(shape, jnp.float32),
            pool.rows, pool.scales, slots, jnp.arange(slots.shape[0]),
        )  # fmt: skip
        return temporal, jnp.swapaxes(pool.conv[slots], 0, 1)

    return _on_ranks(shards, rank, (_pool_specs(pool), ALL), tuple(STATE), pool, slots)


def restore(
    shards: Shards,
    state: RecurrentState,
    pool: CheckpointPool,
    checkpoints: Int[Array, "M"],
    slots: Int[Array, "M"],
) -> RecurrentState:
    """What `load` gives of M checkpoints, written to active slots of `state` (donate it).

    Pairs of checkpoint 0 and slot 0 are padding; the other slots are distinct.
    """
    layers, _, heads, key_dim, _ = state.temporal.shape
    check_state(shards.plan, layers, heads, key_dim)

    def rank(
        tables: RankTables, state: RecurrentState, pool: Packed, checkpoints: Any, slots: Any
    ) -> RecurrentState:
        temporal = rank_slots.unpack(
            shards.storage, shards.form, tables, state.temporal,
            pool.rows, pool.scales, checkpoints, slots,
        )  # fmt: skip
        windows = jnp.swapaxes(pool.conv[checkpoints], 0, 1).astype(state.conv.dtype)
        return RecurrentState(temporal, state.conv.at[:, slots].set(windows))

    specs = (STATE, _pool_specs(pool), ALL, ALL)
    return _on_ranks(shards, rank, specs, STATE, state, pool, checkpoints, slots)


def _on_ranks(
    shards: Shards, run: Callable[..., Any], in_specs: Any, out_specs: Any, *args: Any
) -> Any:
    """`run(tables, *args)` on every rank, with its own tables and its parts of the arguments."""

    def rank(tables: RankTables, *args: Any) -> Any:
        return run(RankTables(*(table[0] for table in tables)), *args)

    sharded = jax.shard_map(
        rank,
        mesh=shards.mesh,
        in_specs=(PartitionSpec(AXIS), *in_specs),
        out_specs=out_specs,
        # The GPU kernels update pools through references, of which JAX cannot tell how they vary.
        check_vma=False,
    )
    return sharded(rank_tables(shards.storage), *args)


def _pool_specs(pool: CheckpointPool) -> Any:
    """How rows and scales of a pool lie on the ranks, and its windows `[S, L, C, 3]`."""
    rows, windows = PartitionSpec(None, AXIS), PartitionSpec(None, None, AXIS)
    return Packed(rows, None if pool.scales is None else rows, windows)  # type: ignore
