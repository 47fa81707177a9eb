"""Checkpoints over ranks: what a store packs and moves, a load gives back, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dasc_jax import checkpoint_shards, checkpoint_state
from dasc_jax.balance import place
from dasc_jax.checkpoint_shards import Shards
from dasc_jax.layout import account
from dasc_jax.parallel import make_mesh
from dasc_jax.plan import make_plan
from dasc_jax.published import published_profile
from tests.many_devices import needs_devices
from tests.sharded_checkpoints import (
    HEADS,
    KEY,
    LAYERS,
    PLACEMENTS,
    SLOTS,
    STORED,
    VALUE,
    both,
    config_of,
    permuted,
    plan_of,
    same,
    shards_of,
    state_of,
)

pytestmark = needs_devices

EVERY = [(k, tp, p) for k in HEADS for tp in (1, 2, 4, 8) for p in PLACEMENTS]
SLOW_IN_INT8 = {(k, tp, p) for k, tp, p in EVERY if tp in (1, 4) or p == "hybrid"}


@pytest.mark.parametrize(
    ("kind", "tp", "placement", "quantization"),
    [(*case, None) for case in EVERY]
    + [
        pytest.param(*case, "int8", marks=[pytest.mark.slow] if case in SLOW_IN_INT8 else [])
        for case in EVERY
    ],
)
def test_load_and_restore_are_those_of_one_device_bit_for_bit(kind, tp, placement, quantization):
    _, _, (_, loaded, restored), expected = both(kind, tp, placement, quantization)
    assert np.isfinite(loaded.temporal).all()
    same((loaded, restored), expected[1:])


@pytest.mark.parametrize(
    ("kind", "tp", "seed", "w_max", "quantization"),
    [("kda", 4, 1, 80, None), ("kda", 8, 1, 80, "int8"), ("gdn", 8, 0, 50, None)],
)
def test_what_no_order_of_heads_balances_still_travels(kind, tp, seed, w_max, quantization):
    plan = plan_of(kind, seed, w_max)
    shards, _, got, expected = both(kind, tp, "hybrid", quantization, plan=plan)
    assert shards.storage.moved and not shards.storage.order.identity
    same(got[1:], expected[1:])


@pytest.mark.parametrize(("kind", "tp", "placement"), EVERY)
def test_every_rank_holds_the_rows_that_the_schedule_gives_it(kind, tp, placement):
    shards, state, (pool, *_), _ = both(kind, tp, placement, None)
    storage = shards.storage
    assert storage.moved or placement != "storage" or tp == 1
    unit = (VALUE,) if kind == "kda" else (KEY, VALUE)
    temporal = np.asarray(permuted(storage, state.temporal))
    by_rank = np.moveaxis(temporal.reshape(LAYERS, len(STORED), tp, -1, *unit), 0, 2)
    by_rank = by_rank.reshape(len(STORED), tp, storage.local_units, *unit)
    rows = np.asarray(pool.rows).reshape(SLOTS, tp, storage.width, *unit)
    for rank in range(tp):
        source, local = storage.rows_of(rank).T
        for at in (0, 2):
            same(rows[STORED[at], rank, : len(source)], by_rank[at, source, local])
    for slot in set(range(SLOTS)) - set(STORED) | {0}:
        assert not rows[slot].any() and not np.asarray(pool.conv[slot], np.float32).any()


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("kind", HEADS)
def test_one_rank_has_the_pool_of_one_device(kind, quantization, placement):
    _, _, got, expected = both(kind, 1, placement, quantization)
    same(got, expected)


@pytest.mark.parametrize("tp", [2, 8])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("kind", HEADS)
def test_a_rank_allocates_the_bytes_of_the_account(kind, quantization, placement, tp):
    plan, config = plan_of(kind), config_of(kind)
    shards = shards_of(plan, kind, tp, placement)
    pool = checkpoint_shards.init_pool(shards, config, SLOTS, quantization=quantization)
    slot = account(config, plan, tp, placement, quantization).bytes_per_slot
    for device in shards.mesh.devices:
        parts = [s for x in jax.tree.leaves(pool) for s in x.addressable_shards]
        assert sum(s.data.nbytes for s in parts if s.device == device) == SLOTS * slot


def test_a_rank_of_kimi_past_512_tokens_allocates_the_papers_bytes():
    config, h = published_profile("kimi-linear-48b")
    plan = make_plan(h, 512)
    shards = Shards(plan, place(plan, config, 8, "hybrid"), make_mesh(8))
    pool = checkpoint_shards.init_pool(shards, config, 3)
    assert sum(x.addressable_shards[0].data.nbytes for x in pool if x is not None) == 3 * 193_536


def returned(seed, kind, tp, placement, w_max, form, quantization):
    plan = plan_of(kind, seed, w_max)
    _, _, got, expected = both(kind, tp, placement, quantization, form, plan)
    same(got[1:], expected[1:])


PLANS = {
    "seed": st.integers(0, 2**31 - 1), "kind": st.sampled_from(["kda", "gdn"]),
    "tp": st.sampled_from([2, 4, 8]), "placement": st.sampled_from(PLACEMENTS),
    "w_max": st.integers(0, 130), "form": st.sampled_from([None, "all_to_all", "permute"]),
    "quantization": st.sampled_from([None, "int8"]),
}  # fmt: skip


@settings(max_examples=4)
@given(**PLANS)
def test_a_few_plans_come_back(**case):
    returned(**case)


@pytest.mark.slow
@settings(max_examples=100)
@given(**PLANS)
def test_any_plan_comes_back(**case):
    returned(**case)


slot_numbers = st.lists(st.integers(0, SLOTS + 1), min_size=3, max_size=3)


@given(stored=slot_numbers, read=slot_numbers, targets=slot_numbers)
def test_any_slots_are_stored_and_restored_as_on_one_device(stored, read, targets):
    """Slot 0 is the sink, slots past the pool take and give nothing, as `ragged_pack` has it."""
    stored, targets = (
        [n if at == numbers.index(n) else 0 for at, n in enumerate(numbers)]
        for numbers in (stored, targets)
    )
    # A windows' target past the states would be no slot of an engine.
    targets = [n if n < SLOTS else 0 for n in targets]
    read = [n if t and n < SLOTS else 0 for n, t in zip(read, targets, strict=True)]
    plan = plan_of("kda")
    shards, config = shards_of(plan, "kda", 4, "storage"), config_of("kda")
    state, active = state_of("kda", 3), state_of("kda", SLOTS, seed=1)
    results = []
    for module, first in ((checkpoint_shards, shards), (checkpoint_state, plan)):
        pool = module.init_pool(first, config, SLOTS)
        results.append(cycle(module, first, pool, state, active, stored, read, targets))
    same(*results)


@functools.partial(jax.jit, static_argnums=(0, 1))
def cycle(module, first, pool, state, active, stored, read, targets):
    pool = module.store(first, pool, jnp.array(stored), *state)
    return module.restore(first, active, pool, jnp.array(read), jnp.array(targets))


@pytest.mark.parametrize("placement", ["off", "storage"])
def test_a_plan_without_units_makes_pools_of_windows_only(placement):
    plan = plan_of("kda", w_max=1000)
    assert plan.total == 0
    *_, got, expected = both("kda", 4, placement, None, plan=plan)
    same(got[1:], expected[1:])


@pytest.mark.parametrize("kind", HEADS)
def test_kept_units_are_those_that_a_load_brings_back(kind):
    shards, _, (_, loaded, _), _ = both(kind, 4, "hybrid", None)
    keep = checkpoint_shards.keep_masks(shards, KEY)
    assert keep.shape == (LAYERS, HEADS[kind], KEY)
    np.testing.assert_array_equal(np.asarray(loaded.temporal[:, 0]).any(-1), keep)


def test_a_schedule_of_another_plan_or_mesh_is_refused():
    plan, config = plan_of("kda"), config_of("kda")
    storage = place(plan, config, 1, "off")
    with pytest.raises(ValueError, match=f"{plan.id}, not"):
        Shards(plan_of("kda", w_max=3), storage, make_mesh(1))
    with pytest.raises(ValueError, match="tp=2, a mesh of 1 ranks"):
        Shards(plan, place(plan, config, 2, "off"), make_mesh(1))
