"""The Hopper kernels of KDA's prefill: interpreted on a CPU, lowered for CUDA at real shapes."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels as pk
from pallas_kernels.chunks import ChunkTable
from pallas_kernels.mgpu import kda_prefill as kernel
from pallas_kernels.mgpu.kda_walk import Tiling
from tests.kernels import cases, kda_cases
from tests.kernels.cases import Segment

TIGHT, ROOMY = Tiling(1, 1, 1, prep_blocks=2), Tiling(3, 2, 1)
BUCKET = {"tokens": 160, "chunks": 9, "boundaries": 4}
# What lies on the other side of a diagonal overflows, and is selected away.
pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]

# The interpreter keeps a host thread of XLA's pool for every warpgroup that waits. With two, two of
# our three warpgroups may wait for ever for the third, which finds none to run on.
interpretable = pytest.mark.skipif(
    int(os.environ.get("NPROC") or os.cpu_count() or 1) < 4,
    reason="three interpreted warpgroups need four host threads: set NPROC=8",
)


def interpreted(b: kda_cases.Batch, tiling=TIGHT, races=False) -> pk.DeltaOut:
    """In a bucket with room to spare, whose padding tokens hold NaN."""
    inputs = (jnp.asarray(x) for x in cases.pad(b.inputs, BUCKET["tokens"]))
    return kernel.prefill(
        *inputs,
        jnp.asarray(b.initial),
        b.table(**BUCKET),
        jnp.asarray(b.keep),
        BUCKET["boundaries"],
        tiling=tiling,
        interpret=plgpu.InterpretGPUParams(detect_races=races),
    )


@interpretable
def test_ragged_segments_follow_the_recurrence():
    """Every start mode, empty segments and one of a token; a run long enough to reuse the rings."""
    segments = [
        Segment(70, 45, pk.ZERO),
        Segment(0, 64, pk.MERGE),
        Segment(1, 3, pk.SLOT),
        Segment(0, 0, pk.SLOT),
        Segment(65, 63, pk.MERGE),
    ]
    b = kda_cases.batch(np.random.default_rng(0), "resets", segments, heads=1, rows=6)
    kda_cases.assert_right(interpreted(b), b)


@interpretable
def test_a_single_segment_needs_neither_masks_nor_boundaries():
    b = kda_cases.batch(np.random.default_rng(3), "kimi", [Segment(70)], heads=1)
    b = b._replace(boundaries=[], keep=np.ones_like(b.keep))
    run = functools.partial(kernel.prefill, interpret=plgpu.InterpretGPUParams())
    table, initial = b.table(tokens=70, chunks=3, boundaries=0), jnp.asarray(b.initial)
    out = run(*map(jnp.asarray, b.inputs), initial, table, None, 0)
    kda_cases.assert_right(out, b)


@interpretable
@pytest.mark.slow
def test_no_two_threads_race(races):
    """The detector asks for a fence of proxies between a thread's read and the next copy to the
    place; a barrier orders them."""
    b = kda_cases.batch(np.random.default_rng(1), "kimi", [Segment(150)], heads=1)
    kda_cases.assert_right(interpreted(b, races=True), b)
    assert {race.write for race in races()} <= {"_load_chunks.<locals>.load"}


@interpretable
@pytest.mark.slow
@pytest.mark.parametrize("regime", kda_cases.REGIMES)
def test_every_regime_stays_near_the_recurrence(regime):
    b = kda_cases.batch(np.random.default_rng(2), regime, [Segment(150, 45)], heads=1)
    parallel = regime == "parallel keys"
    tolerance = kda_cases.PARALLEL_TOLERANCE if parallel else kda_cases.TOLERANCE
    kda_cases.assert_right(interpreted(b, ROOMY), b, tolerance)


def specs(tokens, segments, boundaries, heads=32):
    spec = jax.ShapeDtypeStruct
    x = spec((tokens, heads, 128), jnp.bfloat16)
    column = spec((tokens // 64 + segments,), jnp.int32)
    table = ChunkTable(*[column] * 7, spec((segments + 1,), jnp.int32))
    decay, states = spec(x.shape, jnp.float32), spec((segments, heads, 128, 128), jnp.float32)
    beta, keep = spec(x.shape[:2], jnp.bfloat16), spec((heads, 128), jnp.bool_)
    return x, x, x, decay, beta, states, table, keep, boundaries


@pytest.mark.parametrize(
    ("tokens", "segments"),
    [(1024, 1), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((64, 1), (16384, 8)))],
)
def test_real_shapes_lower_for_cuda_into_two_kernels(tokens, segments):
    *args, boundaries = specs(tokens, segments, 4)
    run = functools.partial(kernel.prefill, num_boundaries=boundaries)
    text = jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2


def test_tilings_fit_into_shared_memory():
    for tiling in (Tiling(), TIGHT, ROOMY):
        assert tiling.shared_bytes <= 226 * 1024


@pytest.mark.parametrize(
    ("position", "change", "why"),
    [
        (3, lambda x: x[..., 0], "per key channel"),
        (0, lambda x: x.astype(jnp.float32), "not bfloat16"),
        (2, lambda x: jnp.repeat(x, 2, axis=1), "value heads"),
        (2, lambda x: x[..., :64], "built for 128"),
        (5, lambda x: x[:0], "no token, segment or chunk"),
    ],
)
def test_what_the_kernel_was_not_built_for_is_refused(position, change, why):
    args = list(specs(64, 1, 1, heads=2))
    assert kernel.unfit(*args) is None
    args[position] = jax.eval_shape(change, args[position])
    assert why in (kernel.unfit(*args) or "")
