"""The Hopper kernel of paged attention on a GPU, at the shapes of both models."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from tests.kernels import cases
from tests.kernels.attention_cases import KINDS, LAYER, RAGGED, assert_right, problem, prompts

pytestmark = pytest.mark.device

LONG = (0, 1, 63, 64, 65, 1023, 1024, 1025, 2048, 4097, 5000, 8192)


@functools.partial(jax.jit, static_argnames=("width", "scale", "impl"))
def _attend(q, arrays, table, lengths, *, width, scale, impl):
    cache = pk.PagedRows(arrays[0], arrays[-1], LAYER, width)
    return pk.paged_attention_decode(q, cache, table, lengths, scale=scale, impl=impl)


def attend(p, impl="mosaic"):
    table, lengths = jnp.asarray(p.table), jnp.asarray(p.lengths)
    return _attend(p.q, p.arrays, table, lengths, width=p.width, scale=p.scale, impl=impl)


@pytest.mark.parametrize("lengths, pages", [(RAGGED, 4), (LONG, 128)], ids=["short", "long"])
@pytest.mark.parametrize("kind", KINDS)
def test_ragged_requests_see_their_keys_and_nothing_else(kind, lengths, pages):
    for seed in range(3):
        p = problem(kind, lengths, pages, seed=seed)
        assert_right(attend(p), p)


@pytest.mark.parametrize("kind", KINDS)
def test_many_requests_in_random_order_are_right(kind):
    rng = np.random.default_rng(0)
    p = problem(kind, tuple(rng.integers(0, 700, size=150)), 12)
    assert_right(attend(p), p)


@pytest.mark.parametrize("kind", KINDS)
def test_large_scores_and_equal_scores_stay_finite(kind):
    p = problem(kind, (1, 130, 640), 10)
    for factor in (0.0, 30.0):
        scaled = p._replace(q=p.q * factor)
        ours, xla = attend(scaled), attend(scaled, "reference")
        np.testing.assert_allclose(ours, xla, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_bits_depend_on_neither_other_requests_nor_the_width_of_the_table(kind):
    p = problem(kind, LONG, 128)
    together = np.asarray(attend(p))
    for b in range(len(LONG)):
        alone = p._replace(lengths=np.where(np.arange(len(LONG)) == b, p.lengths, 0))
        cases.assert_same_bits(np.asarray(attend(alone))[b], together[b])
    wide = p._replace(table=np.pad(p.table, ((0, 0), (0, 300))))
    cases.assert_same_bits(attend(wide), together)


@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_runs_give_the_same_bits(kind):
    p = problem(kind, LONG, 128)
    first = attend(p)
    same = jax.jit(lambda a, b: jnp.array_equal(a, b))
    assert all(bool(same(attend(p), first)) for _ in range(1000))


@functools.partial(jax.jit, static_argnames=("width", "scale", "impl"))
def _prefill(q, arrays, pages, positions, table, *, width, scale, impl):
    cache = pk.PagedRows(arrays[0], arrays[-1], LAYER, width)
    return pk.paged_attention_prefill(q, cache, pages, positions, table, scale=scale, impl=impl)


def prefill(p, impl="mosaic"):
    args = jax.tree.map(jnp.asarray, (p.pages.table, p.positions, p.table))
    options = {"width": p.pages.width, "scale": p.pages.scale, "impl": impl}
    return _prefill(p.q, p.pages.arrays, *args, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_prompts_see_their_own_request_up_to_themselves(kind):
    p = prompts(kind, [(70, 0), (3, 62), (0, 0), (1, 128), (200, 1000)], 300, pages=20)
    out = prefill(p)
    assert_right(out, p)
    for _ in range(100):
        cases.assert_same_bits(prefill(p), out)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_cut_at_a_page_gives_the_bits_of_the_whole(kind):
    whole = prompts(kind, [(200, 0)], 200)
    out = np.asarray(prefill(whole))
    rest = prompts(kind, [(72, 128)], 72)
    rest = rest._replace(q=whole.q[128:], pages=whole.pages)
    cases.assert_same_bits(prefill(rest), out[128:])
