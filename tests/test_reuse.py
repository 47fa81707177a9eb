"""Arms derived from one exact warm-up are the arms; nothing of a replay outlives it."""

import weakref
from dataclasses import replace

import jax
import numpy as np
import pytest

from dasc_jax.config import DascConfig
from dasc_jax.engine import dispatch
from dasc_jax.engine.config import EngineConfig
from dasc_jax.engine.engine import Engine
from dasc_jax.evals.arms import DENSE, Arm, random_arms
from dasc_jax.evals.reuse import Reuse, sized, warm_and_replay
from dasc_jax.horizons import retention_horizons
from dasc_jax.layout import account
from dasc_jax.prefix_cache import check
from tests.engines import MODELS, prompt
from tests.tiny import tiny_model

PROMPTS = [prompt(length, seed=length) for length in (130, 65, 200, 251, 100, 129)]
PROMPTS.append(PROMPTS[0][:128] + prompt(60, seed=1))
LIMITS = [6, 1, 20, 5, 3, 70, 4]
SIZES = EngineConfig(max_context=256, max_running=3, prefill_tokens=192, strict_compile=True)
TIGHT = replace(sized(SIZES, PROMPTS, LIMITS), pages=22)
"""Just enough for these prompts and their answers."""

NR, WR = DascConfig(w_max=64), DascConfig(w_max=64, policy="wr")
ARMS = [
    Arm(NR),
    Arm(WR),
    Arm(replace(NR, quantization="int8")),
    Arm(DascConfig(w_max=0, quantization="int8")),
]


def engine(family: str, arm: Arm = DENSE) -> Engine:
    """An engine made for an arm."""
    return Engine(tiny_model(family), replace(TIGHT, dasc=arm.dasc))


def bits(tree) -> list[np.ndarray]:
    return [np.asarray(leaf).view(np.uint8) for leaf in jax.tree.leaves(tree)]


def assert_same_bits(left, right):
    for a, b in zip(bits(left), bits(right), strict=True):
        np.testing.assert_array_equal(a, b)


def assert_sound(made: Engine):
    check(made.loop.residency.cache)
    assert made.loop.residency.cache.counts.idle


@pytest.fixture(scope="module", params=[MODELS[0], pytest.param(MODELS[1], marks=pytest.mark.slow)])
def study(request) -> Reuse:
    """Prompts cached exactly, once for all tests of a family."""
    return Reuse(engine(request.param), PROMPTS, LIMITS)


@pytest.fixture
def family(study) -> str:
    kinds = dict(zip(("kda", "gdn"), MODELS, strict=True))
    return kinds[study.engine.model.config.delta.kind]


@pytest.mark.parametrize("arm", ARMS[:3], ids=lambda arm: arm.name)
def test_a_derived_pool_and_its_answers_are_those_of_an_engine_warmed_under_the_arm(
    study, family, arm
):
    made = engine(family, arm)
    assert made.loop.plan.id == arm.plan(retention_horizons(made.model)).id
    warmed = warm_and_replay(made, PROMPTS, LIMITS, arm, rounds=1)
    derived = study.replay(arm, rounds=1)
    assert derived == warmed
    assert_same_bits(study.engine.loop.device.memory.pool, made.loop.device.memory.pool)
    assert derived.strict and derived.loaded == 1.0
    assert_sound(study.engine)


def test_random_masks_derive_as_the_other_arms(study):
    """No engine is made with a random mask: `warm_and_replay` switches to it, empty."""
    pool = lambda: study.engine.loop.device.memory.pool  # noqa: E731
    for arm in random_arms(NR)[:2]:
        derived, states = study.replay(arm, rounds=1), pool()
        assert warm_and_replay(study.engine, PROMPTS, LIMITS, arm, rounds=1) == derived
        assert_same_bits(pool(), states)


def test_an_engine_switched_to_an_arm_serves_as_one_made_for_it(study, family):
    """Shared prefixes, lossy states stored behind lossy loads: all that a study avoids."""
    requests = [replace(r, namespace="") for r in study.requests]
    made = engine(family, ARMS[1])
    study.engine.adopt(None, WR)
    for _ in range(2):
        answers = [e.generate(requests) for e in (made, study.engine)]
        assert [(r.tokens, r.report) for r in answers[0]] == [
            (r.tokens, r.report) for r in answers[1]
        ]
    assert {r.reason for r in answers[0]} == {"hit"}
    assert_same_bits(made.loop.device.memory.pool, study.engine.loop.device.memory.pool)


def test_arms_differ_and_none_leaves_a_trace_for_the_next(study):
    study.replay(DENSE)
    pages = sorted(node.page for node in study.kept.cache.nodes.values())

    def kept() -> tuple:
        arrays = study.engine.loop.device.memory.state.pages.arrays
        return [a[:, np.array(pages)] for a in arrays], study.kept.pool

    before, first = bits(kept()), study.replay(DENSE)
    others = [study.replay(arm, rounds=1) for arm in (*ARMS, *random_arms(NR)[:1])]
    assert study.replay(DENSE) == first
    assert_same_bits(before, kept())
    answers = {tuple(a.tokens for a in one.rounds[0].answers) for one in (first, *others)}
    assert len(answers) >= 3, "else the equalities here would hold for arms that do nothing"
    assert first.strict and first.compression == first.temporal_compression == 1.0


def test_no_arm_compiles_the_model_again(study):
    executables = study.engine.loop.device.executables
    study.replay(DENSE, rounds=1)
    model = {k: id(v) for k, v in executables.compiled.items() if k[0] in ("prefill", "decode")}
    study.replay(ARMS[0], rounds=1)
    once = dict(executables.compiled)
    study.replay(ARMS[1], rounds=1)
    study.replay(ARMS[0], rounds=1)
    assert executables.late == 0 and executables.compiled == once
    assert {key: id(executables.compiled[key]) for key in model} == model


def test_rounds_hit_the_last_boundary_of_every_prompt_by_equation_9(study):
    found = study.replay(ARMS[1])
    depths = [(len(p) - 1) // 64 * 64 for p in PROMPTS]
    for one in found.rounds:
        assert [a.cached_tokens for a in one.answers] == depths
        assert [a.prompt_tokens for a in one.answers] == [len(p) for p in PROMPTS]
        assert all(len(a.tokens) <= n for a, n in zip(one.answers, LIMITS, strict=True))
        assert one.token_hit == sum(depths) / sum(map(len, PROMPTS))
    window = study.engine.loop.plan.window
    assert [a.replayed_tokens for a in found.rounds[0].answers] == [min(window, d) for d in depths]
    assert found.token_hit == found.rounds[0].token_hit
    assert len({one.answers for one in found.rounds}) == 1, "greedy rounds repeat"


@pytest.mark.parametrize("arm", [*ARMS, *random_arms(NR)[:1]], ids=lambda arm: arm.name)
def test_compression_read_from_the_arrays_is_that_of_the_formula(study, arm):
    found, model = study.replay(arm, rounds=1), study.engine.model
    config = replace(model.config, dtype=model.dtype)
    plan = arm.plan(retention_horizons(model))
    expected = account(config, plan, tp=1, quantization=arm.dasc.quantization)
    assert found.slot.total == expected.bytes_per_slot
    assert found.dense.total == expected.dense_bytes_per_slot
    assert found.compression == expected.c_ckpt > 1
    assert found.temporal_compression == pytest.approx(expected.c_temp)


def test_studies_in_turn_share_an_engine_and_warm_it_again(study):
    first = study.replay(ARMS[0])
    later = Reuse(study.engine, PROMPTS[1:3], 8)
    assert later.replay(ARMS[0], rounds=1).strict
    assert study.replay(ARMS[0]) == first


def test_a_replay_that_evicts_is_not_strict_and_does_not_spoil_the_next_arm(study):
    prompts = [prompt(129, seed=seed) for seed in range(7)]
    crowded = Reuse(study.engine, prompts, 127)
    for arm in (ARMS[0], DENSE):
        found = crowded.replay(arm, rounds=2)
        assert not found.strict and "pages evicted" in found.faults[0]
        assert_sound(study.engine)
    alone = Reuse(study.engine, prompts[:2], 127).replay(DENSE, rounds=1)
    assert alone.strict
    assert alone.rounds[0].answers == found.rounds[0].answers[:2]


def test_a_pool_too_small_for_the_warm_up_is_refused(study):
    with pytest.raises(ValueError, match="of 8 prompts evicted 0 pages and 1 checkpoints"):
        Reuse(study.engine, [*PROMPTS, prompt(70)], 4)
    assert_sound(study.engine)


def test_a_sized_pool_has_room_for_all_prompts_and_every_answer_of_every_round():
    config = sized(replace(SIZES, checkpoint_interval=64, max_lineage=0), PROMPTS, LIMITS, rounds=2)
    kept = sum(len(p) // 64 for p in PROMPTS)
    added = sum((len(p) + n) // 64 - len(p) // 64 for p, n in zip(PROMPTS, LIMITS, strict=True))
    assert config.num_pages - 1 >= kept + 2 * added + 3 * config.context_pages
    assert config.checkpoint_slots == len(PROMPTS)
    assert (config.checkpoint_interval, config.max_lineage) == (None, None), "prompt-only"


def test_short_prompts_and_long_tails_are_reported_as_what_they_are(study):
    prompts = [prompt(30), prompt(110, seed=1)]
    found = Reuse(study.engine, prompts, 4).replay(DENSE, rounds=1)
    assert found.faults == (
        "round 1: token hit 0.457, not above 0.7",
        "round 1: 0.500 of requests loaded, below 0.95",
        "0.500 of all requests loaded, below 0.99",
    )
    assert [a.reason for a in found.answers] == ["below_page", "hit"]


def test_what_cannot_be_kept_or_adopted_is_refused(study):
    made = study.engine
    study.replay(DENSE, rounds=1)
    old = made.keep()
    made.adopt(made.keep(), NR)
    with pytest.raises(ValueError, match="warm up again"):
        made.adopt(old, NR)
    with pytest.raises(ValueError, match="checkpoints are lossy"):
        made.keep()
    with pytest.raises(ValueError, match="'dense' needs a plan that keeps every unit"):
        made.adopt(None, DENSE.dasc, made.loop.plan)
    with pytest.raises(ValueError, match=r"prefill_tokens is 192; a refresh of \d+ tokens needs"):
        made.adopt(None, DascConfig(w_max=100_000))
    with pytest.raises(ValueError, match="other decay weights"):
        made.adopt(None, DascConfig(eps=0.1), made.loop.plan)
    made.loop.waiting["x"] = None
    for refused in (made.keep, lambda: made.adopt(None, NR)):
        with pytest.raises(ValueError, match="requests run or wait"):
            refused()
    made.loop.waiting.clear()
    assert study.replay(DENSE, rounds=1).strict


def fails_once(monkeypatch, owner, name: str) -> None:
    """The next call has no memory."""
    real = getattr(owner, name)

    def fails(*args, **kwargs):
        monkeypatch.setattr(owner, name, real)
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room")

    monkeypatch.setattr(owner, name, fails)


def served(made: Engine, requests) -> list:
    return [(r.tokens, r.report) for r in made.generate(requests)]


@pytest.mark.parametrize(("from_kept", "at"), [
    (False, "init_pool"), (False, "_compile_load"),
    (True, "init_pool"), (True, "_compile_load"), (True, "_repack"),
])  # fmt: skip
def test_an_engine_without_room_for_another_form_serves_as_before(
    study, monkeypatch, from_kept, at
):
    """Back to what was kept, if anything was, and to what was cached if not."""
    study.replay(ARMS[1], rounds=1)
    made, requests = study.engine, study.requests
    if not from_kept:
        made.flush_cache()
        served(made, requests)
    before = served(made, requests)
    config, plan, states = made.config, made.loop.plan, bits(made.loop.device.memory.pool)
    made.loop.device._forms.clear()
    fails_once(monkeypatch, dispatch if at == "init_pool" else dispatch.Device, at)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no room"):
        made.adopt(study.kept if from_kept else None, replace(NR, w_max=32, quantization="int8"))
    assert (made.config, made.loop.config, made.loop.plan) == (config, config, plan)
    assert_same_bits(made.loop.device.memory.pool, states)
    assert served(made, requests) == before
    assert {report.reason for _, report in before} == {"hit"}
    assert_sound(made)


@pytest.mark.parametrize("from_kept", [False, True])
def test_two_pools_are_held_at_most(study, monkeypatch, from_kept):
    """The one in use and the new one, or the one that was kept and the new one."""
    study.replay(ARMS[0], rounds=1)
    old, real, alive = (
        weakref.ref(study.engine.loop.device.memory.pool.rows),
        dispatch.init_pool,
        [],
    )

    def counted(*args, **kwargs):
        alive.append(old() is not None)
        return real(*args, **kwargs)

    monkeypatch.setattr(dispatch, "init_pool", counted)
    if not from_kept:
        study.engine.flush_cache()
    study.engine.adopt(study.kept if from_kept else None, WR)
    assert alive == [not from_kept]


def test_prompts_and_limits_must_match_and_exist(study):
    with pytest.raises(ValueError, match="no prompts"):
        Reuse(study.engine, [], 3)
    with pytest.raises(ValueError, match="2 prompts, 1 values"):
        sized(SIZES, PROMPTS[:2], [3])
    with pytest.raises(ValueError, match="rounds is 0"):
        study.replay(DENSE, rounds=0)
