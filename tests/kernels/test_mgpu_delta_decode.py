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
from pallas_kernels.mgpu.delta_tile import Tiling
from tests.kernels import step_cases
from tests.kernels.cases import KINDS, assert_same_bits, distance

pytestmark = pytest.mark.usefixtures("no_races")

# Straight to registers or through shared memory; columns whole, split, split finely.
DECODE = (Tiling(32, 0, "registers"), Tiling(64, 0), Tiling(64, 1), Tiling(128, 0), Tiling(128, 1))
GROUP = {"kda": 1, "gdn": 2}
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize(
    ("kind", "tiling"), [("kda", t) for t in DECODE] + [("gdn", t) for t in DECODE[::2]]
)
@pytest.mark.timeout(120)
def test_interpreted_decode_equals_the_oracle_and_leaves_other_slots_alone(kind, tiling):
    case = step_cases.decode_case(np.random.default_rng(0), kind, 2, 4, GROUP[kind])
    run = jax.jit(partial(kernel.decode, layer=1, tiling=tiling, interpret=interpreter()))
    pool, o = run(*case.tokens, case.pool, case.slots)
    step_cases.check_decode(case, pool, o, layer=1)


@every_kind
@pytest.mark.parametrize("tiling", bench.STEP, ids=str)
@pytest.mark.timeout(120)
def test_interpreted_step_equals_its_parts(kind, tiling):
    case = step_cases.step_case(np.random.default_rng(1), kind, 2, 3, GROUP[kind])
    run = jax.jit(partial(kernel.step, layer=0, eps=1e-5, tiling=tiling, interpret=interpreter()))
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
    run = jax.jit(partial(kernel.step, layer=0, eps=1e-5, interpret=interpreter()))
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
def test_decode_lowers_for_both_models_with_the_pool_in_place(kind, heads, key_heads, batch):
    args = step_cases.decode_specs(kind, heads, key_heads, batch)
    text = lowered(partial(kernel.decode, layer=3), args)
    assert "output_operand_alias" in text and text.count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize("batch", [1, 256])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(("kind", "heads", "key_heads"), SHAPES)
def test_step_lowers_for_both_models_with_the_pool_in_place(kind, heads, key_heads, batch, dtype):
    args = step_cases.step_specs(kind, heads, key_heads, batch, dtype)
    text = lowered(partial(kernel.step, layer=3, eps=1e-6), args)
    assert "output_operand_alias" in text and text.count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize("tiling", sorted({*bench.SMALL, *bench.LARGE}, key=str), ids=str)
def test_every_benchmarked_tiling_of_decode_lowers(tiling):
    args = step_cases.decode_specs("kda", 32, 32, 64)
    lowered(partial(kernel.decode, layer=3, tiling=tiling), args)


@pytest.mark.parametrize("tiling", bench.STEP, ids=str)
def test_every_benchmarked_tiling_of_a_step_lowers(tiling):
    args = step_cases.step_specs("kda", 32, 32, 64, jnp.bfloat16)
    lowered(partial(kernel.step, layer=3, eps=1e-6, tiling=tiling), args)


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
        Tiling(48, 0)
    with pytest.raises(ValueError, match="stages=2 is neither"):
        Tiling(32, 2)
    with pytest.raises(ValueError, match="needs the tile in registers too"):
        Tiling(32, 1, "registers")
    args = step_cases.step_specs("kda", 4, 4, 1, jnp.bfloat16)
    for tiling, reason in (
        (Tiling(64, 0), "spans all 128 columns"),
        (Tiling(128, 0, "registers"), "computed once a channel"),
    ):
        with pytest.raises(ValueError, match=reason):
            jax.eval_shape(partial(kernel.step, layer=0, eps=1e-6, tiling=tiling), *args)


def test_what_the_kernel_was_not_built_for_is_refused(monkeypatch):
    monkeypatch.setattr(kernel, "no_hopper", lambda: None)
    *tokens, pool, slots = step_cases.decode_specs("kda", 4, 4, 2)
    assert kernel.refuses_decode(*tokens, pool, slots, 0) is None
    small = jax.ShapeDtypeStruct((*pool.shape[:3], 64, 128), pool.dtype)
    half = [jax.ShapeDtypeStruct(x.shape, jnp.float16) for x in tokens]
    mixed = [jax.ShapeDtypeStruct(tokens[0].shape, jnp.float32), *tokens[1:]]
    for arrays, states, reason in (
        (tokens, small, "built for (128, 128)"),
        (half, pool, "float16"),
        (mixed, pool, "built for one dtype"),
    ):
        assert reason in str(kernel.refuses_decode(*arrays, states, slots, 0))
    *tokens, pool, slots = step_cases.step_specs("gdn", 4, 2, 2, jnp.bfloat16)
    assert kernel.refuses_step(*tokens, pool, slots, 0, 1e-6) is None
    assert "built for (128, 128)" in str(kernel.refuses_step(*tokens, small, slots, 0, 1e-6))


def test_the_moved_bytes_of_the_benchmark_are_dominated_by_states():
    states = 64 * 2 * 32 * 128 * 128 * 4
    assert states < bench.moved_bytes("gdn", 64) < bench.moved_bytes("kda", 64) < 1.02 * states
    assert math.isclose(states / bench.moved_bytes("kda", 64), 0.9886, rel_tol=1e-3)
