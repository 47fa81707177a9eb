"""A hit that drops or refreshes local units equals the same steps done by hand, pass by pass."""

import numpy as np
import pytest

from dasc_jax import prefix_cache
from tests.by_hand import resumed
from tests.engines import MODELS, distribution, engine, prompt, request, run

pytestmark = pytest.mark.parametrize("name", MODELS)

SHARED = prompt(128)
CHUNKED = {"w_max": 64, "prefill_tokens": 256, "checkpoint_slots": 24}
"""A replay of 64 tokens and a page of new ones fit into a step, longer tails are cut."""


def assert_equals(result, expected, rtol=1e-5):
    tokens, logprobs = expected
    found = distribution(result)
    assert result.tokens == tokens
    assert np.abs(found - logprobs).max() <= rtol * np.abs(logprobs).max()


def warm(made, *prefixes):
    """Cache prefixes whose last whole page is checkpointed."""
    for i, prefix in enumerate(prefixes):
        run(made, request(f"warm{i}", (*prefix, 7), max_tokens=1))


def has_both_kinds(plan):
    return 0 < plan.total < plan.units


@pytest.mark.parametrize("policy", ["nr", "wr"])
@pytest.mark.parametrize("w_max", [pytest.param(4, marks=pytest.mark.slow), 64, 200])
@pytest.mark.parametrize("depth", [64, 128])
def test_a_hit_equals_the_same_passes_by_hand(name, policy, w_max, depth):
    """At 64 the windows of 128 and 200 tokens are clipped to what there is."""
    made = engine(name, **CHUNKED | {"w_max": w_max, "prefill_tokens": 320 if w_max > 64 else 256})
    plan = made.loop.plan
    assert has_both_kinds(plan)
    warm(made, SHARED[:depth])
    for tail in (1, 5, 63, 64, 70):
        tokens = SHARED[:depth] + prompt(tail, seed=tail)
        hit = run(made, request(f"t{tail}", tokens, state_policy=policy))[0]
        report = hit.report
        assert (report.reason, report.hit_depth, report.lineage) == ("hit", depth, 1)
        dropped = plan.units - plan.total
        assert (report.units_loaded, report.units_zeroed + report.units_refreshed) == (
            plan.total,
            dropped,
        )
        assert (report.units_zeroed == dropped) == (policy == "nr")
        assert report.replayed_tokens == (min(plan.window, depth) if policy == "wr" else 0)
        assert_equals(hit, resumed(name, plan, policy, tokens, [depth]))


def test_policies_differ_from_each_other_and_from_a_cold_run(name):
    """Else the equalities above would hold for a load that does nothing."""
    made = engine(name, **CHUNKED)
    tokens = SHARED + prompt(5, seed=5)
    warm(made, SHARED)
    hits = run(made, *[request(p, tokens, state_policy=p) for p in ("nr", "wr", "dense")])
    nr, wr, cold = (distribution(hit)[0] for hit in hits)
    assert min(np.abs(nr - cold).max(), np.abs(wr - cold).max(), np.abs(nr - wr).max()) > 1e-3


@pytest.mark.parametrize("policy", ["nr", "wr"])
@pytest.mark.parametrize("tail", [64, 65, 193, 300])
def test_a_long_tail_is_cut_without_changing_a_hit(name, policy, tail):
    """Only the first piece replays; the others continue from the merged state."""
    made = engine(name, **CHUNKED)
    tokens = SHARED + prompt(tail, seed=tail)
    warm(made, SHARED)
    hit = run(made, request("hit", tokens, state_policy=policy))[0]
    assert hit.cached_tokens == 128
    assert_equals(hit, resumed(name, made.loop.plan, policy, tokens, [128]))


def test_hits_of_every_policy_and_cold_requests_share_a_step(name):
    made = engine(name, **CHUNKED)
    plan, other = made.loop.plan, prompt(64, seed=9)
    jobs = {
        "nr": (SHARED + prompt(9, seed=1), [128]),
        "wr": (SHARED + prompt(33, seed=2), [128]),
        "wr-shallow": (other + prompt(7, seed=3), [64]),
        "cold": (prompt(50, seed=4), []),
    }
    warm(made, SHARED, other)
    together = run(
        made,
        *[
            request(key, tokens, state_policy=key.partition("-")[0].replace("cold", "nr"))
            for key, (tokens, _) in jobs.items()
        ],
    )
    for key, result in zip(jobs, together, strict=True):
        tokens, depths = jobs[key]
        assert result.cached_tokens == sum(depths)
        assert_equals(result, resumed(name, plan, key.partition("-")[0], tokens, depths))


@pytest.mark.parametrize("policy", ["nr", "wr"])
def test_quantised_checkpoints_load_as_their_rows_times_their_scales(name, policy):
    made = engine(name, quantization="int8", **CHUNKED)
    plan = made.loop.plan
    warm(made, SHARED)
    for tail in (1, 64):
        tokens = SHARED + prompt(tail, seed=tail)
        hit = run(made, request(f"t{tail}", tokens, state_policy=policy))[0]
        assert hit.cached_tokens == 128
        assert_equals(hit, resumed(name, plan, policy, tokens, [128], quantization="int8"))
        unquantised = resumed(name, plan, policy, tokens, [128])[1]
        assert np.abs(distribution(hit) - unquantised).max() > 1e-5 * np.abs(unquantised).max()


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_no_policy_writes_into_what_it_reuses(name, quantization):
    """Shared pages and the checkpoint keep every bit, a replay over them included."""
    made = engine(name, quantization=quantization, **CHUNKED)
    warm(made, SHARED)
    plan_id = made.loop.plan.id
    _, found = prefix_cache.match(
        made.loop.residency.cache, np.array((*SHARED, 7), np.int32), plan_id=plan_id
    )

    def bits():
        memory = made.loop.device.memory
        pages = [np.asarray(a[:, np.array(found.pages)]) for a in memory.state.pages.arrays]
        return pages, [np.asarray(a[found.slot]) for a in memory.pool if a is not None]

    before = bits()
    for policy in ("nr", "wr", "dense"):
        run(
            made,
            *[
                request(f"{policy}{n}", SHARED + prompt(n, seed=n), state_policy=policy)
                for n in (3, 99)
            ],
        )
    for was, now in zip(before, bits(), strict=True):
        for a, b in zip(was, now, strict=True):
            np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


def test_a_dense_request_takes_no_lossy_state_and_equals_a_cold_run(name):
    made = engine(name, **CHUNKED)
    tokens = SHARED + prompt(20, seed=20)
    cold = run(made, request("cold", tokens, state_policy="dense"))[0]
    made.flush_cache()
    warm(made, SHARED)
    mixed = run(made, *[request(p, tokens, state_policy=p) for p in ("dense", "nr", "wr")])
    assert [r.report.reason for r in mixed] == ["plan_mismatch", "hit", "hit"]
    assert [r.cached_tokens for r in mixed] == [0, 128, 128]
    assert_equals(mixed[0], (cold.tokens, distribution(cold)))
    for result, policy in zip(mixed[1:], ("nr", "wr"), strict=True):
        assert_equals(result, resumed(name, made.loop.plan, policy, tokens, [128]))


def test_every_policy_is_the_same_on_an_engine_that_drops_nothing(name):
    made = engine(name, policy="dense")
    tokens = SHARED + prompt(20, seed=20)
    warm(made, SHARED)
    hits = [run(made, request(p, tokens, state_policy=p))[0] for p in ("dense", "nr", "wr")]
    for hit in hits:
        assert (hit.report.reason, hit.cached_tokens, hit.report.lineage) == ("hit", 128, 0)
        assert hit.report.units_zeroed == hit.report.units_refreshed == 0
        assert hit.report.replayed_tokens == 0
        assert hit.tokens == hits[0].tokens
        np.testing.assert_array_equal(distribution(hit), distribution(hits[0]))


def test_a_refresh_that_reaches_back_to_the_first_token_equals_a_cold_run(name):
    made = engine(name, **CHUNKED | {"w_max": 200, "prefill_tokens": 320})
    tokens = SHARED[:64] + (7,)
    cold = run(made, request("cold", tokens, max_tokens=1, state_policy="dense"))[0]
    made.flush_cache()
    warm(made, SHARED[:64])
    hit = run(made, request("hit", tokens, max_tokens=1, state_policy="wr"))[0]
    assert hit.report.replayed_tokens == 64
    assert_equals(hit, (cold.tokens, distribution(cold)))
