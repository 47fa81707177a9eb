"""Stage 2 of the TP-balanced placement: which rank stores which units (DASC, section 4.3).

A checkpoint is sharded over the ranks, so the fullest one decides how many fit. Under `storage` and
`hybrid` the group is one pool: a rank with more units than C = ceil(sum_r U_r / tp) sends the rest
to ranks with fewer when a checkpoint is stored, and gets them back when it is loaded. `hybrid`
orders the heads before (stage 1, `dasc_jax.head_order`), so that little is left to send. Everything
here is static host data; what moves is decided once, before serving.
"""

import dataclasses
import hashlib
import math
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int32

from dasc_jax.config import ModelConfig
from dasc_jax.head_order import HeadOrder, head_order, reorder
from dasc_jax.plan import SelectionPlan

Placement = Literal["off", "storage", "hybrid"]
"""`off`: a rank stores the units of its own heads. `storage`: ranks share evenly, heads as they
are. `hybrid`: the same after the heads are ordered."""


class Transfer(NamedTuple):
    """Units of rank `source` that `target` stores: their local numbers, and their rows there."""

    source: int
    target: int
    units: Int32[np.ndarray, "N"]
    rows: Int32[np.ndarray, "N"]


@dataclasses.dataclass(frozen=True, eq=False)
class Storage:
    """Where every retained unit of a checkpoint is stored; equal and hashed by `id`.

    A *local unit* is numbered within the heads of its rank, layer-major like
    `SelectionPlan.index`: (l Hr + h) K + k for KDA, l Hr + h for GDN, with Hr = H/tp heads (in the
    new order, if any) and l counting recurrent layers. Missing entries of all tables are -1. The
    leading axis of a table is the rank that uses it, so it is sharded over the mesh as it is.

    `local_units`: units of a rank, retained or not. `width`: C, the rows of a slot on every rank.
    `own[r, i]`: the local unit of r that stays and lies in row i of r. Own units come first, in
    ascending order; received ones follow, by source.
    `send_units[r, s, m]`: the m-th local unit that r sends to s on a store.
    `recv_rows[s, r, m]`: the row of s where that unit lies.
    On a load the same tables are read the other way: s sends rows `recv_rows[s, r]` to r, which
    puts them into units `send_units[r, s]`.
    """

    tp: int
    placement: Placement
    order: HeadOrder | None
    plan_id: str
    local_units: int
    width: int
    own: Int32[np.ndarray, "tp width"]
    send_units: Int32[np.ndarray, "tp tp M"]
    recv_rows: Int32[np.ndarray, "tp tp M"]

    @cached_property
    def sends(self) -> tuple[Transfer, ...]:
        """The moves of a store, by source and then target; pairs without any are left out."""
        kept = self.send_units >= 0
        return tuple(
            Transfer(int(r), int(s), self.send_units[r, s][kept[r, s]],
                     self.recv_rows[s, r][kept[r, s]])
            for r, s in np.argwhere(kept.any(axis=2))
        )  # fmt: skip

    @cached_property
    def moved(self) -> int:
        """Units that a store sends to another rank, and a load back."""
        return int((self.send_units >= 0).sum())

    @cached_property
    def units(self) -> tuple[int, ...]:
        """Units that a slot needs room for on every rank: U_r under `off`, else C for all alike."""
        if self.placement == "off":
            return tuple(int(n) for n in (self.own >= 0).sum(axis=1))
        return (self.width,) * self.tp

    def rows_of(self, rank: int) -> Int32[np.ndarray, "N 2"]:
        """(rank that computes it, its local unit there) of every row in use at `rank`, in order."""
        own = self.own[rank][self.own[rank] >= 0]
        parts = [np.stack([np.full(own.size, rank), own], axis=1)]
        for move in self.sends:
            if move.target == rank:
                parts.append(np.stack([np.full(move.units.size, move.source), move.units], axis=1))
        return np.concatenate(parts).astype(np.int32)

    @cached_property
    def store_index(self) -> Int32[np.ndarray, "tp width"]:
        """What fills every row of a slot: an index into the rank's units, then what it received.

        u < `local_units` is a local unit; `local_units` + r M + m is the m-th unit from r, as an
        all_to_all of [tp, M, ...] delivers them; -1 leaves a row empty.
        """
        table = self.own.copy()
        s, r, m = np.nonzero(self.recv_rows >= 0)
        table[s, self.recv_rows[s, r, m]] = self.local_units + r * self.recv_rows.shape[2] + m
        return _frozen(table)

    @cached_property
    def load_index(self) -> Int32[np.ndarray, "tp units"]:
        """Where every local unit comes from: an index into the slot's rows, then what came back.

        i < `width` is a row of the rank's own slot; `width` + s M + m is the m-th row from s;
        -1 is a unit that no checkpoint keeps.
        """
        table = np.full((self.tp, self.local_units), -1, np.int32)
        r, i = np.nonzero(self.own >= 0)
        table[r, self.own[r, i]] = i
        r, s, m = np.nonzero(self.send_units >= 0)
        table[r, self.send_units[r, s, m]] = self.width + s * self.send_units.shape[2] + m
        return _frozen(table)

    @cached_property
    def id(self) -> str:
        """32 hex digits; a stored slot means something under this schedule and no other."""
        order = None if self.order is None else self.order.id
        head = (self.plan_id, self.tp, self.placement, order, self.local_units, self.width)
        digest = hashlib.blake2b(repr(head).encode(), digest_size=16)
        for table in (self.own, self.send_units, self.recv_rows):
            digest.update(table.tobytes())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Storage) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)


def place(plan: SelectionPlan, config: ModelConfig, tp: int, placement: Placement) -> Storage:
    """The schedule of a placement, the heads ordered first under `hybrid`."""
    order = head_order(plan, config, tp) if placement == "hybrid" else None
    return storage_schedule(plan, tp, placement, order)


def storage_schedule(
    plan: SelectionPlan, tp: int, placement: Placement, order: HeadOrder | None = None
) -> Storage:
    """Who stores what. `plan` is of the model as released; `order` is given for `hybrid` alone.

    `off` makes slots of max_r U_r rows, the others of C. A rank above C keeps its first C units,
    so sum_r max(U_r - C, 0) units move, and no schedule of C rows moves fewer; they are dealt to
    the ranks below C in turn, which keeps the widest pair, M, small.
    Raises ValueError when `tp` does not divide the heads, or `placement` and `order` do not fit.
    """
    if placement not in ("off", "storage", "hybrid"):
        raise ValueError(f"placement={placement!r}: expected 'off', 'storage' or 'hybrid'")
    if (placement == "hybrid") != (order is not None):
        raise ValueError(
            f"placement {placement!r} {'needs an' if order is None else 'has no'} order"
        )
    if tp < 1 or plan.unit_shape[0] % tp:
        raise ValueError(f"tp={tp} does not divide {plan.unit_shape[0]} heads")
    if order is not None and order.tp != tp:
        raise ValueError(f"the order is for tp={order.tp}, not tp={tp}")
    units = _retained(plan if order is None else reorder(plan, order), tp)
    share = math.ceil(plan.total / tp)
    width = max(map(len, units)) if placement == "off" else share
    own = np.full((tp, width), -1, np.int32)
    for rank, some in enumerate(units):
        own[rank, : len(some)] = some[:width]
    send_units, recv_rows = _moves(units, width)
    return Storage(
        tp, placement, order, plan.id, plan.units // tp, width,
        _frozen(own), _frozen(send_units), _frozen(recv_rows),
    )  # fmt: skip


def _retained(plan: SelectionPlan, tp: int) -> list[np.ndarray]:
    """The local numbers of the retained units of every rank, ascending."""
    masks = np.stack(plan.retained).reshape(plan.layers, tp, -1)
    return [np.flatnonzero(masks[:, rank]) for rank in range(tp)]


def _moves(units: list[np.ndarray], width: int) -> tuple[np.ndarray, np.ndarray]:
    """`send_units` and `recv_rows` of ranks that have `units` and room for `width` of them."""
    tp = len(units)
    counts = _dealt([len(some) for some in units], width)
    shape = (tp, tp, int(counts.max()))
    send_units, recv_rows = np.full(shape, -1, np.int32), np.full(shape, -1, np.int32)
    filled = [min(len(some), width) for some in units]
    for source in range(tp):
        at = width
        for target in range(tp):
            n = counts[source, target]
            send_units[source, target, :n] = units[source][at : at + n]
            recv_rows[target, source, :n] = filled[target] + np.arange(n)
            at, filled[target] = at + n, filled[target] + n
    return send_units, recv_rows


def _dealt(counts: list[int], width: int) -> np.ndarray:
    """Units that every rank sends to every other, [tp, tp]: one at a time to whom it sent least."""
    moves = np.zeros((len(counts), len(counts)), np.int64)
    room = np.array([width - n for n in counts])
    for source in sorted(range(len(counts)), key=lambda r: -counts[r]):
        for _ in range(counts[source] - width):
            open_ = np.flatnonzero(room > 0)
            target = open_[np.lexsort((-room[open_], moves[source, open_]))[0]]
            moves[source, target] += 1
            room[target] -= 1
    return moves


def _frozen(values: np.ndarray) -> np.ndarray:
    array = np.ascontiguousarray(values, np.int32)
    array.flags.writeable = False
    return array
