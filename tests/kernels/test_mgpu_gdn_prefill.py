"""The Hopper prefill of GDN without a Hopper: interpreted at small shapes, lowered at real ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels as pk
from pallas_kernels.bench import gdn_prefill as bench
from pallas_kernels.mgpu import gdn_prefill as kernel
from pallas_kernels.mgpu.gdn_work import Tiling
from tests.kernels import gdn_cases
from tests.kernels.cases import Segment, assert_same_bits
from tests.kernels.gdn_cases import case


def interpreted(c, tiling=kernel.DEFAULT, races=False):
    """Not jitted: the callbacks of two interpreted kernels in a program may wait for each other."""
    *args, keep = c.args()
    interpreter = plgpu.InterpretGPUParams(detect_races=races)
    out = kernel.prefill(*args, keep, len(c.table_boundaries()), tiling, interpreter)
    return pk.DeltaOut(*(np.asarray(x) for x in out))


@pytest.mark.timeout(180)
def test_ragged_segments_follow_the_recurrence_without_races(races):
    """But those between blocks, whose order the detector does not know, and of the loader's copies
    to a place that a thread has read: a barrier orders them, and the detector asks for a fence."""
    segments = [
        Segment(19, 45),
        Segment(64, 0, pk.ZERO),
        Segment(0),
        Segment(70, 3, pk.MERGE),
        Segment(1, 5),
    ]
    c = case(np.random.default_rng(0), segments, regime="resets", padding=10, unlisted=1)
    gdn_cases.assert_right(interpreted(c, Tiling(2, 2, parts=2), races=True), c)
    within = {race.write.split(".")[0] for race in races() if race.shared}
    assert within <= {"_load_chunks"}


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("regime", gdn_cases.REGIMES)
def test_every_regime_follows_the_recurrence(regime):
    c = case(np.random.default_rng(1), [Segment(130)], values=128, regime=regime)
    gdn_cases.assert_right(interpreted(c), c)


@pytest.mark.timeout(180)
def test_a_run_cut_at_a_multiple_of_64_gives_the_same_bits():
    rng = np.random.default_rng(2)
    whole = case(rng, [Segment(100)])
    together = interpreted(whole)
    gdn_cases.assert_right(together, whole)
    head, tail = (
        kernel.prefill(
            *(jnp.asarray(x[part]) for x in whole.inputs),
            jnp.asarray(initial),
            pk.chunk_table(
                [length],
                [start],
                [pk.SLOT],
                [],
                num_tokens=length,
                num_segments=1,
                num_chunks=1,
                num_boundaries=0,
            ),
            None,
            0,
            interpret=plgpu.InterpretGPUParams(),
        )
        for part, length, start, initial in (
            (slice(64), 64, 0, whole.initial),
            (slice(64, 100), 36, 64, together.boundary[:1]),
        )
    )
    assert_same_bits(head.final, together.boundary[:1])
    assert_same_bits(np.concatenate([head.o, tail.o]), together.o)
    assert_same_bits(tail.final, together.final)


@pytest.mark.parametrize(
    "tokens, segments, heads, tiling",
    [
        (16384, 8, 32, kernel.DEFAULT),
        (1000, 3, 4, kernel.DEFAULT),
        *((8192, 1, 32, tiling) for tiling in bench.TILINGS.values()),
    ],
)
def test_the_kernel_lowers_at_real_shapes(tokens, segments, heads, tiling):
    spec, chunks = jax.ShapeDtypeStruct, tokens // 64 + segments
    keys, values = ((tokens, n, 128) for n in (heads // 2, heads))
    column = spec((chunks,), jnp.int32)
    table = pk.ChunkTable(*[column] * 7, spec((segments + 1,), jnp.int32))
    args = (
        *(spec(shape, jnp.bfloat16) for shape in (keys, keys, values)),
        *[spec(values[:2], jnp.float32)] * 2,
        spec((segments, heads, 128, 128), jnp.float32),
        table,
    )
    traced = jax.jit(lambda *args: kernel.prefill(*args, None, 4, tiling)).trace(*args)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1


def test_what_was_not_tested_is_refused_with_its_reason():
    c = case(np.random.default_rng(3), [Segment(5)], values=128)
    q, k, v, g, _, initial, table, _ = c.args()
    assert kernel.unfit(q, k, v, g, initial, table) is None
    refused = {
        "channel": (q, k, v, jnp.ones((5, 2, 128)), initial, table),
        "float32": (q.astype(jnp.float32), k, v, g, initial, table),
        "wide": (q[..., :64], k[..., :64], v, g, initial, table),
        "heads": (q, k, v[:, :1], g[:, :1], initial, table),
        "empty": (q, k, v, g, initial[:0], table),
    }
    for word, args in refused.items():
        assert word in (kernel.unfit(*args) or "")
