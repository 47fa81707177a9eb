"""Placement over ranks: the order of heads, who stores which unit, and that nothing is lost."""

import itertools
import math
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dasc_jax.balance import place, storage_schedule
from dasc_jax.head_order import head_order, reorder
from dasc_jax.plan import make_plan
from dasc_jax.published import published_config, published_profile

KIMI, QWEN = "kimi-linear-48b", "qwen3-next-80b"
PLACEMENTS = ("off", "storage", "hybrid")


def small_config(kind, layers, bundles, heads=1, key_dim=8):
    config = published_config(KIMI if kind == "kda" else QWEN)
    delta = replace(config.delta, num_key_heads=bundles, num_value_heads=bundles * heads,
                    key_dim=key_dim)  # fmt: skip
    kinds = ("delta",) * layers + ("attention",)
    return replace(config, num_layers=layers + 1, layer_kinds=kinds, delta=delta,
                   ffn_kinds=("moe",) * (layers + 1))  # fmt: skip


def random_case(seed, kind, layers=3, bundles=8, heads=2):
    """A model and a plan whose heads and layers keep very different shares of their units."""
    config = small_config(kind, layers, bundles, heads if kind == "gdn" else 1)
    rng = np.random.default_rng(seed)
    shape = (layers, config.delta.num_value_heads, 8)[: 3 if kind == "kda" else 2]
    share = rng.uniform(size=(*shape[:2], 1)[: len(shape)]) ** rng.uniform(0.3, 4)
    return config, make_plan(list(np.where(rng.uniform(size=shape) < share, 100.0, 1.0)), 16)


def plan_of(weights):
    """A plan of KDA heads that keep `weights[l][h]` of 8 channels."""
    weights = np.asarray(weights)
    return make_plan(list(np.where(np.arange(8) < weights[..., None], 100.0, 1.0)), 16)


def smallest_worst(weights, tp):
    """By trying every division of every layer's heads."""
    layers, heads = np.shape(weights)
    loads = np.zeros((1, tp), int)
    for layer in weights:
        orders = np.array(list(itertools.permutations(layer))).reshape(-1, tp, heads // tp)
        parts = np.unique(orders.sum(axis=2), axis=0)
        loads = np.unique((loads[:, None] + parts).reshape(-1, tp), axis=0)
    return loads.max(axis=1).min()


cases = st.tuples(st.integers(0, 2**32 - 1), st.sampled_from(["kda", "gdn"]))
weights_of_4_heads = st.lists(
    st.lists(st.integers(0, 8), min_size=4, max_size=4), min_size=1, max_size=3
)


@given(weights_of_4_heads, st.sampled_from([2, 4]))
def test_head_order_of_a_small_model_is_the_best_there_is(weights, tp):
    config = small_config("kda", len(weights), 4)
    order = head_order(plan_of(weights), config, tp)
    assert order.worst == smallest_worst(weights, tp)


def test_search_finds_what_swaps_miss():
    """Heaviest first gives payloads of 10 and 8, and no layer has heads that differ by one."""
    weights = [[5, 0, 0, 0], [4, 0, 0, 0], [3, 0, 0, 0], [3, 0, 0, 0], [3, 0, 0, 0]]
    order = head_order(plan_of(weights), small_config("kda", 5, 4), 2)
    assert sorted(order.payload) == [9, 9] and order.worst == order.lower_bound


@given(cases, st.sampled_from([1, 2, 4, 8]))
def test_head_order_is_a_permutation_of_whole_bundles_no_worse_than_none(case, tp):
    config, plan = random_case(*case)
    order = head_order(plan, config, tp)
    natural = head_order(plan, config, 1).weights.sum(axis=0).reshape(tp, -1).sum(axis=1)
    assert sum(order.payload) == plan.total
    assert order.lower_bound <= order.worst <= natural.max()
    for layer, bundles in enumerate(order.bundles):
        assert sorted(bundles) == list(range(8)) and not bundles.flags.writeable
        heads = order.value_heads(layer).reshape(8, -1)
        np.testing.assert_array_equal(
            heads // order.heads, np.repeat(bundles[:, None], heads.shape[1], 1)
        )
        assert np.all(np.diff(heads) == 1)
    assert order == head_order(plan, config, tp) and hash(order) == hash(
        head_order(plan, config, tp)
    )
    assert tp > 1 or order.identity


@given(st.integers(0, 2**32 - 1))
def test_no_swap_of_two_heads_of_a_layer_lowers_the_worst_rank(seed):
    config, plan = random_case(seed, "kda", layers=4, bundles=16)
    order = head_order(plan, config, 4)
    placed = np.stack([w[b] for w, b in zip(order.weights, order.bundles, strict=True)])
    loads = np.array(order.payload)
    for worst in np.flatnonzero(loads == order.worst):
        if np.count_nonzero(loads == order.worst) > 1:
            break
        for layer, (a, b) in itertools.product(range(4), itertools.product(range(16), range(16))):
            if a // 4 == worst != b // 4:
                lighter = placed[layer, a] - placed[layer, b]
                assert max(loads[worst] - lighter, loads[b // 4] + lighter) >= order.worst


@given(cases, st.sampled_from([2, 4, 8]))
def test_reordered_plan_has_the_payloads_of_the_order_and_goes_back_by_its_inverse(case, tp):
    config, plan = random_case(*case)
    order = head_order(plan, config, tp)
    moved = reorder(plan, order)
    assert storage_schedule(moved, tp, "off").units == order.payload
    assert (moved.total, moved.window, moved.fingerprint) == (
        plan.total, plan.window, plan.fingerprint,
    )  # fmt: skip
    back = order.inverse()
    assert reorder(moved, back) == plan and back.inverse() == order
    for layer in range(plan.layers):
        np.testing.assert_array_equal(
            order.value_heads(layer)[back.value_heads(layer)], np.arange(plan.unit_shape[0])
        )


def test_plan_that_is_even_already_keeps_its_heads():
    config, h = published_profile(QWEN)
    assert head_order(make_plan(h, 0), config, 8).identity
    assert head_order(make_plan(h, 10**9), config, 8).identity
    assert not head_order(make_plan(h, 512), config, 8).identity


@pytest.mark.parametrize("name", [KIMI, QWEN])
def test_released_models_are_ordered_as_evenly_as_can_be_in_a_moment(name):
    config, h = published_profile(name)
    start = time.perf_counter()
    for w_max in (16, 64, 128, 512):
        order = head_order(make_plan(h, w_max), config, 8)
        assert order.worst == order.lower_bound
    assert time.perf_counter() - start < 2


@given(cases, st.sampled_from([1, 2, 4, 8]), st.sampled_from(PLACEMENTS))
def test_every_retained_unit_is_stored_once_within_the_width(case, tp, placement):
    config, plan = random_case(*case)
    storage = place(plan, config, tp, placement)
    masks = np.stack((plan if storage.order is None else reorder(plan, storage.order)).retained)
    masks = masks.reshape(plan.layers, tp, -1)
    stored = [storage.rows_of(rank) for rank in range(tp)]
    assert storage.local_units == masks[:, 0].size
    assert sorted(map(tuple, np.concatenate(stored))) == [
        (rank, unit) for rank in range(tp) for unit in np.flatnonzero(masks[:, rank])
    ]
    owned = masks.sum(axis=(0, 2))
    share = math.ceil(plan.total / tp)
    assert storage.width == (owned.max() if placement == "off" else share)
    assert all(len(rows) <= units for rows, units in zip(stored, storage.units, strict=True))
    surplus = np.maximum(owned - storage.width, 0)
    assert storage.moved == surplus.sum() == sum(len(move.units) for move in storage.sends)
    for move in storage.sends:
        assert move.source != move.target and surplus[move.source] and len(move.units)
        assert owned[move.target] < storage.width and move.rows.max() < storage.width


@given(cases, st.sampled_from([1, 2, 4, 8]), st.sampled_from(PLACEMENTS))
def test_load_after_store_gives_back_retained_units_and_zeros(case, tp, placement):
    """Both directions as the collectives do them: an all_to_all, then one gather."""
    config, plan = random_case(*case)
    storage = place(plan, config, tp, placement)
    final = plan if storage.order is None else reorder(plan, storage.order)
    units = np.arange(1, plan.units + 1).reshape(plan.layers, tp, -1).transpose(1, 0, 2)
    units = units.reshape(tp, -1)
    kept = np.stack(final.retained).reshape(plan.layers, tp, -1).transpose(1, 0, 2).reshape(tp, -1)

    def exchange(values, table):
        """What every rank receives when rank r sends `values[r][table[r, s]]` to every s."""
        sent = np.stack([values[r][table[r]] for r in range(tp)])
        return sent.transpose(1, 0, 2).reshape(tp, -1)

    def gathered(parts, index):
        taken = np.take_along_axis(np.concatenate(parts, axis=1), np.maximum(index, 0), axis=1)
        return np.where(index < 0, 0, taken)

    rows = gathered([units, exchange(units, storage.send_units)], storage.store_index)
    assert rows.shape == (tp, storage.width) and np.count_nonzero(rows) == plan.total
    back = gathered([rows, exchange(rows, storage.recv_rows)], storage.load_index)
    np.testing.assert_array_equal(back, np.where(kept, units, 0))


def test_transfers_are_the_tables_pair_by_pair():
    config, h = published_profile(KIMI)
    storage = place(make_plan(h, 512), config, 8, "hybrid")
    tables = (storage.own, storage.send_units, storage.recv_rows)
    assert not any(table.flags.writeable for table in tables)
    for move in storage.sends:
        units = storage.send_units[move.source, move.target]
        rows = storage.recv_rows[move.target, move.source]
        np.testing.assert_array_equal(units[: len(move.units)], move.units)
        np.testing.assert_array_equal(rows[: len(move.rows)], move.rows)
        assert np.all(units[len(move.units) :] == -1) and np.all(rows[len(move.rows) :] == -1)


def test_surplus_of_one_rank_is_dealt_evenly_to_the_others():
    config = small_config("kda", 2, 8)
    plan = plan_of([[8, 0, 0, 0, 0, 0, 0, 0]] * 2)
    storage = place(plan, config, 8, "storage")
    assert (storage.width, storage.moved) == (2, 14)
    assert [len(move.units) for move in storage.sends] == [2] * 7


def test_id_tells_schedules_apart_and_equal_ones_are_equal():
    config, h = published_profile(QWEN)
    plans = [make_plan(h, w) for w in (0, 512)]
    schedules = [place(p, config, tp, x) for p in plans for tp in (2, 8) for x in PLACEMENTS]
    assert len({s.id for s in schedules}) == len(set(schedules)) == len(schedules)
    assert place(plans[1], config, 8, "hybrid") == schedules[-1]


def test_plan_that_retains_nothing_has_slots_of_no_rows():
    config, h = published_profile(KIMI)
    storage = place(make_plan(h, 10**9), config, 8, "hybrid")
    assert (storage.width, storage.moved, storage.sends) == (0, 0, ())
    assert storage.store_index.shape == (8, 0) and np.all(storage.load_index == -1)


def test_what_does_not_fit_is_refused_with_the_numbers():
    config, h = published_profile(QWEN)
    plan = make_plan(h, 512)
    order = head_order(plan, config, 8)
    with pytest.raises(ValueError, match="tp=32 does not divide 16 head bundles"):
        head_order(plan, config, 32)
    with pytest.raises(ValueError, match="36 layers of 32 heads, the model has 20 of 32"):
        head_order(plan, published_config(KIMI), 8)
    with pytest.raises(ValueError, match="'hybrid' needs an order"):
        storage_schedule(plan, 8, "hybrid")
    with pytest.raises(ValueError, match="'off' has no order"):
        storage_schedule(plan, 8, "off", order)
    with pytest.raises(ValueError, match="for tp=8, not tp=4"):
        storage_schedule(plan, 4, "hybrid", order)
    with pytest.raises(ValueError, match="tp=3 does not divide 32 heads"):
        storage_schedule(plan, 3, "storage")
