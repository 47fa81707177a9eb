"""A model over the ranks of a mesh is the model on one device; runs where there are eight devices
(`tests/test_many_devices.py` makes them)."""

import dataclasses
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from dasc_jax.config import ConfigError
from dasc_jax.head_order import HeadOrder
from dasc_jax.model import (
    Cache,
    Model,
    forward,
    generate,
    init_recurrent,
    init_state,
    load_model,
    shard_model,
)
from dasc_jax.models import (
    State,
    abstract_params,
    init_pages,
    serving_functions,
    state_shardings,
)
from dasc_jax.models.packing import MERGE, ZERO, PrefillBucket, Segment, pack_segments
from dasc_jax.parallel import AXIS, local_config, make_mesh, param_spec, tensor_mesh
from dasc_jax.weights import save_native
from dasc_jax.weights.permute import channel_order, permute, sharded_specs
from tests.engines import GOLDEN
from tests.many_devices import WIDE, model_on, needs_devices, whole_model, wide_config

pytestmark = [needs_devices, pytest.mark.parametrize("family", WIDE)]

NEAR = 1e-4
LENGTHS = np.array([20, 9])
TOKENS = np.random.default_rng(0).integers(3, 120, (2, 20)).astype(np.int32)


def slow(*values: int) -> list:
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def near(a, b) -> None:
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=NEAR)


def run(model: Model) -> tuple[list[np.ndarray], Cache]:
    """Logits of a ragged prompt and of two tokens behind it, and what the model then remembers."""
    logits, cache = forward(model, TOKENS, lengths=LENGTHS)
    seen = [np.asarray(logits)[row, :length] for row, length in enumerate(LENGTHS)]
    for at in range(2):
        logits, cache = forward(model, TOKENS[:, at : at + 1], cache)
        seen.append(np.asarray(logits))
    return seen, cache


@lru_cache
def expected(family: str, kind: str) -> tuple[list[np.ndarray], Cache]:
    return run(whole_model(family, kind))


def same_memory(whole: Cache, parts: Cache, model: Model, tp: int, bundles=None) -> None:
    """What is remembered on `tp` ranks, against one device; `bundles` permutes every layer."""
    delta, stored = model.config.delta, parts.recurrent
    order = np.arange(delta.num_key_heads) if bundles is None else bundles
    ratio = delta.num_value_heads // delta.num_key_heads
    heads = (order[:, None] * ratio + np.arange(ratio)).ravel()
    near(whole.recurrent.temporal[:, :, heads], stored.temporal)
    near(whole.recurrent.conv[:, :, channel_order(delta, tp, bundles)], stored.conv)
    for one, many in zip(whole.state.pages.arrays, parts.state.pages.arrays, strict=True):
        copies = many.shape[3] // one.shape[3]
        near(one if copies == 1 else np.repeat(one, copies, axis=3), many)


def compare(family: str, kind: str, tp: int) -> None:
    model = model_on(family, tp, kind)
    logits, cache = run(model)
    for ours, theirs in zip(logits, expected(family, kind)[0], strict=True):
        near(ours, theirs)
    same_memory(expected(family, kind)[1], cache, model, tp)
    assert model.mesh is not None
    for array, sharding in zip(
        jax.tree.leaves(cache.state),
        jax.tree.leaves(state_shardings(model.config, model.mesh)),
        strict=True,
    ):
        assert array.sharding.is_equivalent_to(sharding, array.ndim)


@pytest.mark.parametrize("tp", [*slow(1, 2), 4, 8])
def test_ranks_compute_what_one_device_does(family, tp):
    compare(family, "wide", tp)


@pytest.mark.parametrize("tp", [*slow(2, 4), 8])
def test_the_released_numbers_of_heads_and_experts_divide(family, tp):
    compare(family, "released", tp)


def head_order(model: Model, bundles: list[np.ndarray], tp: int = 4) -> HeadOrder:
    delta, shape = model.config.delta, (len(bundles), model.config.delta.num_key_heads)
    ratio = delta.num_value_heads // delta.num_key_heads
    return HeadOrder(
        tuple(np.asarray(one, np.int32) for one in bundles), tp, ratio, np.zeros(shape, np.int64)
    )


def order_of(model: Model) -> HeadOrder:
    rng = np.random.default_rng(3)
    bundles = model.config.delta.num_key_heads
    return head_order(model, [rng.permutation(bundles) for _ in model.config.recurrent_layers])


@pytest.mark.parametrize("tp", [1, 4])
def test_another_order_of_heads_changes_nothing(family, tp):
    model = whole_model(family)
    order = order_of(model)
    if tp == 1:
        params = permute(model.params, model.config, order.bundles)
        moved = dataclasses.replace(model, params=params)
        assert not np.array_equal(
            params["layers.0.mixer.conv.weight"], model.params["layers.0.mixer.conv.weight"]
        )
        back = permute(params, model.config, order.inverse().bundles)
        jax.tree.map(np.testing.assert_array_equal, back, dict(model.params))
    else:
        moved = shard_model(model, make_mesh(tp), order)
    logits, cache = run(moved)
    for ours, theirs in zip(logits, expected(family, "wide")[0], strict=True):
        near(ours, theirs)
    whole = expected(family, "wide")[1]
    for row in range(len(order.bundles)):
        heads = order.value_heads(row)
        near(whole.recurrent.temporal[row][:, heads], cache.recurrent.temporal[row])


def test_boundaries_merges_and_scores_are_those_of_one_device(family):
    """A replayed prefix, a merge by unit, states at boundaries, logits of hidden rows."""
    whole, parts, rng = whole_model(family), model_on(family, 2), np.random.default_rng(1)
    config, delta = whole.config, whole.config.delta
    keep = rng.random((2, delta.num_value_heads, delta.key_dim)) < 0.5
    if delta.kind == "gdn":
        keep = np.broadcast_to(keep[..., :1], keep.shape)
    tokens, bucket = rng.integers(3, 250, 130).astype(np.int32), PrefillBucket(128, 3, 2, 4, 2)
    first = pack_segments(
        [Segment(tokens[:64], 0, [1, 2], 1, 1, ZERO)], [(0, 64)], [63], keep, bucket
    )
    second = pack_segments(
        [
            Segment(tokens[40:64], 40, [1, 2], 2, 2, ZERO, writes_pages=False),
            Segment(tokens[64:130], 64, [1, 2, 3], 1, 1, MERGE),
        ],
        [(1, 128)],
        [24, 89],
        keep,
        bucket,
    )
    outs, ends = [], []
    for model in (whole, parts):
        run = serving_functions(config, "float32", model.mesh)
        state = State(
            init_recurrent(config, 3, "float32", model.mesh),
            init_pages(config, 5, jnp.dtype("float32"), model.mesh),
        )
        prefill = jax.jit(run.prefill, donate_argnums=1)
        state, _ = prefill(model.params, state, first)
        state, out = prefill(model.params, state, second)
        outs.append((out, jax.jit(run.logits)(model.params, out.hidden[:3])))
        ends.append(state.recurrent)
    (one, scored), (many, scored_many) = outs
    near(one.logits, many.logits)
    near(scored, scored_many)
    channels = channel_order(delta, 2)
    for a, b in ((one.boundary, many.boundary), (ends[0], ends[1])):
        near(a.temporal, b.temporal)
        near(a.conv[:, :, channels], b.conv)
    assert np.asarray(one.boundary.temporal).any()


@pytest.mark.parametrize("tp", [2, 8])
def test_a_rank_holds_its_share_and_no_more(family, tp):
    model = model_on(family, tp)
    specs = sharded_specs(model.config, "float32", model.mesh)
    local = abstract_params(model.config, "float32", tp)
    held = dict.fromkeys(model.mesh.devices.flat, 0)
    for path, value in model.params.items():
        assert (value.shape, value.dtype) == (specs[path].shape, specs[path].dtype), path
        assert value.sharding == specs[path].sharding == NamedSharding(model.mesh, param_spec(path))
        for shard in value.addressable_shards:
            assert shard.data.shape == local[path].shape, path
            held[shard.device] += shard.data.nbytes
    assert set(held.values()) == {sum(s.size * s.dtype.itemsize for s in local.values())}
    state = init_state(model, 3).state
    rank = local_config(model.config, tp)
    expected = jax.eval_shape(
        lambda: State(init_recurrent(rank, 4, "float32"), init_pages(rank, 4, jnp.dtype("float32")))
    )
    jax.tree.map(
        lambda array, part: [
            np.testing.assert_equal(s.data.shape, part.shape) for s in array.addressable_shards
        ],
        state,
        expected,
    )


def same_bits(loaded: Model, spread: Model) -> None:
    assert loaded.params.keys() == spread.params.keys()
    for path, value in loaded.params.items():
        assert value.sharding == spread.params[path].sharding, path
        np.testing.assert_array_equal(value, spread.params[path], path)


def test_a_checkpoint_loads_straight_into_its_shards(family, tmp_path):
    """From a native directory and a released one, with head bundles in another order."""
    whole, mesh = whole_model(family), make_mesh(4)
    save_native(tmp_path / "native", whole.config, whole.params)
    for order in (None, order_of(whole)):
        loaded = load_model(tmp_path / "native", "float32", mesh, order)
        assert loaded.order == order
        same_bits(loaded, shard_model(whole, mesh, order))
    released, pair = GOLDEN / f"{family}_a", make_mesh(2)
    alone = load_model(released, "bfloat16")
    swapped = head_order(alone, [np.array([1, 0])] * 3, 2)
    loaded = load_model(released, "bfloat16", pair, swapped)
    same_bits(loaded, shard_model(alone, pair, swapped))
    permuted = load_model(released, "bfloat16", order=swapped)
    jax.tree.map(
        np.testing.assert_array_equal,
        permuted.params,
        permute(alone.params, alone.config, swapped.bundles),
    )


def test_generation_on_a_mesh_of_explicit_axes_is_that_of_one_device(family):
    """Over the other axis of the mesh, everything repeats."""
    prompt, whole = TOKENS[0, :9].tolist(), whole_model(family)
    mesh = jax.make_mesh((4, 2), ("data", AXIS))
    assert generate(shard_model(whole, mesh), prompt, 4) == generate(whole, prompt, 4)


def test_ranks_that_do_not_divide_are_refused_with_the_numbers(family):
    config = wide_config(family)
    for tp, message in (
        (3, r"tp=3 does not divide.*num_key_heads=8 .*num_heads=8 .*num_experts=16 "),
        (16, r"tp=16 does not divide.*num_key_heads=8 .*attention.num_heads=8 "),
    ):
        with pytest.raises(ConfigError, match=message):
            local_config(config, tp)
    uneven = {"shared_intermediate": 36}
    assert config.moe is not None
    narrow = dataclasses.replace(config, moe=dataclasses.replace(config.moe, **uneven))
    with pytest.raises(ConfigError, match=r"tp=8 .*moe.shared_intermediate=36 is no multiple"):
        shard_model(dataclasses.replace(whole_model(family), config=narrow), make_mesh(8))
    if family == "qwen3_next":
        heads = dataclasses.replace(config.attention, num_heads=24, num_kv_heads=6)
        with pytest.raises(ConfigError, match="num_kv_heads=6 is neither multiple nor divisor"):
            local_config(dataclasses.replace(config, attention=heads), 4)
    else:
        dense = dataclasses.replace(config, dense_intermediate=100)
        with pytest.raises(ConfigError, match="dense_intermediate=100 is no multiple"):
            local_config(dense, 8)
    with pytest.raises(ConfigError, match="tp=9: there are 8 devices"):
        make_mesh(9)
    with pytest.raises(ConfigError, match=r"axes \('data',\), none of them 'tp'"):
        tensor_mesh(Mesh(np.array(jax.devices()), ("data",)))


def test_orders_that_are_no_permutations_are_refused(family):
    model = whole_model(family)
    twice = np.array([0, 0, 2, 3, 4, 5, 6, 7])
    with pytest.raises(ValueError, match="1 orders for 2 recurrent layers"):
        permute(model.params, model.config, [np.arange(8)])
    with pytest.raises(ValueError, match=r"recurrent layer 1 is no permutation of 8.*\[0, 0, 2"):
        shard_model(model, make_mesh(2), head_order(model, [np.arange(8), twice]))
