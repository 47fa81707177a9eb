"""Paged attention in plain JAX against a float64 softmax."""

import functools

import jax
import numpy as np
import pytest

import pallas_kernels as pk
from tests.kernels import cases
from tests.kernels.attention_cases import KINDS, RAGGED, assert_right, problem, prompts


@functools.partial(jax.jit, static_argnames=("layer", "width", "scale", "impl"))
def _attend(q, arrays, table, lengths, *, layer, width, scale, impl):
    cache = pk.PagedRows(arrays[0], arrays[-1], layer, width)
    return pk.paged_attention_decode(q, cache, table, lengths, scale=scale, impl=impl)


def attend(p, impl, rows=slice(None), table=None):
    table = p.table if table is None else table
    cache = p.rows()
    return _attend(
        p.q[rows],
        p.arrays,
        table[rows],
        p.lengths[rows],
        layer=cache.layer,
        width=p.width,
        scale=p.scale,
        impl=impl,
    )


@pytest.mark.parametrize("impl", cases.IMPLS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_ragged_requests_see_their_keys_and_nothing_else(kind, dtype, impl):
    p = problem(kind, dtype=dtype)
    assert_right(attend(p, impl), p)


@pytest.mark.parametrize("kind", KINDS)
def test_bits_depend_on_neither_the_batch_nor_the_width_of_the_table(kind):
    p = problem(kind)
    together = np.asarray(attend(p, "xla"))
    for b in range(len(RAGGED)):
        cases.assert_same_bits(attend(p, "xla", slice(b, b + 1)), together[b : b + 1])
    wide = np.pad(p.table, ((0, 0), (0, 5)))
    cases.assert_same_bits(attend(p, "xla", table=wide), together)


@pytest.mark.parametrize("impl", cases.IMPLS)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_prompts_see_their_own_request_up_to_themselves(kind, impl):
    p = prompts(kind, [(70, 0), (3, 62), (0, 0), (1, 128)], 80)
    cache = p.pages.rows()

    @jax.jit
    def run(q, arrays, page_table, positions, table):
        rows = pk.PagedRows(arrays[0], arrays[-1], cache.layer, cache.width)
        return pk.paged_attention_prefill(
            q, rows, page_table, positions, table, scale=p.pages.scale, impl=impl
        )

    assert_right(run(p.q, p.pages.arrays, p.pages.table, p.positions, p.table), p)
