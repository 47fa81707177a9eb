"""Bytes, ratios, capacities: the exact numbers of the DASC paper, and what holds for any plan."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dasc_jax.balance import storage_schedule
from dasc_jax.head_order import head_order
from dasc_jax.layout import (
    account,
    account_units,
    conv_bytes,
    padded_shape,
    ragged_shape,
    unit_bytes,
)
from dasc_jax.plan import make_plan
from dasc_jax.published import published_config, published_profile

KIMI, QWEN = "kimi-linear-48b", "qwen3-next-80b"
BUDGET = {KIMI: 694_681_600, QWEN: 1_236_271_104}


def plan_with(name, units, head=0):
    """A plan that retains `units` units: those of `head` in every layer, then the next head."""
    config = published_config(name)
    layers, heads = len(config.recurrent_layers), config.delta.num_value_heads
    width = config.delta.key_dim if config.delta.kind == "kda" else 1
    order = np.roll(np.arange(heads), -head)
    h = np.ones((heads, layers, width))
    h.reshape(-1)[:units] = 100.0
    h = h[np.argsort(order)].transpose(1, 0, 2)
    return config, make_plan(list(h if width > 1 else h[..., 0]), 16)


@pytest.mark.parametrize(
    ("name", "temporal", "conv", "slot"),
    [(KIMI, 5_242_880, 184_320, 5_427_200), (QWEN, 9_437_184, 221_184, 9_658_368)],
)
@pytest.mark.parametrize("placement", ["off", "storage", "hybrid"])
def test_dense_slots_of_both_models_on_8_ranks(name, temporal, conv, slot, placement):
    config, h = published_profile(name)
    acc = account(config, make_plan(h, 0), 8, placement)
    assert (acc.temporal_bytes, acc.conv_bytes, acc.bytes_per_slot) == (temporal, conv, slot)
    assert acc.bytes_per_rank == (slot,) * 8
    assert 128 * slot == BUDGET[name] and acc.slots(BUDGET[name]) == 127
    assert acc.c_temp == acc.c_temp_padded == acc.c_ckpt == acc.layout_gain == 1.0


@pytest.mark.parametrize(
    ("name", "units", "slot", "ratio", "slots"),
    [(KIMI, 144, 193_536, 28.04, 3588), (KIMI, 29_360, 2_063_360, 2.63, 335),
     (QWEN, 1_045, 8_806_400, 1.10, 139), (QWEN, 448, 3_891_200, 2.48, 316)],
)  # fmt: skip
def test_balanced_slots_of_the_paper(name, units, slot, ratio, slots):
    config, plan = plan_with(name, units)
    for placement in ("hybrid", "storage"):
        acc = account(config, plan, 8, placement)
        assert acc.bytes_per_slot == slot and set(acc.bytes_per_rank) == {slot}
        assert acc.c_ckpt == pytest.approx(ratio, abs=0.005)
        assert acc.slots(BUDGET[name]) == slots
        assert acc.c_temp == plan.units / units


def test_kimi_at_512_stores_18_units_on_every_rank():
    config, plan = plan_with(KIMI, 144)
    assert storage_schedule(plan, 8, "storage").units == (18,) * 8
    assert account(config, plan).temporal_bytes == 18 * 512


def test_int8_composition_of_the_paper():
    """29,364 units also give 2.63x without int8; 29,360 would round to 8.12x."""
    config, plan = plan_with(KIMI, 29_364)
    acc = account(config, plan, quantization="int8")
    assert acc.bytes_per_slot == 3_671 * 132 + 184_320 == 668_892
    assert round(acc.c_ckpt, 2) == 8.11 and round(account(config, plan).c_ckpt, 2) == 2.63


@pytest.mark.parametrize("name", [KIMI, QWEN])
def test_int8_alone_is_3_88_of_the_temporal_part_with_scales(name):
    config, h = published_profile(name)
    acc = account(config, make_plan(h, 0), quantization="int8")
    assert acc.c_temp == pytest.approx(3.88, abs=0.005)
    assert acc.c_temp == pytest.approx(512 / 132)
    if name == KIMI:
        assert acc.bytes_per_slot == 1_536_000 and acc.c_ckpt == pytest.approx(3.53, abs=0.005)


def test_unit_bytes_of_both_kinds():
    kimi, qwen = published_config(KIMI), published_config(QWEN)
    assert (unit_bytes(kimi), unit_bytes(kimi, "int8")) == (512, 132)
    assert (unit_bytes(qwen), unit_bytes(qwen, "int8")) == (65_536, 128 * 132)
    assert conv_bytes(kimi) == 20 * 12_288 * 3 * 2 and conv_bytes(qwen) == 36 * 8_192 * 3 * 2


def test_unbalanced_rank_owns_the_units_of_its_own_heads():
    config, plan = plan_with(KIMI, 144, head=9)
    assert storage_schedule(plan, 8, "off").units == (0, 0, 144, 0, 0, 0, 0, 0)
    acc = account(config, plan, placement="off")
    assert acc.bytes_per_slot == 144 * 512 + 184_320 == max(acc.bytes_per_rank)
    assert acc.slots(BUDGET[KIMI]) == 2691


@pytest.mark.parametrize(
    ("name", "w_max", "ratio"),
    [(KIMI, 16, 2.63), (KIMI, 512, 28.04), (QWEN, 16, 1.10), (QWEN, 512, 2.48)],
)
def test_published_profiles_balanced_reach_the_ratios_of_the_paper(name, w_max, ratio):
    config, h = published_profile(name)
    acc = account(config, make_plan(h, w_max), 8, "hybrid")
    assert acc.c_ckpt == pytest.approx(ratio, rel=0.005)


@pytest.mark.parametrize("name", [KIMI, QWEN])
@pytest.mark.parametrize("w_max", [16, 64, 128, 512])
def test_both_balanced_placements_hold_as_many_slots_and_hybrid_moves_less(name, w_max):
    config, h = published_profile(name)
    plan = make_plan(h, w_max)
    off, storage, hybrid = (account(config, plan, 8, p) for p in ("off", "storage", "hybrid"))
    assert off.slots(BUDGET[name]) < storage.slots(BUDGET[name]) == hybrid.slots(BUDGET[name])
    assert storage.bytes_per_rank == hybrid.bytes_per_rank
    assert off.moved == 0 <= hybrid.moved < storage.moved


def test_a_head_of_113_columns_is_balanced_by_the_second_stage_alone():
    """Heads are indivisible, so stage 1 leaves it whole; stage 2 sends 95 of its columns."""
    config, h = published_profile(KIMI)
    plan = make_plan(h, 512)
    order = head_order(plan, config, 8)
    first = account_units(config, plan, order.payload)
    assert order.worst == order.lower_bound == order.weights.max() == 113
    assert first.c_ckpt == pytest.approx(5_427_200 / (113 * 512 + 184_320))
    both = account(config, plan, 8, "hybrid")
    assert both.temporal_bytes == 18 * 512 and both.moved == 113 - 18
    assert account(config, plan, 8, "storage").moved == 144 - 18


def test_what_stage_1_can_balance_moves_nothing():
    """Kimi's ranks at 16 differ by one unit then, against 1,960 units without stage 1."""
    config, h = published_profile(KIMI)
    plan = make_plan(h, 16)
    assert account(config, plan, 8, "storage").moved == 1_960
    assert account(config, plan, 8, "hybrid").moved == 0


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 4, 8]), st.sampled_from([None, "int8"]))
def test_for_any_plan_balancing_never_costs_and_bytes_add_up(seed, tp, quantization):
    config = published_config(QWEN)
    rng = np.random.default_rng(seed)
    h = [np.exp(rng.uniform(0, 6, 32) * rng.uniform()) for _ in config.recurrent_layers]
    plan = make_plan(h, 16)
    off = account(config, plan, tp, "off", quantization)
    even = account(config, plan, tp, "hybrid", quantization)
    unit = unit_bytes(config, quantization)
    assert even.bytes_per_slot <= off.bytes_per_slot == max(off.bytes_per_rank)
    stored = sum(off.bytes_per_rank) - tp * off.conv_bytes
    assert stored == plan.total * unit
    assert 0 <= tp * even.temporal_bytes - stored < tp * unit
    assert even.slots(10**10) >= off.slots(10**10)
    assert off.c_temp == even.c_temp
    assert off.c_temp >= off.c_temp_padded * (1 - 1e-12)
    if plan.total:
        assert off.c_temp / off.c_temp_padded == pytest.approx(off.layout_gain)


def test_equations_6_and_7_on_one_rank():
    config, h = published_profile(KIMI)
    plan = make_plan(h, 64)
    acc = account(config, plan, tp=1)
    temporal, conv = plan.units * 512, conv_bytes(config)
    assert acc.c_temp == pytest.approx(plan.units / plan.total)
    assert acc.c_ckpt == pytest.approx((temporal + conv) / (temporal / acc.c_temp + conv))


def test_padded_layout_pays_for_its_widest_layer():
    config, h = published_profile(KIMI)
    plan = make_plan(h, 128)
    acc = account(config, plan)
    assert acc.c_temp_padded == pytest.approx(plan.units / (20 * max(plan.counts)))
    assert padded_shape(config, plan, 7) == (20, 7, max(plan.counts), 128)
    assert ragged_shape(config, plan, 7) == (7, plan.total, 128)
    assert math.prod(padded_shape(config, plan, 7)) > math.prod(ragged_shape(config, plan, 7))


def test_a_plan_that_retains_nothing_still_stores_the_convolution():
    config, h = published_profile(QWEN)
    acc = account(config, make_plan(h, 10**9))
    assert acc.temporal_bytes == 0 and acc.bytes_per_slot == 221_184
    assert acc.c_temp == acc.c_temp_padded == math.inf and acc.layout_gain == 1.0
    assert acc.c_ckpt == pytest.approx(9_658_368 / 221_184)


def test_a_budget_below_two_slots_holds_no_checkpoint():
    config, h = published_profile(QWEN)
    acc = account(config, make_plan(h, 0))
    assert acc.slots(0) == acc.slots(2 * acc.bytes_per_slot - 1) == 0
    assert acc.slots(2 * acc.bytes_per_slot) == 1


def test_tp_that_does_not_divide_and_plans_of_another_model_are_refused_with_the_numbers():
    config, h = published_profile(QWEN)
    plan = make_plan(h, 16)
    with pytest.raises(ValueError, match="tp=3 does not divide 32 value heads and 16 key heads"):
        account(config, plan, tp=3)
    with pytest.raises(ValueError, match="tp=32 does not divide"):
        account(config, plan, tp=32)
    with pytest.raises(ValueError, match=r"36 layers of units \(32,\).*20 of \(32, 128\)"):
        account(published_config(KIMI), plan)
