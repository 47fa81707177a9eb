"""The Hopper kernel of `grouped_matmul` and `grouped_swiglu`: interpreted on a CPU, and lowered for
CUDA at the shapes of both models."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mgpu import grouped_matmul as kernel
from pallas_kernels.mgpu.grouped_matmul import Tiling
from tests.kernels.grouped_cases import BF16, assert_right, operands, truth

pytestmark = pytest.mark.usefixtures("no_races")

OPS = {"matmul": kernel.grouped_matmul, "swiglu": kernel.grouped_swiglu}
EXPERTS = {"kimi": (256, 2304, 1024, 8), "qwen": (512, 2048, 512, 10)}
"""Experts, width of the model, width of an expert, experts a token."""
TOKENS = (1, 3, 256, 16384)

SMALL = Tiling(rows=8, stages=2)
WIDE = Tiling(rows=24, stages=3, warpgroups=2)
DEEP = Tiling(rows=16, columns=128, depth=128, stages=2)


def interpreted(op, sizes, rows, tiling, inner=256, outputs=256):
    """(y, truth) with three blocks, so that each takes several tiles and reuses every slot."""
    width = outputs * (2 if op == "swiglu" else 1)
    x, w = operands(np.random.default_rng(0), sizes, rows, inner, width, BF16)
    params = plgpu.InterpretGPUParams(detect_races=True)
    arrays = jnp.asarray(x), jnp.asarray(w), jnp.array(sizes, jnp.int32)
    y = OPS[op](*arrays, tiling=tiling, interpret=params)
    return y, truth(x, w, sizes, op == "swiglu")


@pytest.fixture
def few_blocks(monkeypatch):
    monkeypatch.setattr(kernel, "_SMS", 3)


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("few_blocks")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tiling", [SMALL, WIDE], ids=["small", "wide"])
def test_every_row_meets_its_own_matrix_without_races(op, tiling):
    sizes = (3, 0, 30, 1, 0)
    assert_right(*interpreted(op, sizes, 40, tiling), sum(sizes))


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("few_blocks")
@pytest.mark.parametrize(
    "sizes, rows", [((0, 0), 5), ((1, 0), 1), ((0, 10), 10)], ids=["none", "one row", "one group"]
)
def test_few_rows(sizes, rows):
    assert_right(*interpreted("matmul", sizes, rows, DEEP, inner=128), sum(sizes))


def lowered(op, tokens, model, tiling=None):
    experts, width, inner, top = EXPERTS[model]
    shape = (experts, width, 2 * inner) if op == "swiglu" else (experts, inner, width)
    spec = jax.ShapeDtypeStruct
    x, w = spec((tokens * top, shape[1]), jnp.bfloat16), spec(shape, jnp.bfloat16)
    trace = jax.jit(functools.partial(OPS[op], tiling=tiling)).trace(x, w, spec(shape[:1], "int32"))
    return trace.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("model", EXPERTS)
def test_both_models_lower_for_cuda_into_one_kernel(model, op, tokens):
    assert lowered(op, tokens, model).count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize("parts", [1, 2])
def test_a_tiling_fits_wherever_the_kernel_says_it_runs(parts):
    shapes = itertools.product((64, 192, 2304), (64, 128, 192, 512))
    for (inner, outputs), rows in itertools.product(shapes, (1, 100, 10_000, 1_000_000)):
        for groups in (4, 512):
            tiling = kernel.default_tiling(rows, groups, inner, outputs, parts)
            assert tiling.misfit(inner, outputs, parts) is None
            assert tiling.stages >= 2


@pytest.mark.parametrize(
    "shape, dtype, why",
    [
        ((2, 64, 128), jnp.float32, "takes bfloat16, not float32"),
        ((2, 32, 128), jnp.bfloat16, "multiples of 64"),
        ((2, 64, 96), jnp.bfloat16, "multiples of 64"),
    ],
)
def test_what_the_kernel_was_not_built_for_is_refused(shape, dtype, why):
    x, w = jnp.zeros((3, shape[1]), dtype), jnp.zeros(shape, dtype)
    assert why in (kernel.unfit(x, w, 1) or "")
    assert (
        kernel.unfit(jnp.zeros((3, 64), jnp.bfloat16), jnp.zeros((2, 64, 128), "bfloat16"), 1)
        is None
    )


def test_a_tiling_that_does_not_fit_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="bytes of shared memory"):
        lowered("swiglu", 32, "kimi", Tiling(rows=128, stages=8, warpgroups=2))
    with pytest.raises(ValueError, match="no multiple of steps"):
        lowered("matmul", 32, "qwen", Tiling(rows=8, columns=192))
