"""Faults of other servers' pools, tried on a real engine: too few slots or pages, budgets, aborts.

Each test names what must hold; the comment above it is the public report of the opposite.
"""

import jax
import numpy as np
import pytest

from dasc_jax.config import DascConfig
from dasc_jax.engine.config import EngineConfig
from dasc_jax.engine.dispatch import Device
from dasc_jax.engine.loop import checkpoint_slots
from dasc_jax.engine.request import Request, SamplingParams
from dasc_jax.horizons import retention_horizons
from dasc_jax.plan import make_plan
from dasc_jax.prefix_cache import check
from tests.engines import MODELS, distribution, engine, golden_model, prompt, request, run

KIMI = MODELS[0]


# https://github.com/sgl-project/sglang/pull/36770
@pytest.mark.parametrize("slots", [0, 1])
def test_prompts_without_a_checkpoint_slot_are_served_right_and_counted(slots):
    """Three prompts share a step, and want a slot each."""
    made = engine(KIMI, policy="dense", checkpoint_slots=slots)
    prompts = [prompt(70 + 2 * i, seed=i) for i in range(7)] + [prompt(300, seed=7)]
    together = run(made, *[request(str(i), tokens) for i, tokens in enumerate(prompts)])
    assert made.stats()["checkpoints_skipped"] >= 3
    for i, tokens in enumerate(prompts):
        made.flush_cache()
        alone = run(made, request(f"alone{i}", tokens))[0]
        assert together[i].finish_reason == "length" and together[i].tokens == alone.tokens
        x, y = distribution(together[i]), distribution(alone)
        assert np.abs(x - y).max() <= 1e-5 * np.abs(y).max()


# https://github.com/sgl-project/sglang/pull/21404
def test_requests_aborted_while_they_wait_leave_nothing_behind():
    """A pool of 8 pages: a hit that is not admitted took neither lock, page nor slot."""
    made = engine(KIMI, policy="dense", prefill_tokens=64, pages=9)
    loop, random = made.loop, np.random.default_rng(0)
    total = loop.residency.cache.counts
    shared, ended = prompt(200), []
    for turn in range(200):
        tokens = shared + prompt(9, seed=turn)
        made.submit(Request("large", tokens, SamplingParams(99, ignore_eos=True)), ended.append)
        made._drain()
        for _ in range(int(random.integers(1, 5))):
            loop.step()
        for i in range(3):
            tokens = shared + prompt(150, seed=i)
            made.submit(Request(f"waits{i}", tokens, SamplingParams(99)), ended.append)
        made._drain()
        loop.step()
        assert list(loop.waiting) == ["waits0", "waits1", "waits2"] and "large" not in loop.waiting
        for key in random.permutation(["waits0", "waits1", "waits2", "large"]):
            made.abort(str(key))
            made._drain()
        check(loop.residency.cache)
        assert loop.residency.cache.counts.idle and len(loop.residency.free_slots) == 4
    reasons = [event.result.finish_reason for event in ended if event.result]
    assert reasons == ["abort"] * 800
    assert made.flush_cache() and loop.residency.cache.counts == total


# https://github.com/sgl-project/sglang/pull/32184
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("w_max", [0, 4, 64, 200, 512, 10**6])
@pytest.mark.parametrize("name", MODELS)
def test_the_pool_fills_its_budget_and_never_passes_it(name, w_max, quantization, dtype):
    model = golden_model(name, dtype)
    plan = make_plan(retention_horizons(model), w_max)
    for budget in (60_000, 200_000, 777_777):
        config = EngineConfig(
            dasc=DascConfig(w_max=w_max, quantization=quantization),
            max_context=128,
            max_running=1,
            checkpoint_bytes=budget,
        )
        try:
            slots = checkpoint_slots(model, config, plan)
        except ValueError as error:
            assert "slot 0 and one checkpoint take" in str(error) and budget == 60_000
            continue
        pool = Device(model, config, plan, slots).memory.pool
        allocated = sum(array.nbytes for array in jax.tree.leaves(pool))
        each = allocated // pool.conv.shape[0]
        assert pool.conv.shape[0] == slots + 1 and each * (slots + 1) == allocated
        assert allocated <= budget < allocated + each
