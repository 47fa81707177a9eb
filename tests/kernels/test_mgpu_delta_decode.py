"""The Hopper decode kernel without a Hopper: interpreted at small shapes, lowered at real ones."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels as pk
from pallas_kernels.bench import delta_decode as bench
from pallas_kernels.mgpu import delta_decode as kernel
from pallas_kernels.mgpu import delta_tile
from pallas_kernels.mgpu.common import LANE
from pallas_kernels.mgpu.delta_tile import Tiling
from tests.kernels import step_cases
from tests.kernels.cases import KINDS, assert_same_bits, distance

SHARED_MEMORY = 227 * 1024
RESERVED = 1024  # of every thread block, by the driver

# Straight to registers; a ring refilled behind its copies out; a ring of one; split columns.
INTERPRETED = (Tiling(128, 0, 0), Tiling(128, 3, 1), Tiling(64, 1, 1), Tiling(32, 4, 1))
GROUP = {"kda": 1, "gdn": 2}
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def one_sm(monkeypatch):
    """All tiles go through few thread blocks, so that rings are refilled."""
    monkeypatch.setattr(delta_tile, "SMS", 1)


@pytest.mark.parametrize(
    ("kind", "tiling"), [("kda", t) for t in INTERPRETED] + [("gdn", t) for t in INTERPRETED[1::2]]
)
@pytest.mark.timeout(120)
def test_interpreted_decode_equals_the_oracle_and_leaves_other_slots_alone(kind, tiling):
    case = step_cases.decode_case(np.random.default_rng(0), kind, 2, 4, GROUP[kind])
    run = jax.jit(lambda *args: kernel.decode(*args, 1, tiling=tiling, interpret=interpreter()))
    pool, o = run(*case.tokens, case.pool, case.slots)
    step_cases.check_decode(case, pool, o, layer=1)


@every_kind
@pytest.mark.parametrize("tiling", INTERPRETED[:2], ids=str)
@pytest.mark.timeout(120)
def test_interpreted_step_equals_its_parts(kind, tiling):
    case = step_cases.step_case(np.random.default_rng(1), kind, 2, 3, GROUP[kind])
    run = jax.jit(lambda *args: kernel.step(*args, 0, 1e-5, tiling=tiling, interpret=interpreter()))
    pool, y = run(*case.tokens, case.pool, case.slots)
    parts = jax.jit(partial(pk.delta_step, layer=0, eps=1e-5, impl="reference"))
    expected, y_expected = parts(*case.tokens, case.pool, case.slots)
    assert distance(y, np.asarray(y_expected)) <= 2e-6
    assert distance(pool, np.asarray(expected)) <= 2e-6
    assert_same_bits(pool[1], case.pool[1])


@every_kind
@pytest.mark.timeout(120)
def test_interpreted_step_in_bfloat16_equals_its_parts(kind):
    case = step_cases.step_case(np.random.default_rng(2), kind, 2, 2, GROUP[kind], jnp.bfloat16)
    run = jax.jit(lambda *args: kernel.step(*args, 0, 1e-5, interpret=interpreter()))
    pool, y = run(*case.tokens, case.pool, case.slots)
    parts = jax.jit(partial(pk.delta_step, layer=0, eps=1e-5, impl="reference"))
    expected, y_expected = parts(*case.tokens, case.pool, case.slots)
    assert y.dtype == jnp.bfloat16
    assert distance(pool, np.asarray(expected)) <= 2e-6
    assert distance(y, np.asarray(y_expected, np.float64)) <= 1e-2


def interpreter():
    return plgpu.InterpretGPUParams(detect_races=True)


SHAPES = [  # value heads, key heads: both models, whole and one of eight ranks
    ("kda", 32, 32),
    ("kda", 4, 4),
    ("gdn", 32, 16),
    ("gdn", 4, 2),
]


@pytest.mark.parametrize("batch", [1, 8, 256])
@pytest.mark.parametrize(("kind", "heads", "key_heads"), SHAPES)
def test_decode_lowers_for_both_models_with_the_pool_in_place(
    kind, heads, key_heads, batch, monkeypatch
):
    monkeypatch.setattr(delta_tile, "SMS", 132)
    args = step_cases.decode_specs(kind, heads, key_heads, batch)
    text = lowered(lambda *args: kernel.decode(*args, 3), args)
    assert "output_operand_alias" in text and text.count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(("kind", "heads", "key_heads"), SHAPES)
def test_step_lowers_for_both_models_with_the_pool_in_place(
    kind, heads, key_heads, batch, dtype, monkeypatch
):
    monkeypatch.setattr(delta_tile, "SMS", 132)
    args = step_cases.step_specs(kind, heads, key_heads, batch, dtype)
    text = lowered(lambda *args: kernel.step(*args, 3, 1e-6), args)
    assert "output_operand_alias" in text and text.count("mosaic_gpu_v2") == 1


TILINGS = sorted({*bench.SMALL, *bench.LARGE, *bench.STEP}, key=str)


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_every_benchmarked_tiling_lowers_and_fits_into_an_sm(tiling, monkeypatch):
    monkeypatch.setattr(delta_tile, "SMS", 132)
    args = step_cases.decode_specs("kda", 32, 32, 64)
    lowered(lambda *args: kernel.decode(*args, 3, tiling=tiling), args)
    assert max(1, tiling.ctas_per_sm) * (shared_bytes(tiling) + RESERVED) <= SHARED_MEMORY


def shared_bytes(tiling: Tiling) -> int:
    """Of a thread block: the ring of tiles with barriers, four vectors, room for reductions."""
    ring = tiling.stages * (128 * tiling.block_v * 4 + 64)
    return ring + 4 * 128 * 4 + LANE.reduction_scratch_bytes


def lowered(function, args) -> str:
    donated = len(args) - 2
    return (
        jax.jit(function, donate_argnums=donated)
        .trace(*args)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )


def test_tilings_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="block_v=48 is none of"):
        Tiling(48)
    with pytest.raises(ValueError, match="ctas_per_sm=0"):
        Tiling(32, 0, 1)
    args = step_cases.step_specs("kda", 4, 4, 1, jnp.bfloat16)
    with pytest.raises(ValueError, match="spans all 128 columns"):
        jax.eval_shape(lambda *args: kernel.step(*args, 0, 1e-6, tiling=Tiling(64)), *args)


def test_what_the_kernel_was_not_built_for_is_refused(monkeypatch):
    monkeypatch.setattr(kernel, "no_hopper", lambda: None)
    *tokens, pool, slots = step_cases.decode_specs("kda", 4, 4, 2)
    assert kernel.refuses_decode(*tokens, pool, slots, 0) is None
    small = jax.ShapeDtypeStruct((*pool.shape[:3], 64, 128), pool.dtype)
    assert "built for (128, 128)" in kernel.refuses_decode(*tokens, small, slots, 0)
    half = [jax.ShapeDtypeStruct(x.shape, jnp.float16) for x in tokens]
    assert "float16" in kernel.refuses_decode(*half, pool, slots, 0)
    mixed = [jax.ShapeDtypeStruct(tokens[0].shape, jnp.float32), *tokens[1:]]
    assert "built for one dtype" in kernel.refuses_decode(*mixed, pool, slots, 0)
    *tokens, pool, slots = step_cases.step_specs("gdn", 4, 2, 2, jnp.bfloat16)
    assert kernel.refuses_step(*tokens, pool, slots, 0, 1e-6) is None
    assert "built for (128, 128)" in kernel.refuses_step(*tokens, small, slots, 0, 1e-6)


def test_the_moved_bytes_of_the_benchmark_are_dominated_by_states():
    states = 64 * 2 * 32 * 128 * 128 * 4
    assert states < bench.moved_bytes("gdn", 64) < bench.moved_bytes("kda", 64) < 1.02 * states
    assert math.isclose(states / bench.moved_bytes("kda", 64), 0.9886, rel_tol=1e-3)
