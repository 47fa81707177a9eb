"""KDA's prefill on a Hopper GPU: near the recurrence under any gate, and the same bits always."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels.mgpu import kda_prefill as kernel
from pallas_kernels.mgpu.kda_walk import Tiling
from tests.kernels import cases, kda_cases
from tests.kernels.cases import Segment

pytestmark = pytest.mark.device

HEADS, ROWS = 4, 8
BUCKET = {"tokens": 1216, "chunks": 32, "boundaries": 24}
TILINGS = (Tiling(2, 2, 2, prep_blocks=8), Tiling(3, 2, 1, prep_blocks=50), Tiling(1, 1, 1))


@pytest.fixture
def rng():
    return np.random.default_rng()


@functools.partial(jax.jit, static_argnames=("tiling", "boundaries"))
def run(q, k, v, g, beta, initial, table, keep, *, boundaries, tiling=None):
    if tiling is None:
        return pk.delta_prefill(
            q, k, v, g, beta, initial, table, keep=keep, num_boundaries=boundaries, impl="mosaic"
        )
    return kernel.prefill(q, k, v, g, beta, initial, table, keep, boundaries, tiling=tiling)


@functools.partial(jax.jit, static_argnames="boundaries")
def truth(q, k, v, g, beta, initial, table, keep, *, boundaries):
    return pk.delta_prefill(
        q, k, v, g, beta, initial, table, keep=keep, num_boundaries=boundaries, impl="xla"
    )


def arguments(b: kda_cases.Batch, bucket=BUCKET):
    """In a bucket whose padding tokens hold NaN."""
    table = pk.ChunkTable(*(jnp.asarray(x) for x in b.table(**bucket)))
    inputs = [jnp.asarray(x) for x in cases.pad(b.inputs, bucket["tokens"])]
    return (*inputs, jnp.asarray(b.initial), table, jnp.asarray(b.keep))


def poison(*arrays):
    """Free memory that holds NaN, where the next outputs and temporaries are likely to be put."""
    for x in arrays:
        jax.block_until_ready(jnp.full(x.shape, jnp.nan, jnp.float32))


def prefill(b: kda_cases.Batch, tiling=None) -> pk.DeltaOut:
    args = arguments(b)
    poison(args[0], args[5], args[0])
    return run(*args, boundaries=BUCKET["boundaries"], tiling=tiling)


def ragged(rng, regime="kimi"):
    segments = [
        Segment(301, 45, pk.ZERO),
        Segment(0, 64, pk.MERGE),
        Segment(1, 3),
        Segment(0, 0),
        Segment(65, 63, pk.MERGE),
        Segment(448, 128, pk.SLOT),
        Segment(17, 0, pk.ZERO),
    ]
    return kda_cases.batch(rng, regime, segments, HEADS, ROWS)


@pytest.mark.parametrize("tiling", [None, *TILINGS], ids=str)
def test_every_tiling_follows_the_recurrence_through_ragged_segments(tiling, rng):
    b = ragged(rng)
    kda_cases.assert_right(prefill(b, tiling), b)


@pytest.mark.parametrize("regime", kda_cases.REGIMES)
def test_every_regime_stays_near_the_recurrence(regime, rng):
    b = kda_cases.batch(rng, regime, [Segment(1000)], HEADS, ROWS)
    parallel = regime == "parallel keys"
    tolerance = kda_cases.PARALLEL_TOLERANCE if parallel else kda_cases.TOLERANCE
    kda_cases.assert_right(prefill(b), b, tolerance)
    b = ragged(rng, regime)
    kda_cases.assert_right(prefill(b), b, tolerance)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 160, 500])
def test_every_length(length, rng):
    b = kda_cases.batch(rng, "kimi", [Segment(length)], HEADS, ROWS)
    kda_cases.assert_right(prefill(b), b)


@pytest.mark.parametrize(
    ("tokens", "lengths"),
    [(1, [1]), (1024, [1024]), (8192, [8192]), (16384, [2048] * 8), (4096, [1300, 547, 0, 1963])],
)
def test_real_shapes_follow_the_float32_form(tokens, lengths, rng):
    segments = [Segment(length) for length in lengths]
    b = kda_cases.batch(rng, "kimi", segments, heads=32)
    bucket = {
        "tokens": tokens,
        "chunks": tokens // 64 + len(lengths) + 1,
        "boundaries": max(1, len(b.boundaries)),
    }
    args, boundaries = arguments(b, bucket), bucket["boundaries"]
    expected = truth(*args, boundaries=boundaries)
    for got, want in zip(run(*args, boundaries=boundaries), expected, strict=True):
        assert bool(jnp.all(jnp.isfinite(got)))
        error = jnp.linalg.norm(got - want)
        assert float(error) <= kda_cases.TOLERANCE * float(jnp.linalg.norm(want))


def test_a_single_segment_needs_neither_masks_nor_boundaries(rng):
    b = kda_cases.batch(rng, "kimi", [Segment(1000)], HEADS)
    b = b._replace(boundaries=[], keep=np.ones_like(b.keep))
    *args, _ = arguments(b, {"tokens": 1024, "chunks": 17, "boundaries": 0})
    poison(args[0], args[5], args[0])
    kda_cases.assert_right(run(*args, None, boundaries=0), b)


@pytest.mark.parametrize("start", [0, 45])
def test_a_run_cut_on_the_grid_has_the_bits_of_the_whole(start, rng):
    whole = kda_cases.batch(rng, "kimi", [Segment(500, start)], HEADS, ROWS)
    out = prefill(whole)
    for row, (_, position) in enumerate(whole.boundaries):
        first = position - start
        head = whole._replace(
            inputs=cases.cut(whole.inputs, 0, first),
            segments=[Segment(first, start)],
            boundaries=[],
        )
        stopped = prefill(head)
        cases.assert_same_bits(out.boundary[row], stopped.final[0])
        cases.assert_same_bits(out.o[:first], stopped.o[:first])
        initial = np.array(whole.initial)
        initial[0] = stopped.final[0]
        tail = whole._replace(
            inputs=cases.cut(whole.inputs, first, 500),
            segments=[Segment(500 - first, position)],
            boundaries=[],
            initial=initial,
        )
        resumed = prefill(tail)
        cases.assert_same_bits(out.final[0], resumed.final[0])
        cases.assert_same_bits(out.o[first:500], resumed.o[: 500 - first])


def test_what_else_is_packed_changes_no_bit(rng):
    b = ragged(rng)
    out, token = prefill(b), 0
    for index, segment in enumerate(b.segments):
        end = token + segment.length
        if segment.mode != pk.MERGE:
            initial = np.array(b.initial)
            initial[0] = b.initial[index]
            alone = b._replace(
                inputs=cases.cut(b.inputs, token, end),
                segments=[segment],
                boundaries=[],
                initial=initial,
            )
            own = prefill(alone)
            cases.assert_same_bits(own.o[: segment.length], out.o[token:end])
            cases.assert_same_bits(own.final[0], out.final[index])
        token = end


def test_tilings_agree_bit_for_bit(rng):
    b = ragged(rng, "mixed")
    first, *others = (prefill(b, tiling) for tiling in TILINGS)
    for other in others:
        for value, same in zip(first, other, strict=True):
            cases.assert_same_bits(value, same)


@pytest.mark.parametrize("heads", [HEADS, 32])
def test_a_thousand_repeats_give_the_same_bits(heads, rng):
    b = ragged(rng)
    if heads != HEADS:
        b = kda_cases.batch(rng, "kimi", b.segments, heads, ROWS)
    args = arguments(b)
    first = run(*args, boundaries=BUCKET["boundaries"])
    same = jax.jit(lambda a, b: jnp.stack([jnp.all(a[i] == b[i]) for i in range(3)]).all())
    results = [same(first, run(*args, boundaries=BUCKET["boundaries"])) for _ in range(1000)]
    assert all(bool(result) for result in results)
