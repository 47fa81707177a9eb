"""A dense hit is the cold run: the same bits in the same bucket, the same tokens in any other."""

import numpy as np
import pytest

from tests.engines import MODELS, distribution, engine, prompt, request, run

pytestmark = pytest.mark.parametrize("name", MODELS)

EDGES = (
    1,
    2,
    3,
    4,
    15,
    16,
    17,
    31,
    32,
    33,
    47,
    48,
    49,
    62,
    63,
    64,
    65,
    66,
    67,
    80,
    96,
    127,
    128,
    130,
)
"""Tails about the ends of blocks, chunks and the convolution's window."""


def assert_same_bits(a, b):
    assert a.tokens == b.tokens
    np.testing.assert_array_equal(distribution(a), distribution(b))


def assert_close(a, b, rtol=1e-5):
    assert a.tokens == b.tokens
    x, y = distribution(a), distribution(b)
    assert np.abs(x - y).max() <= rtol * np.abs(y).max()


@pytest.mark.parametrize("lengths", [EDGES, pytest.param(range(1, 131), marks=pytest.mark.slow)])
def test_hit_equals_cold_bit_for_bit_at_every_tail_length(name, lengths):
    """One bucket of 64 tokens: the cold run's last pieces are the very steps the hit runs."""
    made = engine(name, policy="dense", prefill_tokens=64)
    shared = prompt(128)
    tails = prompt(130, seed=1)
    for tail in lengths:
        tokens = shared + tails[:tail]
        made.flush_cache()
        cold = run(made, request("cold", tokens))[0]
        made.flush_cache()
        run(made, request("warm", shared + (7,), max_tokens=1))
        hit = run(made, request("hit", tokens))[0]
        assert (cold.cached_tokens, hit.cached_tokens) == (0, 128)
        assert_same_bits(cold, hit)


def test_hit_equals_cold_in_other_buckets(name):
    """A cold run of one 256-token step against a hit of one 64-token step."""
    made = engine(name, policy="dense")
    shared = prompt(192)
    for tail in (1, 2, 15, 16, 17, 63, 64):
        tokens = shared + prompt(tail, seed=tail)
        made.flush_cache()
        cold = run(made, request("cold", tokens))[0]
        made.flush_cache()
        run(made, request("warm", shared + (7,), max_tokens=1))
        hit = run(made, request("hit", tokens))[0]
        assert hit.cached_tokens == 192
        assert_close(hit, cold)


def test_chunked_prefill_equals_one_step(name):
    tokens = prompt(310)
    whole = run(engine(name, policy="dense", prefill_tokens=320), request("whole", tokens))[0]
    for size in (64, 256):
        cut = run(engine(name, policy="dense", prefill_tokens=size), request("cut", tokens))[0]
        assert_close(cut, whole)


def test_batched_equals_alone(name):
    made = engine(name, policy="dense")
    prompts = [prompt(length, seed=length) for length in (1, 5, 64, 65, 130)]
    alone = []
    for i, tokens in enumerate(prompts):
        alone.append(run(made, request(f"alone{i}", tokens, max_tokens=8))[0])
    made.flush_cache()
    together = run(made, *[request(f"batch{i}", t, max_tokens=8) for i, t in enumerate(prompts)])
    for a, b in zip(alone, together, strict=True):
        assert_close(b, a)


def test_hits_beside_cold_requests_equal_cold_runs(name):
    made = engine(name, policy="dense")
    shared = prompt(128)
    requests = [request(f"r{i}", shared + prompt(9 + i, seed=i)) for i in range(3)]
    cold = []
    for r in requests:
        made.flush_cache()
        cold += run(made, r)
    made.flush_cache()
    run(made, request("warm", shared + (7,), max_tokens=1))
    mixed = run(made, *requests, request("other", prompt(100, seed=99)))
    assert [r.cached_tokens for r in mixed] == [128, 128, 128, 0]
    for a, b in zip(mixed[:3], cold, strict=True):
        assert_close(a, b)


def test_hit_equals_cold_after_eviction_and_reinsertion(name):
    """A pool of 8 pages: the second prompt drives the first one out, a third run brings it back."""
    made = engine(name, policy="dense", prefill_tokens=64, max_context=512, pages=9)
    first, second = prompt(300, seed=1), prompt(500, seed=2)
    cold = run(made, request("a", first))[0]
    run(made, request("b", second))
    again = run(made, request("c", first))[0]
    assert again.report.reason == "no_kv" and made.loop.residency.counters["evicted_pages"]
    hit = run(made, request("d", first))[0]
    assert hit.cached_tokens == 256
    assert_same_bits(again, cold)
    assert_same_bits(hit, cold)


def test_checkpoints_inside_one_step_are_resumed_exactly(name):
    """Every 64-token boundary of a prompt run in one step serves as a resume point."""
    made = engine(name, policy="dense", checkpoint_interval=64)
    tokens = prompt(250)
    run(made, request("warm", tokens, max_tokens=1))
    for depth in (64, 128, 192):
        probe = tokens[:depth] + prompt(20, seed=depth)
        hit = run(made, request(f"hit{depth}", probe))[0]
        assert hit.cached_tokens == depth
        made_cold = engine(name, policy="dense", prefix_cache=False)
        assert_close(hit, run(made_cold, request("cold", probe))[0])


def test_generated_pages_are_reused_in_the_next_turn(name):
    """A turn's answer becomes part of the next prompt: its pages are known, its state is not."""
    made = engine(name, policy="dense")
    first = run(made, request("turn1", prompt(100), max_tokens=80))[0]
    history = prompt(100) + first.tokens
    second = run(made, request("turn2", history + prompt(10, seed=3)))[0]
    assert (second.cached_tokens, second.report.kv_depth) == (64, 128)
    third = run(made, request("turn3", history + prompt(12, seed=4)))[0]
    assert third.cached_tokens == 128, "the second turn checkpoints the branch point"
    cold = run(
        engine(name, policy="dense", prefix_cache=False),
        request("cold", history + prompt(12, seed=4)),
    )
    assert_close(third, cold[0])
