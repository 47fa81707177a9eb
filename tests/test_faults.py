"""Faults of other servers' state caches, tried on a real engine: what is in memory, who reads it.

Each test names what must hold; the comment above it is the public report of the opposite.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dasc_jax import prefix_cache
from dasc_jax.config import DascConfig
from dasc_jax.engine import dispatch
from dasc_jax.engine.config import EngineConfig
from dasc_jax.engine.request import SamplingParams
from dasc_jax.horizons import retention_horizons
from dasc_jax.models.packing import ZERO, Segment
from dasc_jax.plan import make_plan
from tests.by_hand import extended, fresh, own
from tests.engines import MODELS, distribution, engine, golden_model, prompt, request, run

pytestmark = pytest.mark.parametrize("name", MODELS)

DENSE = {"policy": "dense", "prefill_tokens": 64}
LOSSY = {"w_max": 64, "prefill_tokens": 256, "checkpoint_slots": 24}
PROMPTS = [prompt(length, seed=length) for length in (1, 2, 63, 64)] + [
    prompt(65 + 11 * i, seed=i) for i in range(16)
]


def fill(made, value, *, kept_slots=(), kept_pages=(), sinks=False):
    """Put `value` into all device memory but the checkpoints and pages named, and the sinks."""
    state, pool = made.loop.device.memory
    first = 0 if sinks else 1

    def filled(array, axis, keep):
        rows = np.setdiff1d(np.arange(first, array.shape[axis]), keep)
        return array.at[rows].set(value) if axis == 0 else array.at[:, rows].set(value)

    recurrent = type(state.recurrent)(*(filled(a, 1, ()) for a in state.recurrent))
    pages = type(state.pages)(tuple(filled(a, 1, kept_pages) for a in state.pages.arrays))
    pool = jax.tree.map(lambda a: filled(a, 0, kept_slots), pool)
    made.loop.device.memory = dispatch.Memory(type(state)(recurrent, pages), pool)


def clean(made):
    """An engine as new: nothing cached, and zeros everywhere."""
    assert made.flush_cache()
    fill(made, 0, sinks=True)


def assert_same(results, others):
    for a, b in zip(results, others, strict=True):
        assert a.tokens == b.tokens and a.cached_tokens == b.cached_tokens
        np.testing.assert_array_equal(distribution(a), distribution(b))


def one_by_one(made, key, prompts, **options):
    return [
        run(made, request(f"{key}{i}", tokens, **options))[0] for i, tokens in enumerate(prompts)
    ]


# https://github.com/sgl-project/sglang/pull/31474
@pytest.mark.parametrize("options", [DENSE, LOSSY], ids=["dense", "nr"])
def test_a_checkpoint_is_wholly_written_before_it_is_hit(name, options):
    made = engine(name, **options)
    clean(made)
    expected = [one_by_one(made, key, PROMPTS) for key in "ab"]
    assert made.flush_cache()
    fill(made, np.nan)
    found = [one_by_one(made, key, PROMPTS) for key in "ab"]
    fill(made, 0)
    assert [r.cached_tokens for r in found[1]] == [(len(p) - 1) // 64 * 64 for p in PROMPTS]
    for results, others in zip(found, expected, strict=True):
        assert all(np.isfinite(distribution(r)).all() for r in results)
        assert_same(results, others)
    if options is DENSE:
        for hit, cold in zip(found[1], found[0], strict=True):
            np.testing.assert_array_equal(distribution(hit), distribution(cold))


# https://github.com/vllm-project/tpu-inference/pull/2431
@pytest.mark.parametrize("options", [DENSE, LOSSY], ids=["dense", "nr"])
def test_what_a_slot_held_before_reaches_no_later_request(name, options):
    made = engine(name, **options)
    shared = prompt(128)
    prompts = [shared + (5, 6), (9,), prompt(70, seed=70), prompt(200, seed=200)]

    def warmed():
        clean(made)
        run(made, request("warm", shared + (7,), max_tokens=1))

    warmed()
    expected = one_by_one(made, "a", prompts)
    warmed()
    plan_id = made.loop.plan.id
    tokens = np.array(prompts[0], np.int32)
    _, found = prefix_cache.match(made.loop.residency.cache, tokens, plan_id=plan_id)
    fill(made, 1e3, kept_slots=[found.slot], kept_pages=list(found.pages))
    results = one_by_one(made, "b", prompts)
    clean(made)
    assert [r.cached_tokens for r in results] == [128, 0, 0, 0]
    assert_same(results, expected)


# https://github.com/sgl-project/sglang/issues/21158
@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 129, 192])
def test_a_repeated_prompt_hits_from_the_second_time_on(name, length):
    made = engine(name, **DENSE)
    tokens = prompt(length)
    results = [run(made, request(str(i), tokens))[0] for i in range(3)]
    assert [r.cached_tokens for r in results] == [0, *[64 * ((length - 1) // 64)] * 2]
    assert_same(results[1:2], results[2:])
    np.testing.assert_array_equal(distribution(results[0]), distribution(results[1]))


# https://github.com/vllm-project/vllm/issues/45238
def test_the_third_prompt_reuses_all_whole_pages_of_a_shared_prefix(name):
    made = engine(name, **DENSE)
    for shared in (*range(64, 129, 9), 65, 126, 128):
        assert made.flush_cache()
        for i in range(3):
            tokens = prompt(shared) + prompt(70, seed=1000 * shared + i)
            last = run(made, request(str(i), tokens, max_tokens=1))[0]
        assert last.cached_tokens >= 64 * (shared // 64)


# https://github.com/vllm-project/vllm/pull/34489
def test_recurrent_states_stay_float32_under_bfloat16_weights(name):
    model = golden_model(name, "bfloat16")
    config = EngineConfig(DascConfig(policy="dense"), 128, 1, 64)
    plan = make_plan(retention_horizons(model), 0)
    device = dispatch.Device(model, config, plan, 2)
    segment = Segment(np.array(prompt(64), np.int32), 0, (1, 2), 1, 1, ZERO)
    device.prefill([segment], [(0, 64)], [1], [63], [SamplingParams()], [64])
    device.load([1], [1])
    device.decode([(5, 64, 1, (1, 2), SamplingParams())])
    (temporal, conv), pool = device.memory.state.recurrent, device.memory.pool
    assert (temporal.dtype, conv.dtype) == (jnp.float32, jnp.bfloat16)
    assert (pool.rows.dtype, pool.conv.dtype) == (jnp.float32, jnp.bfloat16)
    for values in (temporal[:, 1], pool.rows[1]):
        rounded = values.astype(jnp.bfloat16).astype(jnp.float32)
        assert (rounded != values).mean() > 0.9, "no value passed through bfloat16"


# https://github.com/kekzl/imp/pull/156
def test_a_prompt_cut_anywhere_ends_in_the_same_state(name):
    tokens = prompt(70)
    whole, logits = extended(name, fresh(name), tokens, 0)
    cuts = [(cut,) for cut in range(1, 70)] + [tuple(range(n, 70, n)) for n in (1, 2, 3, 4, 5)]
    for cut in cuts:
        state, at = fresh(name), 0
        for stop in (*cut, 70):
            state, last = extended(name, state, tokens[at:stop], at)
            at = stop
        np.testing.assert_allclose(last, logits, rtol=0, atol=1e-5 * np.abs(logits).max())
        for a, b in zip(own(state), own(whole), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


# https://github.com/fla-org/flash-linear-attention/pull/892
def test_nothing_of_the_padding_reaches_a_request(name, monkeypatch):
    made = engine(name, **LOSSY)
    prompts = [prompt(n, seed=n) for n in (5, 65, 70)]
    requests = [request(str(n), tokens, state_policy="wr") for n, tokens in enumerate(prompts)]
    clean(made)
    expected = [run(made, *requests) for _ in range(2)]
    clean(made)
    fill(made, np.nan, sinks=True)
    real, random = dispatch.pack_segments, np.random.default_rng(0)

    def with_noise(segments, *rest):
        batch = real(segments, *rest)
        unused = slice(sum(len(s.tokens) for s in segments), None)
        for array, limit in ((batch.tokens, 256), (batch.positions, 512)):
            array[unused] = random.integers(0, limit, array[unused].shape)
        return batch

    monkeypatch.setattr(dispatch, "pack_segments", with_noise)
    found = [run(made, *requests) for _ in range(2)]
    clean(made)
    for results, others in zip(found, expected, strict=True):
        assert_same(results, others)


# https://github.com/sgl-project/sglang-jax/commit/00c60d51d28245abbedc4ef2898373014ac8fa15
def test_host_arrays_may_change_as_soon_as_a_step_is_dispatched(name, monkeypatch):
    made = engine(name, **LOSSY)
    shared = prompt(128)
    tails = [prompt(n, seed=n) for n in (3, 90, 200, 65)]
    jobs = [
        request(str(i), shared + tail, state_policy=("nr", "wr")[i % 2])
        for i, tail in enumerate(tails)
    ]

    def twice():
        assert made.flush_cache()
        run(made, request("warm", shared + (7,), max_tokens=1))
        return run(made, *jobs)

    expected, handed_over, real = twice(), [], dispatch.on_device

    def aligned(array):
        """A copy at a multiple of 64 bytes, which the CPU client would read in place."""
        room = np.empty(array.nbytes + 64, np.uint8)
        start = -room.ctypes.data % 64
        copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        copy[...] = array
        return copy

    def watched(tree, whole):
        tree = jax.tree.map(aligned, tree)
        handed_over.extend(jax.tree.leaves(tree))
        return real(tree, whole)

    def spoiling(step):
        def dispatch_and_spoil(*args):
            out = step(*args)
            for array in handed_over:
                array.reshape(-1).view(np.uint8)[...] = 1
            handed_over.clear()
            return out

        return dispatch_and_spoil

    monkeypatch.setattr(dispatch, "on_device", watched)
    for method in ("prefill", "decode", "load"):
        monkeypatch.setattr(made.loop.device, method, spoiling(getattr(made.loop.device, method)))
    assert_same(twice(), expected)
