"""Stage 1 of the TP-balanced placement: which rank computes which heads (DASC, section 4.3).

Ranks compute as many heads as before, in every layer, so their work stays even; what is chosen is
*which* ones, so that what the ranks keep of them is even too. Heads that share weights move
together, as a *bundle*: a KDA head, or a GDN key head with its H/Hk value heads. To permute the
bundles of a layer is an exact reindexing of its weights, made once when they are loaded.
"""

import dataclasses
import hashlib
import math
from functools import cached_property

import numpy as np
from jaxtyping import Int32, Int64

from dasc_jax.config import ModelConfig
from dasc_jax.plan import SelectionPlan

_WIDEST = 20_000
"""Sums that a layer of the exact search may look at; larger cases keep the swaps' answer."""


@dataclasses.dataclass(frozen=True, eq=False)
class HeadOrder:
    """An order of the bundles of every recurrent layer; equal and hashed by content.

    `bundles[l][p]` is the old bundle at new position p of recurrent layer number l; rank r has
    positions [r Hk/tp, (r+1) Hk/tp). `heads` value heads make a bundle. `weights[l, b]` are the
    retained units of old bundle b.
    """

    bundles: tuple[Int32[np.ndarray, "Hk"], ...]
    tp: int
    heads: int
    weights: Int64[np.ndarray, "L Hk"]

    def value_heads(self, layer: int) -> Int32[np.ndarray, "H"]:
        """The old value head at every new position of recurrent layer number `layer`."""
        first = self.bundles[layer] * self.heads
        return _frozen((first[:, None] + np.arange(self.heads)).ravel())

    def inverse(self) -> "HeadOrder":
        """The order that leads from the permuted model back to the one before."""
        bundles = tuple(_frozen(np.argsort(order)) for order in self.bundles)
        weights = np.stack([w[order] for w, order in zip(self.weights, self.bundles, strict=True)])
        return HeadOrder(bundles, self.tp, self.heads, _frozen(weights, np.int64))

    @cached_property
    def identity(self) -> bool:
        """Whether every bundle stays where it is."""
        return all(np.array_equal(order, np.arange(order.size)) for order in self.bundles)

    @cached_property
    def payload(self) -> tuple[int, ...]:
        """U_r of every rank: retained units of its bundles, over all layers."""
        moved = [w[order] for w, order in zip(self.weights, self.bundles, strict=True)]
        return tuple(int(n) for n in np.sum(moved, axis=0).reshape(self.tp, -1).sum(axis=1))

    @property
    def worst(self) -> int:
        """The largest payload: what stage 1 alone makes a slot."""
        return max(self.payload)

    @cached_property
    def lower_bound(self) -> int:
        """No order has a smaller `worst`: the larger of two bounds.

        One is the even share, ceil(sum_r U_r / tp). The other is the heaviest company: some rank
        has a given bundle, with Hk/tp - 1 others of its layer and Hk/tp of every other layer, and
        those weigh no less than the lightest ones.
        """
        count = self.weights.shape[1] // self.tp
        ascending = np.sort(self.weights, axis=1)
        lightest = ascending[:, :count].sum()
        # A bundle is no lighter than the one it takes the place of among the lightest.
        company = lightest + (ascending[:, -1] - ascending[:, count - 1]).max()
        return max(math.ceil(int(self.weights.sum()) / self.tp), int(company))

    @cached_property
    def id(self) -> str:
        """32 hex digits over everything that the order holds."""
        digest = hashlib.blake2b(repr((self.tp, self.heads)).encode(), digest_size=16)
        digest.update(np.stack(self.bundles).tobytes())
        digest.update(repr(self.weights.shape).encode() + self.weights.tobytes())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HeadOrder) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)


def head_order(plan: SelectionPlan, config: ModelConfig, tp: int) -> HeadOrder:
    """The order with the smallest `worst` found, and of those with the least to move in stage 2.

    Heaviest bundles first to the lightest rank that has room in their layer, then swaps within
    layers until none helps. Where that misses `lower_bound` and the model is small, all divisions
    are searched, so that `worst` is the minimum. Deterministic; the identity where nothing beats
    it. Raises ValueError when the plan is not of this model or `tp` does not divide the bundles.
    """
    heads, bundles = config.delta.num_value_heads, config.delta.num_key_heads
    if (plan.layers, plan.unit_shape[0]) != (len(config.recurrent_layers), heads):
        raise ValueError(
            f"the plan selects from {plan.layers} layers of {plan.unit_shape[0]} heads,"
            f" the model has {len(config.recurrent_layers)} of {heads}"
        )
    if tp < 1 or bundles % tp:
        raise ValueError(f"tp={tp} does not divide {bundles} head bundles")
    retained = np.stack(plan.retained).reshape(plan.layers, bundles, -1)
    weights = _frozen(retained.sum(axis=2), np.int64)

    def order(rank: np.ndarray) -> HeadOrder:
        positions = tuple(_frozen(np.argsort(row, kind="stable")) for row in rank)
        return HeadOrder(positions, tp, heads // bundles, weights)

    natural = np.repeat(np.arange(tp), bundles // tp)[None].repeat(plan.layers, axis=0)
    found = [order(natural)]
    if tp > 1:
        found.append(order(_swapped(weights, _dealt(weights, tp), tp)))
        best = min(found, key=_cost)
        if best.worst > best.lower_bound:
            found += [order(rank) for rank in _searched(weights, tp, best.worst)]
    return min(found, key=_cost)


def reorder(plan: SelectionPlan, order: HeadOrder) -> SelectionPlan:
    """The same selection, of the model whose heads are in the new order.

    It keeps the fingerprint: the decay weights are the same ones, permuted.
    """
    masks = [mask[order.value_heads(layer)] for layer, mask in enumerate(plan.retained)]
    return dataclasses.replace(plan, retained=tuple(_frozen(mask, bool) for mask in masks))


def _cost(order: HeadOrder) -> tuple[int, int]:
    share = math.ceil(sum(order.payload) / order.tp)
    return order.worst, sum(max(n - share, 0) for n in order.payload)


def _dealt(weights: np.ndarray, tp: int) -> np.ndarray:
    """The rank of every bundle [L, Hk]: longest processing time first, with equal counts."""
    layers, bundles = weights.shape
    rank = np.zeros((layers, bundles), np.int64)
    room = np.full((layers, tp), bundles // tp)
    loads = np.zeros(tp, np.int64)
    for at in np.argsort(-weights.ravel(), kind="stable"):
        layer, bundle = divmod(int(at), bundles)
        target = int(np.argmin(np.where(room[layer] > 0, loads, np.iinfo(np.int64).max)))
        rank[layer, bundle] = target
        room[layer, target] -= 1
        loads[target] += weights[layer, bundle]
    return rank


def _swapped(weights: np.ndarray, rank: np.ndarray, tp: int) -> np.ndarray:
    """`rank` after the best swap of two bundles of a layer, again and again until none helps.

    A swap helps that makes the sum of squared loads smaller. Every swap that lowers the largest of
    two loads does, so in the end none lowers `worst`.
    """
    rank = rank.copy()
    lighter = weights[:, :, None] - weights[:, None, :]
    loads = np.bincount(rank.ravel(), weights.ravel(), tp).astype(np.int64)
    while True:
        gap = loads[rank][:, :, None] - loads[rank][:, None, :]
        gain = lighter * (gap - lighter)
        gain[rank[:, :, None] == rank[:, None, :]] = 0
        layer, a, b = np.unravel_index(int(gain.argmax()), gain.shape)
        if gain[layer, a, b] <= 0:
            return rank
        loads[rank[layer, a]] -= lighter[layer, a, b]
        loads[rank[layer, b]] += lighter[layer, a, b]
        rank[layer, [a, b]] = rank[layer, [b, a]]


def _searched(weights: np.ndarray, tp: int, worst: int) -> list[np.ndarray]:
    """The ranks with the smallest largest load, if that is below `worst` and the case is small.

    Layer by layer, over all loads that ranks can have; ranks are alike, so loads count as sorted.
    """
    layers, bundles = weights.shape
    count = bundles // tp
    if math.factorial(bundles) // math.factorial(count) ** tp > _WIDEST:
        return []
    divisions = _divisions(bundles, tp)
    rest = np.sort(weights, axis=1)[:, :count].sum(axis=1)[::-1].cumsum()[::-1]
    states, steps = np.zeros((1, tp), np.int64), []
    for layer in range(layers):
        parts = np.stack([(weights[layer] * (divisions == r)).sum(axis=1) for r in range(tp)], 1)
        parts, which = np.unique(parts, axis=0, return_index=True)
        if len(states) * len(parts) > _WIDEST:
            return []
        sums = (states[:, None] + parts).reshape(-1, tp)
        ahead = rest[layer + 1] if layer + 1 < layers else 0
        open_ = np.flatnonzero(sums.max(axis=1) + ahead < worst)
        if not open_.size:
            return []
        first = open_[np.unique(np.sort(sums[open_], axis=1), axis=0, return_index=True)[1]]
        steps.append((first // len(parts), which[first % len(parts)]))
        states = sums[first]
    at, rank = int(states.max(axis=1).argmin()), np.zeros(weights.shape, np.int64)
    for layer in reversed(range(layers)):
        before, division = steps[layer]
        rank[layer], at = divisions[division[at]], int(before[at])
    return [rank]


def _divisions(bundles: int, tp: int) -> np.ndarray:
    """All ways to give every rank as many bundles, one a row: the rank of each bundle."""
    found = [np.zeros(0, np.int64)]
    for _ in range(bundles):
        found = [
            np.append(some, rank)
            for some in found
            for rank in range(tp)
            if np.count_nonzero(some == rank) < bundles // tp
        ]
    return np.stack(found)


def _frozen(values: np.ndarray, dtype: type = np.int32) -> np.ndarray:
    array = np.ascontiguousarray(values, dtype)
    array.flags.writeable = False
    return array
