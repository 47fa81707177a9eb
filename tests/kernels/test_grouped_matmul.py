"""Grouped products against float64, with empty groups and rows that belong to none."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pallas_kernels as pk
from pallas_kernels.grouped_matmul import GATHERED, tile_table, tiled
from tests.kernels import cases
from tests.kernels.grouped_cases import BF16, SIZES, TOLERANCE, assert_right, operands, truth

ROWS = 24
ALL, GROUPS = 200, 8
OPS = {"matmul": pk.grouped_matmul, "swiglu": pk.grouped_swiglu}
DTYPES = {"float32": np.float32, "bfloat16": BF16}


@functools.partial(jax.jit, static_argnames=("op", "impl"))
def run(x, w, sizes, *, op, impl):
    return OPS[op](x, w, sizes, impl=impl)


one_by_one = jax.jit(tiled)
table = jax.jit(tile_table, static_argnums=(1, 2, 3))


@pytest.mark.parametrize("impl", cases.IMPLS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_every_row_meets_its_own_matrix(sizes, dtype, op, impl):
    x, w = operands(np.random.default_rng(0), sizes, ROWS, 16, 8, DTYPES[dtype])
    y = run(x, w, np.array(sizes, np.int32), op=op, impl=impl)
    tolerance = 1e-6 if dtype == "float32" else TOLERANCE * (2 if op == "swiglu" else 1)
    assert y.dtype == x.dtype
    assert_right(y, truth(x, w, sizes, op == "swiglu"), sum(sizes), tolerance)


@pytest.mark.parametrize("rows", [1, 7, ROWS, 300])
@pytest.mark.parametrize("sizes", SIZES)
def test_tile_by_tile_is_the_same_product(sizes, rows):
    sizes = np.array(sizes) * rows // ROWS
    x, w = operands(np.random.default_rng(0), sizes, rows, 16, 8, np.float32)
    assert_right(one_by_one(x, w, sizes.astype(np.int32)), truth(x, w, sizes), sum(sizes), 1e-6)


@given(
    st.lists(
        st.one_of(st.just(0), st.integers(0, ALL // GROUPS)), min_size=GROUPS, max_size=GROUPS
    ),
    st.booleans(),
    st.sampled_from([(1, 1), (8, 1), (8, 8), (24, 8), (64, 8)]),
)
def test_tiles_cover_every_row_once_and_never_cross_a_group(sizes, full, grid):
    rows, align = grid
    if full:
        sizes[-1] += ALL - sum(sizes)
    count, tiles = (np.asarray(a) for a in table(np.array(sizes, np.int32), ALL, rows, align))
    group_of = np.repeat(np.arange(GROUPS + 1), [*sizes, ALL - sum(sizes)])
    covered = []
    assert count[0] <= len(tiles)
    for group, first, begin, end in tiles[: count[0]]:
        assert first % align == 0 and first <= begin < end <= first + rows
        assert (group_of[begin:end] == group).all()
        covered += range(begin, end)
    assert covered == list(range(ALL))


@pytest.mark.parametrize("width, together", [(512, 256), (8192, 16), (1 << 18, 1)])
@pytest.mark.parametrize("op", OPS)
def test_on_a_gpu_a_product_is_of_tiles_by_as_many_matrices_as_may_be_copied(op, width, together):
    spec = jax.ShapeDtypeStruct
    args = spec((2048, 256), jnp.bfloat16), spec((1024, 256, width), jnp.bfloat16)
    trace = run.trace(*args, spec((1024,), jnp.int32), op=op, impl="xla")
    text = trace.lower(lowering_platforms=("cuda",)).as_text()
    products = re.findall(r"stablehlo\.dot_general.*", text)
    assert len(products) == 1 and "ragged" not in text
    count = f"{together}x" if together > 1 else ""
    tiles, matrices = f"{count}8x256xbf16", f"{count}256x{width}xbf16"
    assert f"(tensor<{tiles}>, tensor<{matrices}>)" in products[0]


def test_tiles_together_need_no_more_memory_than_their_matrices():
    spec = jax.ShapeDtypeStruct
    args = spec((512, 2048), jnp.float32), spec((64, 2048, 4096), jnp.float32)
    compiled = one_by_one.lower(*args, spec((64,), jnp.int32)).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 2 * 512 * 4096 * 4 + 4 * GATHERED


def test_halves_of_an_odd_number_of_columns_are_refused():
    with pytest.raises(ValueError, match="5 columns are no two halves"):
        pk.grouped_swiglu(jnp.ones((2, 4)), jnp.ones((1, 4, 5)), jnp.array([2], jnp.int32))
