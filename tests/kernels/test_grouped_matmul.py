"""Grouped products against one einsum, with empty groups and rows that belong to none."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from tests.kernels import cases

ROWS = 24


@functools.partial(jax.jit, static_argnames="impl")
def product(x, w, sizes, *, impl):
    return pk.grouped_matmul(x, w, sizes, impl=impl)


@pytest.mark.parametrize("impl", cases.IMPLS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "sizes", [[6, 6, 6, 6], [0, 24, 0, 0], [0, 5, 0, 7], [1, 0, 22, 1], [0, 0, 0, 0], [0, 0, 0, 24]]
)
def test_every_row_meets_its_own_matrix(sizes, dtype, impl):
    rng = np.random.default_rng(0)
    x, w = (
        jnp.asarray(rng.normal(size=(ROWS, 16)), dtype),
        jnp.asarray(rng.normal(size=(4, 16, 8)), dtype),
    )
    real = sum(sizes)
    x = x.at[real:].set(jnp.nan)
    y = np.asarray(product(x, w, np.array(sizes, np.int32), impl=impl), np.float64)
    one_hot = np.repeat(np.eye(4), sizes, axis=0)
    truth = np.einsum("mk,gkn,mg->mn", *(np.asarray(a, np.float64) for a in (x[:real], w)), one_hot)
    tolerance = 1e-6 if dtype == jnp.float32 else 4e-3
    assert y.shape == (ROWS, 8)
    np.testing.assert_allclose(y[:real], truth, rtol=tolerance, atol=tolerance)
    assert not y[real:].any()
