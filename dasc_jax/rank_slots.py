"""What one rank does for a slot that all ranks share: pack, send, receive, and back (section 4.3).

Legal inside `shard_map` over an axis of `storage.tp` ranks. A rank packs what it retains of its own
heads; what it has too much of crosses to the rank that stores it once at a store, quantised before
it leaves, and back once at a load. Where the schedule moves nothing there is no collective.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int, Int32, Shaped

from dasc_jax.balance import Storage
from dasc_jax.parallel import AXIS
from dasc_jax.unit_exchange import Form, cheapest, exchange
from pallas_kernels import ragged_pack, ragged_unpack


class RankTables(NamedTuple):
    """The tables of one rank, or of all along a leading axis to be sharded over the mesh.

    `pack[i]`: the local unit that goes into row i; any unit where the row is received or unused.
    `sent[s M + m]`: the m-th unit for rank s, any unit past the last. `received[r M + m]`: the row
    of the m-th unit from rank r; past the width, each another, behind the last. `unpack[u]`: where
    unit u lies among the rows and behind them what came back, -1 if nowhere.
    """

    pack: Int32[Array, "*tp width"]
    sent: Int32[Array, "*tp N"]
    received: Int32[Array, "*tp N"]
    unpack: Int32[Array, "*tp units"]


def rank_tables(storage: Storage) -> RankTables:
    """The tables of all ranks, `[tp, ...]`."""
    rows = storage.recv_rows.reshape(storage.tp, -1)
    # The ops gather without a test, and the scatter is told that its rows are distinct.
    behind = storage.width + np.arange(rows.shape[1], dtype=np.int32)
    return RankTables(
        pack=jnp.asarray(np.maximum(storage.own, 0)),
        sent=jnp.asarray(np.maximum(storage.send_units.reshape(storage.tp, -1), 0)),
        received=jnp.asarray(np.where(rows >= 0, rows, behind)),
        unpack=jnp.asarray(storage.load_index),
    )


def counts(storage: Storage) -> Int[np.ndarray, "tp tp"]:
    """Units that a store sends from every rank [source] to every other [target]."""
    return (storage.send_units >= 0).sum(axis=2)


def pack(
    storage: Storage,
    form: Form | None,
    tables: RankTables,
    rows: Shaped[Array, "S width *K V"],
    scales: Float32[Array, "S width *K"] | None,
    temporal: Float32[Array, "L M Hr K V"],
    slots: Int[Array, "M"],
) -> tuple[Shaped[Array, "S width *K V"], Float32[Array, "S width *K"] | None]:
    """This rank's rows of M states into the slots of its part of a pool, as `ragged_pack` does it.

    `form` is how units travel, None for the cheapest. Slot 0 and slots outside take nothing.
    """
    count = slots.shape[0]
    states = jnp.arange(count)
    rows, scales = ragged_pack(rows, scales, temporal, tables.pack, slots, states)
    if not storage.moved:
        return rows, scales
    # Slot 0 of what is sent is a sink too.
    outbox = (count + 1, *tables.sent.shape, *rows.shape[2:])
    sent = ragged_pack(
        jnp.zeros(outbox, rows.dtype),
        None if scales is None else jnp.zeros(outbox[:-1], jnp.float32),
        temporal,
        tables.sent,
        1 + states,
        states,
    )
    came = _travel(counts(storage), form, *jax.tree.map(lambda part: part[1:], sent))
    into = jnp.where((slots > 0) & (slots < rows.shape[0]), slots, rows.shape[0] + states)

    def written(pool: jax.Array, values: jax.Array) -> jax.Array:
        at = pool.at[into[:, None], tables.received]
        return at.set(values, mode="drop", unique_indices=True)

    return jax.tree.map(written, (rows, scales), came)


def unpack(
    storage: Storage,
    form: Form | None,
    tables: RankTables,
    temporal: Float32[Array, "L N Hr K V"],
    rows: Shaped[Array, "S width *K V"],
    scales: Float32[Array, "S width *K"] | None,
    slots: Int[Array, "M"],
    targets: Int[Array, "M"],
) -> Float32[Array, "L N Hr K V"]:
    """The units of this rank's heads out of M slots into its part of `temporal[:, targets]`, as
    `ragged_unpack` does it."""
    if storage.moved:
        inside = (slots > 0) & (slots < rows.shape[0])
        count = slots.shape[0]
        rows, scales = _whole(storage, form, tables, rows, scales, slots)
        # Slot 0 with target 0 is padding, a slot outside gives zeros: each stays what it is.
        slots = jnp.where(inside, 1 + jnp.arange(count), jnp.where(slots == 0, 0, 1 + count))
    return ragged_unpack(temporal, rows, scales, tables.unpack, slots, targets)


def _whole(
    storage: Storage,
    form: Form | None,
    tables: RankTables,
    rows: jax.Array,
    scales: jax.Array | None,
    slots: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
    """A pool of M checkpoints behind a sink: this rank's rows of `slots`, then what came back."""

    def taken(part: jax.Array, *at: jax.Array) -> jax.Array:
        return part.at[at].get(mode="fill", fill_value=0)

    def joined(part: jax.Array, more: jax.Array) -> jax.Array:
        whole = jnp.concatenate([taken(part, slots), more], axis=1)
        return jnp.concatenate([jnp.zeros_like(whole[:1]), whole])

    pool = rows, scales
    lent = jax.tree.map(lambda part: taken(part, slots[:, None], tables.received), pool)
    return jax.tree.map(joined, pool, _travel(counts(storage).T, form, *lent))


def _travel(
    moves: np.ndarray, form: Form | None, rows: jax.Array, scales: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Exchanges units [M, tp N, ...], N for every rank, of which `moves` [source, target] are real.

    int8 rows and their scales travel as one message.
    """
    message = rows
    if scales is not None:
        message = jnp.concatenate([rows, lax.bitcast_convert_type(scales, jnp.int8)], axis=-1)
    count, both, *unit = message.shape
    blocks = jnp.moveaxis(message.reshape(count, len(moves), -1, *unit), 0, 2)
    form = form or cheapest(moves, message.nbytes // both)
    message = jnp.moveaxis(exchange(blocks, moves, AXIS, form), 2, 0).reshape(message.shape)
    if scales is None:
        return message, None
    value_dim = rows.shape[-1]
    scales = lax.bitcast_convert_type(message[..., value_dim:], jnp.float32)
    return message[..., :value_dim], scales
