"""Properties of packed checkpoints: exactness, zeros, int8 against numpy, slots, memory, replay."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dasc_jax.checkpoint_state import (
    CheckpointMeta,
    Packed,
    init_pool,
    load,
    pack,
    replay_span,
    restore,
    store,
    units,
    unpack,
    verify,
)
from dasc_jax.config import DeltaConfig, MLAConfig, ModelConfig
from dasc_jax.plan import make_plan
from dasc_jax.types import RecurrentState

LAYERS, HEADS, KEY, VALUE = 3, 2, 4, 8


def config_of(kind, layers=LAYERS):
    delta = DeltaConfig(kind, HEADS, HEADS, KEY, VALUE, gate_rank=4 if kind == "kda" else None)
    return ModelConfig(
        family="kimi_linear", vocab_size=16, hidden_size=8, num_layers=layers + 1,
        layer_kinds=("delta",) * layers + ("attention",), ffn_kinds=("dense",) * (layers + 1),
        norm_eps=1e-5, zero_centred_norm=False, dense_intermediate=8, delta=delta,
        attention=MLAConfig(2, 4, 4, 4, 8), moe=None, dtype="bfloat16", max_context=64,
        bos_token_id=None, eos_token_ids=(), pad_token_id=None,
    )  # fmt: skip


def plan_of(kind, pattern, layers=LAYERS):
    """A plan whose retained units are drawn (`mixed`), or of one layer, none, or all."""
    shape = (HEADS, KEY) if kind == "kda" else (HEADS,)
    h = [np.random.default_rng(layer).uniform(1, 40, shape) for layer in range(layers)]
    if pattern == "one_layer":
        h = [np.full(shape, 100.0 if layer == 1 else 2.0) for layer in range(layers)]
    return make_plan(h, {"none": 1000, "all": 0}.get(pattern, 16))


def state_of(batch, layers=LAYERS, seed=0):
    rng = np.random.default_rng(seed)
    temporal = rng.normal(size=(layers, batch, HEADS, KEY, VALUE)).astype(np.float32)
    conv = rng.normal(size=(layers, batch, 2 * HEADS * KEY + HEADS * VALUE, 3))
    return RecurrentState(jnp.asarray(temporal), jnp.asarray(conv, jnp.bfloat16))


def masked(plan, temporal):
    masks = np.stack([plan.mask(layer, KEY) for layer in range(plan.layers)])
    return np.where(masks[:, None, :, :, None], np.asarray(temporal), np.float32(0))


def bits(array):
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}")


ALL_PLANS = pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        (kind, pattern)
        for kind in ("kda", "gdn")
        for pattern in ("mixed", "one_layer", "none", "all")
    ],
)


@ALL_PLANS
def test_round_trip_keeps_retained_units_bit_for_bit_and_zeroes_the_rest(kind, pattern):
    plan, state = plan_of(kind, pattern), state_of(3)
    packed = jax.jit(pack, static_argnums=0)(plan, state)
    back = jax.jit(unpack, static_argnums=0)(plan, packed)
    assert packed.rows.shape == (3, plan.total) + ((VALUE,) if kind == "kda" else (KEY, VALUE))
    np.testing.assert_array_equal(bits(back.temporal), bits(masked(plan, state.temporal)))
    np.testing.assert_array_equal(bits(back.conv), bits(state.conv))


@pytest.mark.parametrize("kind", ["kda", "gdn"])
def test_retained_nan_infinity_and_negative_zero_survive_and_dropped_ones_vanish(kind):
    plan, state = plan_of(kind, "mixed"), state_of(1)
    special = np.array([np.nan, np.inf, -np.inf, -0.0], np.float32)
    temporal = jnp.asarray(np.resize(special, state.temporal.shape))
    back = unpack(plan, pack(plan, RecurrentState(temporal, state.conv)))
    np.testing.assert_array_equal(bits(back.temporal), bits(masked(plan, temporal)))


@pytest.mark.parametrize("kind", ["kda", "gdn"])
def test_rows_are_layer_major_and_offsets_delimit_the_layers(kind):
    plan, state = plan_of(kind, "mixed"), state_of(2)
    rows = np.asarray(pack(plan, state).rows)
    for layer in range(LAYERS):
        own = rows[:, plan.offsets[layer] : plan.offsets[layer + 1]]
        dense = np.asarray(state.temporal[layer])
        mask = plan.retained[layer]
        np.testing.assert_array_equal(own, dense[:, mask])


@given(st.integers(0, 2**31 - 1), st.sampled_from(["kda", "gdn"]))
def test_any_plan_round_trips(seed, kind):
    rng = np.random.default_rng(seed)
    shape = (HEADS, KEY) if kind == "kda" else (HEADS,)
    plan = make_plan([rng.uniform(1, 64, shape) for _ in range(LAYERS)], int(rng.integers(0, 70)))
    state = state_of(2, seed=seed)
    back = unpack(plan, pack(plan, state))
    np.testing.assert_array_equal(bits(back.temporal), bits(masked(plan, state.temporal)))


def quantized(rows):
    """Eq. 10 in numpy float32."""
    scale = np.maximum(np.abs(rows).max(-1), np.float32(1e-8)) / np.float32(127)
    return np.clip(np.round(rows / scale[..., None]), -127, 127).astype(np.int8), scale


@ALL_PLANS
def test_int8_is_equation_10_with_one_scale_per_layer_head_and_key_channel(kind, pattern):
    plan, state = plan_of(kind, pattern), state_of(2)
    packed = jax.jit(functools.partial(pack, quantization="int8"), static_argnums=0)(plan, state)
    q, scale = quantized(np.asarray(pack(plan, state).rows)) if plan.total else (None, None)
    assert packed.rows.dtype == jnp.int8 and packed.scales.dtype == jnp.float32
    assert packed.scales.shape == packed.rows.shape[:-1]
    if plan.total:
        np.testing.assert_array_equal(np.asarray(packed.scales), scale)
        np.testing.assert_array_equal(np.asarray(packed.rows), q)
    back = np.asarray(unpack(plan, packed).temporal)
    error = np.abs(back - masked(plan, state.temporal))
    bound = np.abs(masked(plan, state.temporal)).max(-1, keepdims=True) / 127 / 2
    assert (error <= bound * (1 + 1e-6)).all()


def test_int8_rounds_halves_to_even_and_zero_rows_stay_zero():
    plan = plan_of("kda", "all", layers=1)
    temporal = np.zeros((1, 1, HEADS, KEY, VALUE), np.float32)
    temporal[0, 0, 0, 0] = [127, 0.5, 1.5, 2.5, -0.5, -1.5, -127, 126.5]
    conv = jnp.zeros((1, 1, 4, 3), jnp.bfloat16)
    packed = pack(plan, RecurrentState(jnp.asarray(temporal), conv), quantization="int8")
    np.testing.assert_array_equal(packed.rows[0, 0], [127, 0, 2, 2, 0, -2, -127, 126])
    assert not np.asarray(packed.rows[0, 1:]).any()
    np.testing.assert_array_equal(packed.scales[0, 1:], np.float32(1e-8) / np.float32(127))


@ALL_PLANS
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_store_then_load_equals_unpack_of_pack_at_every_slot(kind, pattern, quantization):
    plan, config, state = plan_of(kind, pattern), config_of(kind), state_of(3)
    pool = init_pool(plan, config, 6, quantization=quantization)
    pool = store(plan, pool, jnp.array([4, 1, 5]), *state)
    temporal, conv = load(plan, pool, jnp.array([1, 5, 2, 4]))
    want = unpack(plan, pack(plan, state, quantization=quantization))
    order = np.array([1, 2, 0])
    found = np.array([0, 1, 3])
    np.testing.assert_array_equal(bits(temporal[:, found]), bits(want.temporal[:, order]))
    np.testing.assert_array_equal(bits(conv[:, found]), bits(state.conv[:, order]))
    assert not np.asarray(temporal[:, 2]).any() and not np.asarray(conv[:, 2], np.float32).any()


@ALL_PLANS
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_restore_writes_what_load_gives_to_active_slots_and_to_no_other(
    kind, pattern, quantization
):
    plan, config = plan_of(kind, pattern), config_of(kind)
    pool = init_pool(plan, config, 6, quantization=quantization)
    pool = store(plan, pool, jnp.array([4, 1]), *state_of(2))
    checkpoints, slots = jnp.array([1, 0, 4, 0]), jnp.array([3, 0, 2, 0])
    active = state_of(5, seed=1)
    after = restore(plan, active, pool, checkpoints, slots)
    temporal, conv = load(plan, pool, checkpoints)
    written, kept = np.array([3, 2]), np.array([1, 4])
    np.testing.assert_array_equal(bits(after.temporal[:, written]), bits(temporal[:, [0, 2]]))
    np.testing.assert_array_equal(bits(after.conv[:, written]), bits(conv[:, [0, 2]]))
    for new, old in zip(after, active, strict=True):
        np.testing.assert_array_equal(bits(new[:, kept]), bits(old[:, kept]))


@ALL_PLANS
def test_slot_0_swallows_padding_and_loads_as_zeros(kind, pattern):
    plan, config, state = plan_of(kind, pattern), config_of(kind), state_of(4)
    garbage = RecurrentState(
        state.temporal.at[:, 1:3].set(jnp.nan), state.conv.at[:, 1:3].set(jnp.nan)
    )
    pool = store(plan, init_pool(plan, config, 4), jnp.array([2, 0, 0, 3]), *garbage)
    temporal, conv = load(plan, pool, jnp.array([0, 2, 3, 0]))
    assert not bits(temporal[:, 0]).any() and not bits(conv[:, 0]).any()
    assert not bits(temporal[:, 3]).any() and not bits(conv[:, 3]).any()
    kept = masked(plan, state.temporal)
    np.testing.assert_array_equal(bits(temporal[:, 1:3]), bits(kept[:, [0, 3]]))


def test_store_leaves_other_slots_untouched():
    plan, config = plan_of("kda", "mixed"), config_of("kda")
    pool = store(plan, init_pool(plan, config, 5), jnp.array([1, 2]), *state_of(2, seed=1))
    after = store(plan, pool, jnp.array([2]), *state_of(1, seed=2))
    others = jnp.array([0, 1, 3, 4])
    for old, new in zip(jax.tree.leaves(pool), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(bits(old[others]), bits(new[others]))
        assert (bits(old[2]) != bits(new[2])).any()


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("kind", ["kda", "gdn"])
def test_store_works_in_place_with_temporaries_of_the_size_of_what_is_stored(kind, quantization):
    plan, config, slots = plan_of(kind, "mixed"), config_of(kind), 4096
    pool = init_pool(plan, config, slots, quantization=quantization)
    state = state_of(2)
    step = jax.jit(store, static_argnums=0, donate_argnums=1)
    memory = step.lower(plan, pool, jnp.array([1, 2]), *state).compile().memory_analysis()
    pool_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(pool))
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < 16 * (state.temporal.nbytes + state.conv.nbytes)
    assert memory.temp_size_in_bytes < pool_bytes / 16


def test_pool_of_another_model_or_without_a_real_slot_is_refused():
    plan = plan_of("kda", "mixed")
    with pytest.raises(ValueError, match=r"3 layers of units \(2, 4\).*4 layers"):
        init_pool(plan, config_of("kda", layers=4), 8)
    with pytest.raises(ValueError, match="selects gdn units, the model has kda"):
        init_pool(plan_of("gdn", "mixed"), config_of("kda"), 8)
    with pytest.raises(ValueError, match="pool of 1 slots"):
        init_pool(plan, config_of("kda"), 1)


@pytest.mark.parametrize("kind", ["kda", "gdn"])
def test_pool_bytes_are_what_the_layout_says(kind):
    plan = plan_of(kind, "mixed")
    unit = VALUE if kind == "kda" else KEY * VALUE
    pool = init_pool(plan, config_of(kind), 3, quantization="int8")
    assert pool.rows.nbytes == 3 * plan.total * unit
    assert pool.scales.nbytes == 3 * plan.total * unit // VALUE * 4
    assert pool.conv.nbytes == 3 * LAYERS * (2 * HEADS * KEY + HEADS * VALUE) * 3 * 2


def test_verify_names_the_first_thing_that_differs():
    meta = CheckpointMeta(64, b"t", "plan", 0)
    expected = {"depth": 64, "token_hash": b"t", "plan_id": "plan"}
    assert verify(meta, **expected) is None
    assert verify(meta, **{**expected, "depth": 128}) == "depth_mismatch"
    assert verify(meta, **{**expected, "token_hash": b"u"}) == "token_mismatch"
    assert verify(meta, **{**expected, "plan_id": "other"}) == "plan_mismatch"


@pytest.mark.parametrize(
    ("depth", "span"),
    [(0, (0, 0, 0)), (1, (0, 1, 0)), (16, (0, 16, 0)), (17, (0, 16, 1)), (19, (0, 16, 3)),
     (64, (45, 16, 3)), (640, (621, 16, 3))],
)  # fmt: skip
def test_replay_covers_the_window_and_three_more_tokens_where_there_are_any(depth, span):
    plan = make_plan([np.full((HEADS, KEY), h) for h in (12.0, 100.0)], 16)
    assert plan.window == 16
    assert replay_span(plan, depth, "wr") == span
    assert replay_span(plan, depth, "nr") == (depth, 0, 0)


def test_nothing_is_replayed_when_nothing_is_local():
    plan = plan_of("kda", "all")
    assert replay_span(plan, 64, "wr") == replay_span(plan, 64, "dense") == (64, 0, 0)


def test_units_are_loaded_zeroed_or_refreshed_and_always_sum_to_all():
    plan = plan_of("kda", "mixed")
    kept, local = plan.total, plan.units - plan.total
    assert units(plan, "nr") == (kept, local, 0)
    assert units(plan, "wr") == (kept, 0, local)
    assert units(plan_of("kda", "all"), "dense") == (plan.units, 0, 0)
    with pytest.raises(ValueError, match=f"drops {local} of {plan.units}"):
        units(plan, "dense")


def test_packed_is_a_pytree_with_and_without_scales():
    plan, state = plan_of("kda", "mixed"), state_of(1)
    assert len(jax.tree.leaves(pack(plan, state))) == 2
    assert isinstance(jax.tree.map(lambda x: x, pack(plan, state, quantization="int8")), Packed)
