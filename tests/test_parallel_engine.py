"""An engine over ranks serves what one device serves, and every rank holds what the account says;
runs where there are eight devices (`tests/test_many_devices.py` makes them)."""

import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from dasc_jax.analysis.intervention import INTERVENTIONS, continued, intervened, prefilled
from dasc_jax.analysis.observe import observe
from dasc_jax.config import ConfigError, DascConfig
from dasc_jax.engine.dispatch import Device
from dasc_jax.engine.engine import Engine
from dasc_jax.engine.loop import checkpoint_slots
from dasc_jax.engine.request import RequestResult
from dasc_jax.head_order import head_order
from dasc_jax.horizons import retention_horizons
from dasc_jax.layout import Account, account
from dasc_jax.model import Model, init_state, load_model, order_heads, pack, shard_model
from dasc_jax.parallel import make_mesh, rank_count
from dasc_jax.plan import make_plan
from dasc_jax.weights import WeightError, save_native
from tests.many_devices import WIDE, model_on, needs_devices
from tests.mesh_engines import (
    PREFIX,
    W_MAX,
    adopted,
    alone,
    config_of,
    device_bytes,
    over,
    prompts,
    same,
    serve,
    uneven_model,
)

pytestmark = needs_devices

EVERY = [(f, tp, p) for f in WIDE for tp in (2, 4, 8) for p in ("off", "storage", "hybrid")]
QUICK = [
    ("kimi_linear", 4, "off"),
    ("kimi_linear", 4, "storage"),
    ("kimi_linear", 8, "hybrid"),
    ("qwen3_next", 2, "off"),
    ("qwen3_next", 2, "storage"),
]
"""Of three engines over ranks; each takes seconds to trace, and more to compile."""
FEW = QUICK[2::2]


def cases(quick: list[tuple[str, int, str]]) -> pytest.MarkDecorator:
    """All families, ranks and placements; slow but those. The scope, and the same order in every
    test, make pytest run a case through all tests, so that few engines are held at a time."""
    values = [
        pytest.param(*case, marks=[] if case in quick else [pytest.mark.slow]) for case in EVERY
    ]
    return pytest.mark.parametrize(("family", "tp", "placement"), values, scope="module")


@lru_cache
def expected(family: str, policy: str, quantization: str | None = None) -> list[RequestResult]:
    """Two prompts of a common prefix on one device; the second hits what the first left."""
    return serve(adopted(alone(family), policy, quantization), *prompts(family), policy=policy)


@lru_cache
def cold(family: str) -> RequestResult:
    """The second prompt on one device, with nothing cached."""
    return serve(adopted(alone(family), "dense"), prompts(family)[1], policy="dense")[0]


def on_mesh(family: str, tp: int, placement: str, policy: str, quantization: str | None = None):
    """The engine of a case with an empty cache of this form."""
    return adopted(over(family, tp, placement == "hybrid"), policy, quantization, placement)


def cost(engine: Engine) -> Account:
    """What a checkpoint of an engine takes."""
    dasc, model = engine.config.dasc, engine.model
    stored = replace(model.config, dtype=model.dtype)
    tp = rank_count(model.mesh)
    return account(stored, engine.loop.plan, tp, dasc.placement, dasc.quantization)


@cases(QUICK)
def test_a_hit_is_the_cold_run_of_one_device_where_nothing_is_dropped(family, tp, placement):
    engine = on_mesh(family, tp, placement, "dense")
    same(serve(engine, prompts(family)[1], policy="dense")[0], cold(family))
    assert engine.flush_cache()
    first, hit = serve(engine, *prompts(family), policy="dense")
    assert (first.cached_tokens, hit.cached_tokens, hit.report.lineage) == (0, PREFIX, 0)
    same(first, expected(family, "dense")[0])
    same(hit, cold(family))


@pytest.mark.parametrize("policy", ["nr", "wr"])
@cases(QUICK)
def test_a_lossy_hit_is_that_of_one_device(family, tp, placement, policy):
    served = serve(on_mesh(family, tp, placement, policy), *prompts(family), policy=policy)
    for ours, theirs in zip(served, expected(family, policy), strict=True):
        same(ours, theirs)
        assert ours.report == theirs.report
    assert served[1].cached_tokens == PREFIX and served[1].report.lineage == 1


@cases(FEW)
def test_a_hit_in_int8_gives_the_tokens_of_one_device(family, tp, placement):
    engine = on_mesh(family, tp, placement, "nr", "int8")
    served = serve(engine, *prompts(family))
    for ours, theirs in zip(served, expected(family, "nr", "int8"), strict=True):
        assert (ours.tokens, ours.report) == (theirs.tokens, theirs.report)


@pytest.mark.parametrize("quantization", [None, "int8"])
@cases(QUICK)
def test_every_rank_holds_the_bytes_of_the_account(family, tp, placement, quantization):
    engine = on_mesh(family, tp, placement, "nr", quantization)
    state, pool = engine.loop.device.memory
    costs, slots = cost(engine), engine.loop.device.slots
    assert device_bytes(pool) == [slots * costs.bytes_per_slot] * tp
    running = engine.config.max_running + 1
    assert device_bytes(state.recurrent) == [running * costs.dense_bytes_per_slot] * tp


@cases(QUICK)
def test_a_budget_of_bytes_is_what_every_rank_spends(family, tp, placement):
    """The pool fits, and one slot more would not. Nothing is compiled for that."""
    engine = on_mesh(family, tp, placement, "nr")
    costs = cost(engine)
    budget = 9 * costs.bytes_per_slot - 1
    config = config_of(placement, checkpoint_bytes=budget)
    slots = checkpoint_slots(engine.model, config, engine.loop.plan)
    assert slots == costs.slots(budget) == 7
    pool = Device(engine.model, config, engine.loop.plan, slots).memory.pool
    assert device_bytes(pool) == [8 * costs.bytes_per_slot] * tp


@cases(FEW)
def test_what_is_kept_is_adopted_in_another_form(family, tp, placement):
    """A warm cache of exact states, again under the plan that drops, in int8, and exact again."""
    engine = on_mesh(family, tp, placement, "dense")
    first, second = prompts(family)
    serve(engine, first, policy="dense")
    kept = engine.keep()
    for policy, quantization in (("nr", None), ("wr", None), ("nr", "int8"), ("dense", None)):
        dasc = DascConfig(W_MAX, policy=policy, quantization=quantization, placement=placement)
        engine.adopt(kept, dasc)
        (hit,) = serve(engine, second, policy=policy)
        assert hit.tokens == expected(family, policy, quantization)[1].tokens
        assert hit.cached_tokens == PREFIX


COLLECTIVES = "all-to-all|collective-permute|all-gather|all-reduce|reduce-scatter"


def collectives(engine: Engine, step: str) -> set[str]:
    """The kinds of exchanges between ranks in all compiled forms of a step."""
    compiled = engine.loop.device.executables.compiled
    texts = [run.as_text() for (name, _), run in compiled.items() if name == step]
    assert texts
    return {kind for text in texts for kind in re.findall(rf" ({COLLECTIVES})[-\w]*\(", text)}


@cases(QUICK)
def test_checkpoints_travel_at_store_and_load_alone(family, tp, placement):
    """A step of the model sums over ranks and gathers logits; nothing else crosses."""
    engine = on_mesh(family, tp, placement, "nr")
    form = engine.loop.device.form
    for step in ("prefill", "decode"):
        assert collectives(engine, step) == {"all-reduce", "all-gather"}
    for step in ("store", "load"):
        found = collectives(engine, step)
        assert found <= {"all-to-all", "collective-permute"}
        assert bool(found) == bool(form.storage.moved)
    moves = placement == "storage" or (placement == "hybrid" and tp == 8)
    assert bool(form.storage.moved) == moves


def loaded(family: str, tp: int, path: Path) -> Model:
    """From a native directory, straight into its shards, in the order that balances them."""
    whole = uneven_model(family)
    order = head_order(make_plan(retention_horizons(whole), W_MAX), whole.config, tp)
    assert not order.identity
    save_native(path, whole.config, whole.params)
    return load_model(path, "float32", make_mesh(tp), order)


def test_a_model_ordered_as_it_is_loaded_is_the_one_that_an_engine_orders(tmp_path):
    model, ordered = loaded("kimi_linear", 8, tmp_path), over("kimi_linear", 8, True).model
    assert (model.order, model.config) == (ordered.order, ordered.config)
    for path, value in model.params.items():
        np.testing.assert_array_equal(value, ordered.params[path], path)


@pytest.mark.slow
@pytest.mark.parametrize("family", WIDE)
def test_a_model_ordered_as_it_is_loaded_is_served_in_that_order(family, tmp_path):
    model = loaded(family, 4, tmp_path)
    engine = Engine(model, config_of())
    assert engine.model is model
    for ours, theirs in zip(serve(engine, *prompts(family)), expected(family, "nr"), strict=True):
        same(ours, theirs)


@pytest.mark.parametrize("family", WIDE)
def test_an_order_of_heads_is_refused_where_placement_knows_of_none(family):
    plan = make_plan(retention_horizons(uneven_model(family)), W_MAX)
    spread = shard_model(uneven_model(family), make_mesh(2))
    ordered = order_heads(spread, head_order(plan, spread.config, 2))
    for placement in ("off", "storage"):
        with pytest.raises(ConfigError, match=f"placement='{placement}', but the model's heads"):
            Engine(ordered, config_of(placement))


@pytest.mark.parametrize("family", WIDE)
def test_an_order_of_heads_for_other_ranks_is_refused(family):
    whole = uneven_model(family)
    order = head_order(make_plan(retention_horizons(whole), W_MAX), whole.config, 4)
    with pytest.raises(ConfigError, match="in an order for tp=4, but it lies on one device"):
        Engine(order_heads(whole, order), config_of())
    ordered = shard_model(whole, make_mesh(2), order)
    with pytest.raises(ConfigError, match="in an order for tp=4, but it lies on 2 ranks"):
        Engine(ordered, config_of())
    with pytest.raises(ValueError, match="heads are ordered already"):
        order_heads(ordered, order)
    for moved in (ordered, shard_model(whole, make_mesh(2)), order_heads(whole, order)):
        with pytest.raises(ValueError, match="cut over ranks or its heads are ordered already"):
            shard_model(moved, make_mesh(4))


def test_an_engine_whose_heads_are_ordered_adopts_no_other_placement():
    engine = over("kimi_linear", 8, True)
    before = engine.config
    with pytest.raises(ConfigError, match="placement='off', but the model's heads"):
        engine.adopt(None, DascConfig(W_MAX, placement="off"))
    assert engine.config == before


@pytest.mark.parametrize("tp", [2, 8])
@pytest.mark.parametrize("family", WIDE)
def test_horizons_of_an_ordered_model_are_those_of_the_released_one(family, tp):
    released = retention_horizons(uneven_model(family))
    spread = shard_model(uneven_model(family), make_mesh(tp))
    order = head_order(make_plan(released, W_MAX), spread.config, tp)
    moved = order_heads(spread, order)
    path = f"layers.{spread.config.recurrent_layers[-1]}.mixer.decay.dt_bias"
    assert not np.array_equal(moved.params[path], spread.params[path])
    for ours, theirs in zip(retention_horizons(moved), released, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("family", WIDE)
def test_what_takes_one_device_refuses_a_mesh(family, tmp_path):
    model = model_on(family, 2)
    with pytest.raises(WeightError, match="mixer.conv.weight is split over 2 ranks"):
        save_native(tmp_path / "native", model.config, model.params)
    assert not (tmp_path / "native").exists()
    with pytest.raises(ValueError, match="the state lies over 2 ranks"):
        pack(make_plan(retention_horizons(model), W_MAX), init_state(model, 1))
    with pytest.raises(ValueError, match="a model on one device"):
        observe(model, prompts(family)[0])


@pytest.mark.slow
@pytest.mark.parametrize("family", WIDE)
def test_the_interventions_of_table_1a_run_over_ranks(family):
    prefix, room = [prompts(family)[0]], 256
    rest, limit, width = [[5, 6, 7]], [4], 64
    whole, spread = uneven_model(family), shard_model(uneven_model(family), make_mesh(2))
    for chosen in INTERVENTIONS:
        answers = []
        for model in (whole, spread):
            cache = intervened(prefilled(model, prefix, room), chosen)
            answers.append(continued(model, cache, rest, limit, width))
        assert answers[0] == answers[1]
