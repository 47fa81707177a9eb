"""The Hopper prefill of GDN on a GPU: right in every regime, whatever the cut and the batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels.bench import delta_prefill
from pallas_kernels.bench import gdn_prefill as bench
from pallas_kernels.mgpu import gdn_prefill as kernel
from tests.kernels import gdn_cases
from tests.kernels.cases import Segment, assert_same_bits
from tests.kernels.gdn_cases import case

pytestmark = pytest.mark.device

HEADS = {"key_heads": 2, "values": 128}
RAGGED = [
    Segment(19, 45),
    Segment(0, 64),
    Segment(64, 0, pk.ZERO),
    Segment(1, 5),
    Segment(0, 7, pk.MERGE),
    Segment(70, 3, pk.MERGE),
    Segment(191, 1, pk.ZERO),
    Segment(0, 0, pk.ZERO),
    Segment(333, 64),
    Segment(63, 64, pk.MERGE),
]


@pytest.fixture
def rng():
    return np.random.default_rng(12)


@functools.partial(jax.jit, static_argnames=("num_boundaries", "tiling"))
def run(q, k, v, g, beta, initial, table, keep, *, num_boundaries, tiling=kernel.DEFAULT):
    args = q, k, v, g, beta, initial, table, keep, num_boundaries
    assert kernel.refuses(*args) is None
    return kernel.prefill(*args, tiling)


def poison():
    """Free memory that holds NaN, where workspaces and outputs are likely to be put."""
    jax.block_until_ready([jnp.full((n << 20,), jnp.nan, jnp.float32) for n in (1, 4, 16)])


def computed(c, tiling=kernel.DEFAULT):
    poison()
    out = run(*c.args(), num_boundaries=len(c.table_boundaries()), tiling=tiling)
    return pk.DeltaOut(*(np.asarray(x) for x in out))


@pytest.mark.parametrize("regime", gdn_cases.REGIMES)
def test_every_regime_follows_the_recurrence(regime, rng):
    c = case(rng, [Segment(1000)], **HEADS, regime=regime)
    gdn_cases.assert_right(computed(c), c)


@pytest.mark.parametrize("tiling", [kernel.DEFAULT, *bench.TILINGS.values()], ids=str)
@pytest.mark.parametrize("padding", [0, 1, 150])
def test_ragged_segments_follow_the_recurrence(padding, tiling, rng):
    c = case(rng, RAGGED, **HEADS, regime="resets", padding=padding, unlisted=2 * (padding > 1))
    gdn_cases.assert_right(computed(c, tiling), c)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 63, 64, 65, 160, 500, 1024, 1500])
def test_every_length_follows_the_recurrence(tokens, rng):
    c = case(rng, [Segment(tokens)], **HEADS)
    gdn_cases.assert_right(computed(c), c)


def test_nearly_parallel_keys_stay_accurate(rng):
    inputs = gdn_cases.draw(rng, 1000, 2, 128, "slow")
    k = rng.normal(size=inputs.k[:1].shape) + 0.05 * np.asarray(inputs.k, np.float32)
    k = np.asarray(jnp.asarray(k, jnp.bfloat16))
    inputs = inputs._replace(k=k, beta=np.full_like(inputs.beta, 0.95))
    c = case(rng, [Segment(1000)], **HEADS, inputs=inputs)
    gdn_cases.assert_right(computed(c), c, 2e-2)


@pytest.mark.parametrize("cut", [64, 448])
def test_a_run_cut_at_a_multiple_of_64_gives_the_same_bits(cut, rng):
    whole = case(rng, [Segment(500)], **HEADS)
    together = computed(whole)
    parts, initial = [], whole.initial
    for first, last in ((0, cut), (cut, 500)):
        inputs = type(whole.inputs)(*(x[first:last] for x in whole.inputs))
        part = case(rng, [Segment(last - first, first)], **HEADS, inputs=inputs)
        parts.append(computed(part._replace(initial=initial)))
        initial = parts[-1].final
    assert_same_bits(np.concatenate([part.o for part in parts]), together.o)
    assert_same_bits(parts[1].final, together.final)
    row = whole.boundaries.index((0, cut))
    assert_same_bits(parts[0].final[0], together.boundary[row])


def test_bits_depend_on_nothing_else_in_the_batch(rng):
    inputs = gdn_cases.draw(rng, 300, 2, 128)
    c = case(rng, [Segment(77, 0), Segment(223, 10)], **HEADS, inputs=inputs)
    together = computed(c)
    alone = case(rng, [Segment(223, 10)], **HEADS, inputs=type(inputs)(*(x[77:] for x in inputs)))
    out = computed(alone._replace(initial=c.initial[1:]))
    assert_same_bits(out.o, together.o[77:])
    assert_same_bits(out.final[0], together.final[1])


def test_a_long_run_among_short_ones_has_the_bits_it_has_alone():
    """It is walked while its chunks are being made, and those around it are."""
    lengths = 100, 8192, 64
    problem = delta_prefill.make(bench.GDN, delta_prefill.Shape(lengths))
    together = problem.runs["ours"]()
    together = together.result(together.call(*together.args))
    alone = delta_prefill.make(bench.GDN, delta_prefill.Shape(lengths[1:2])).runs["ours"]()
    *_, table = alone.args
    own = slice(lengths[0], sum(lengths[:2]))
    names = ("q", "k", "v", "g", "beta")
    inputs = [jnp.asarray(problem.inputs[name])[own] for name in names]
    initial = jnp.asarray(problem.inputs["initial"])[1:2]
    out = alone.result(alone.call(*inputs, initial, table))
    assert_same_bits(np.asarray(out["o"]), np.asarray(together["o"])[own])
    assert_same_bits(np.asarray(out["state"])[0], np.asarray(together["state"])[1])


@pytest.mark.parametrize("name", ["1x1024", "1x8192, a state every 1024", "8 ragged, 16384 in all"])
def test_real_shapes_repeat_their_bits_and_are_right(name):
    problem = delta_prefill.make(bench.GDN, delta_prefill.SHAPES[name])
    for run, make in problem.runs.items():
        if run == "xla":
            continue
        call = make()
        first = call.call(*call.args)
        for key, value in call.result(first).items():
            truth = np.asarray(problem.expected[key], np.float64)
            assert gdn_cases.rms_ratio(value, truth) <= gdn_cases.TOLERANCE
        differ = jnp.int32(0)
        for _ in range(1000 if name == "1x1024" else 100):
            again = call.call(*call.args)
            differ += sum(jnp.any(x != y) for x, y in zip(again, first, strict=True))
        assert int(differ) == 0
