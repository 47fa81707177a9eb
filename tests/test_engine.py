"""What an engine refuses, counts, gives back and survives."""

from dataclasses import replace

import numpy as np
import pytest

from dasc_jax.config import ConfigError, DascConfig
from dasc_jax.engine.config import EngineConfig
from dasc_jax.engine.engine import Engine
from dasc_jax.engine.loop import checkpoint_slots
from dasc_jax.engine.request import Request, SamplingParams
from dasc_jax.horizons import retention_horizons
from dasc_jax.layout import account
from dasc_jax.plan import make_plan
from dasc_jax.prefix_cache import check
from tests.engines import prompt
from tests.tiny import VOCABULARY, tiny_engine, tiny_model

LEAST = {"policy": "dense", "pages": 3, "max_running": 1, "prefill_tokens": 64}
"""An engine of two pages and one prefill bucket: few programs to compile."""


def ask(key: str, tokens: int | tuple[int, ...] = 100, max_tokens: int = 3, **how) -> Request:
    """A request for exactly `max_tokens` tokens behind a prompt, or one of that length."""
    tokens = prompt(tokens, seed=tokens) if isinstance(tokens, int) else tokens
    names = ("temperature", "top_p", "top_k", "seed", "logprobs", "stop_token_ids")
    sampling = {name: how.pop(name) for name in names if name in how}
    return Request(key, tokens, SamplingParams(max_tokens, ignore_eos=True, **sampling), **how)


def assert_idle(engine: Engine) -> None:
    """Nothing runs or waits, and nothing is held."""
    stats = engine.stats()
    assert stats["running"] == stats["waiting"] == 0
    check(engine.loop.residency.cache)
    assert engine.loop.residency.cache.counts.idle
    slots = range(1, engine.config.max_running + 1)
    assert sorted(engine.loop.residency.free_slots) == list(slots)


@pytest.fixture(scope="module")
def shared() -> Engine:
    """An engine without a thread, for tests that leave it idle."""
    return tiny_engine(checkpoint_interval=64)


@pytest.fixture
def engine(shared: Engine) -> Engine:
    """The shared engine, cold, with its counters at zero."""
    assert shared.flush_cache()
    shared.loop.counters.clear()
    shared.loop.residency.counters.clear()
    return shared


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_context": 0}, "max_context is 0; it must be at least 1"),
        ({"max_running": 0}, "max_running is 0"),
        ({"prefill_tokens": 0}, "prefill_tokens is 0"),
        ({"prefill_requests": 0}, "prefill_requests is 0; it must be at least 1"),
        ({"prefill_tokens": 100}, "prefill_tokens is 100; it must be a multiple of 64"),
        ({"checkpoint_interval": 32}, "checkpoint_interval is 32; .* grid of 64"),
        ({"checkpoint_interval": 100}, "checkpoint_interval is 100"),
        ({"checkpoint_interval": 0}, "checkpoint_interval is 0"),
        ({"checkpoint_slots": -1}, "checkpoint_slots is -1"),
        ({"checkpoint_slots": 4, "checkpoint_bytes": 99}, "checkpoint_slots=4 .*bytes=99"),
        ({"max_lineage": -1}, "max_lineage is -1"),
        ({"pages": 1}, "pages is 1; it must be at least 2"),
        ({"pages": 0}, "pages is 0"),
    ],
)
def test_a_config_that_cannot_work_is_refused_with_its_numbers(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


def test_an_engine_that_does_not_fit_its_model_is_refused():
    model = replace(tiny_model(), config=replace(tiny_model().config, max_context=512))
    with pytest.raises(ConfigError, match="max_context is 513; .* made for 512 tokens"):
        Engine(model, EngineConfig(max_context=513))
    wide = DascConfig(w_max=256)
    with pytest.raises(ConfigError, match=r"prefill_tokens is 64; a refresh of \d+ tokens needs"):
        Engine(model, EngineConfig(dasc=wide, max_context=512, prefill_tokens=64))


@pytest.mark.parametrize("policy", ["nr", "wr", "dense"])
@pytest.mark.parametrize(("window", "least"), [(0, 64), (1, 128), (61, 128), (62, 192), (125, 192)])
def test_the_smallest_prefill_step_that_has_room_is_named(policy, window, least):
    """Under `nr` too, whose requests may ask for `wr`: the window, three tokens and a page."""
    model, dasc = tiny_model().config, DascConfig(policy=policy)
    EngineConfig(dasc=dasc, prefill_tokens=least).check_model(model, window)
    for size in range(64, least, 64):
        message = f"is {size}; a refresh of {window} tokens needs at least {least}$"
        with pytest.raises(ConfigError, match=message):
            EngineConfig(dasc=dasc, prefill_tokens=size).check_model(model, window)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_byte_budget_gives_the_slots_of_equation_8(quantization):
    model, dasc = tiny_model(), DascConfig(quantization=quantization)
    plan = make_plan(retention_horizons(model), dasc.w_max)
    stored = replace(model.config, dtype=model.dtype)
    acc = account(stored, plan, tp=1, quantization=quantization)
    for budget in (2, 3, 9.5):
        size = int(budget * acc.bytes_per_slot)
        config = EngineConfig(dasc=dasc, checkpoint_bytes=size)
        assert checkpoint_slots(model, config, plan) == acc.slots(size) == int(budget) - 1
    small = EngineConfig(dasc=dasc, checkpoint_bytes=2 * acc.bytes_per_slot - 1)
    message = f"is {2 * acc.bytes_per_slot - 1}; .* take {2 * acc.bytes_per_slot} bytes"
    with pytest.raises(ValueError, match=message):
        checkpoint_slots(model, small, plan)


REFUSED = [
    (ask("a", ()), "the prompt is empty"),
    (ask("a", (5, VOCABULARY)), f"token id {VOCABULARY} is outside the vocabulary of {VOCABULARY}"),
    (ask("a", (-1,)), "token id -1"),
    (ask("a", 250, 7), "250 prompt tokens and max_tokens 7 make 257; the context is 256"),
    (ask("a", 3, namespace="\ud800"), "surrogates not allowed"),
]


@pytest.mark.parametrize(("request_", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_a_request_that_can_never_run_is_refused_and_changes_nothing(engine, request_, message):
    for refuse in (
        lambda: engine.submit(request_, lambda event: None),
        lambda: engine.generate([ask("fine"), request_]),
    ):
        with pytest.raises(ValueError, match=message):
            refuse()
    assert_idle(engine)
    assert not engine.loop.counters


def test_an_unknown_policy_is_refused(engine):
    """Set behind the back of the type checker that runs during tests."""
    unknown = ask("a", 3)
    object.__setattr__(unknown, "state_policy", "exact")
    with pytest.raises(ValueError, match="state_policy 'exact': expected 'dense', 'nr' or 'wr'"):
        engine.generate([unknown])
    words = ask("a", 3)
    object.__setattr__(words, "prompt", (1, "two", 3.0))
    with pytest.raises(ValueError, match="the prompt holds float, int, str; token ids are"):
        engine.generate([words])
    assert_idle(engine)


def test_a_request_that_needs_more_pages_than_there_are_is_refused():
    engine = tiny_engine(**LEAST)
    with pytest.raises(ValueError, match="needs 3 attention pages; the pool has 2"):
        engine.generate([ask("a", 128, 1)])
    assert len(engine.generate([ask("a", 127, 1)])[0].tokens) == 1


def test_sampling_values_out_of_range_are_refused():
    for bad in (
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_k": 2**31},
        {"seed": -1},
        {"seed": 2**63},
        {"logprobs": -1},
    ):
        (name,) = bad
        with pytest.raises((ValueError, TypeError), match=name):
            SamplingParams(**bad)


def test_an_id_in_use_ends_the_newcomer_alone(engine):
    with pytest.raises(ValueError, match="ids .'a'. occur more than once"):
        engine.generate([ask("a"), ask("a")])
    first, second = [], []
    engine.submit(ask("a"), first.append)
    engine.submit(ask("a", 50), second.append)
    engine.generate([ask("b", 20, 10)])
    assert second[-1].result.error == "request id 'a' is in use" and len(second) == 1
    assert first[-1].result.finish_reason == "length" and len(first) == 3
    again = engine.generate([ask("a")])[0]
    assert again.tokens == first[-1].result.tokens
    assert_idle(engine)


def test_nothing_compiles_after_warm_up_whatever_the_lengths(engine):
    """`engine` is strict: a step outside the closed set would fail."""
    requests = [ask(f"{n}", n, 1) for n in range(1, 256)]
    requests += [ask(f"long{n}", n, 256 - n) for n in (1, 63, 64, 65, 250, 255)]
    requests += [ask(f"wr{n}", prompt(255)[:n], 1, state_policy="wr") for n in range(120, 256)]
    results = engine.generate(requests)
    assert [len(r.tokens) for r in results] == [r.sampling.max_tokens for r in requests]
    stats = engine.stats()
    assert stats["compiled_after_warmup"] == 0 and stats["replayed_tokens"] > 0
    assert stats["generated_tokens"] == sum(len(r.tokens) for r in results)
    assert stats["prompt_tokens"] == sum(len(r.prompt) for r in requests)
    assert stats["prompt_tokens"] == stats["cached_tokens"] + stats["prefilled_tokens"]
    assert stats["cached_tokens"] == sum(r.cached_tokens for r in results)
    assert_idle(engine)


def test_a_late_compilation_is_counted_or_refused(caplog):
    made = tiny_engine(strict_compile=False, **LEAST)
    executables = made.loop.device.executables
    expected = made.generate([ask("a")])[0].tokens
    del executables.compiled["decode", 2]
    assert made.generate([ask("b")])[0].tokens == expected
    assert made.stats()["compiled_after_warmup"] == 1
    assert "after warm-up" in caplog.text
    executables.strict = True
    del executables.compiled["decode", 2]
    with pytest.raises(RuntimeError, match="the engine has failed") as failed:
        made.generate([ask("c")])
    assert "was not compiled at warm-up" in str(failed.value.__cause__)


def test_sampling_is_the_same_in_every_engine_and_company(engine):
    hot = {"temperature": 1.0, "seed": 2**40 + 7}
    requests = [ask("t", 70, 12, **hot), ask("p", 70, 12, top_p=0.9, **hot)]
    requests += [ask("k", 70, 12, top_k=9, **hot), ask("g", 70, 12)]
    alone = [engine.generate([r])[0].tokens for r in requests]
    assert len(set(alone)) == 4
    other = tiny_engine(pages=9, checkpoint_slots=2)
    assert [r.tokens for r in other.generate(requests)] == alone
    assert other.generate([ask("seed", 70, 12, temperature=1.0, seed=8)])[0].tokens != alone[0]
    least = ask("least", 70, 12, temperature=1.0, top_p=1e-50)
    assert engine.generate([least])[0].tokens == alone[3], "at least one token stays"


def test_without_a_prefix_cache_every_request_runs_cold():
    engine = tiny_engine(prefix_cache=False)
    first, second = (engine.generate([ask(key, 200)])[0] for key in "ab")
    assert first.tokens == second.tokens
    assert second.cached_tokens == 0 and second.report.reason == "no_kv"
    stats = engine.stats()
    assert stats["free_pages"] == engine.config.num_pages - 1
    assert stats["prefilled_tokens"] == 400 and "checkpoints_skipped" not in stats
    assert_idle(engine)


def test_without_checkpoint_slots_every_request_runs_cold_and_says_so():
    engine = tiny_engine(checkpoint_slots=0)
    first, second = (engine.generate([ask(key, 200)])[0] for key in "ab")
    assert first.tokens == second.tokens
    assert (second.cached_tokens, second.report.kv_depth) == (0, 192)
    assert second.report.reason == "locked"
    assert engine.stats()["checkpoints_skipped"] >= 2
    assert_idle(engine)


def test_a_replay_and_its_piece_may_exceed_a_step():
    """19 replayed tokens and 120 new ones in steps of 128: cut at a page, the same answer."""
    tokens = prompt(184)
    tight, roomy = tiny_engine(policy="wr"), tiny_engine(policy="wr", prefill_tokens=256)
    assert tight.loop.plan.window == 16
    answers = []
    for made in (tight, roomy):
        made.generate([ask("warm", tokens[:65], 1)])
        answers.append(made.generate([ask("hit", tokens, 12)])[0])
    for answer in answers:
        assert (answer.cached_tokens, answer.report.replayed_tokens) == (64, 16)
    assert answers[0].tokens == answers[1].tokens
    assert tight.stats()["prefilled_tokens"] == 65 + 120


def test_a_hundred_requests_wait_for_pages_that_serve_one():
    engine = tiny_engine(**LEAST | {"pages": 5, "max_running": 4})
    requests = [ask(f"{n}", 200 + n % 50, 6) for n in range(100)]
    results = engine.generate(requests)
    assert [len(r.tokens) for r in results] == [6] * 100
    latency = [r.latency for r in results]
    assert latency == sorted(latency), "first come, first served"
    assert_idle(engine)


def test_the_least_and_the_most_a_request_can_ask_for(engine):
    for length, count in ((1, 1), (255, 1), (1, 255), (64, 1), (64, 192), (128, 1)):
        cold = engine.generate([ask("cold", length, count)])[0]
        warm = engine.generate([ask("warm", length, count, state_policy="dense")])[0]
        assert cold.tokens == warm.tokens and len(cold.tokens) == count
        assert cold.finish_reason == "length" and cold.ttft <= cold.latency
    assert_idle(engine)


def test_logprobs_are_those_of_the_unmodified_distribution(engine):
    result = engine.generate([ask("a", 30, 4, logprobs=VOCABULARY, temperature=1.0, top_k=3)])[0]
    for token, (logprob, top) in zip(result.tokens, result.logprobs, strict=True):
        assert top[token] == logprob and list(top.values()) == sorted(top.values(), reverse=True)
        assert np.exp(list(top.values())).sum() == pytest.approx(1, abs=1e-5)
        assert token in list(top)[:3]
    none = engine.generate([ask("b", 30, 4, logprobs=0)])[0].logprobs
    assert [top for _, top in none] == [{}] * 4
