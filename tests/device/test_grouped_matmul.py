"""The Hopper kernel of the experts on a GPU, with the weights of one layer of both models."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels.grouped_matmul import tiled
from pallas_kernels.mgpu import grouped_matmul as kernel
from pallas_kernels.mgpu.grouped_matmul import Tiling
from tests.kernels.grouped_cases import TOLERANCE

pytestmark = pytest.mark.device

EXPERTS = {"kimi": (256, 2304, 1024, 8), "qwen": (512, 2048, 512, 10)}
"""Experts, width of the model, width of an expert, experts a token."""
OPS = {"matmul": pk.grouped_matmul, "swiglu": pk.grouped_swiglu}
TOKENS = (1, 7, 256, 8192)
TILINGS = (
    Tiling(8, 64, 64, 2),
    Tiling(8, 64, 128, 3, 1, 2),
    Tiling(16, 128, 64, 4, 1, 1),
    Tiling(24, 64, 64, 4, 2, 1),
    Tiling(64, 64, 64, 5, 2, 1),
    Tiling(96, 64, 64, 4, 2, 1),
    Tiling(128, 64, 64, 3, 2, 1),
)


@functools.partial(jax.jit, static_argnames=("op", "impl"))
def run(x, w, sizes, *, op, impl="mosaic"):
    return OPS[op](x, w, sizes, impl=impl)


@functools.partial(jax.jit, static_argnames="op")
def truth(x, w, sizes, *, op):
    y = tiled(x.astype(jnp.float32), w.astype(jnp.float32), sizes)
    if op == "matmul":
        return y
    gate, up = jnp.split(y, 2, axis=-1)
    return jax.nn.silu(gate) * up


@functools.cache
def weights(model, op):
    experts, width, inner, _ = EXPERTS[model]
    shape = (experts, width, 2 * inner) if op == "swiglu" else (experts, inner, width)
    w = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    return w * jnp.bfloat16(shape[1] ** -0.5)


@pytest.fixture(scope="module", autouse=True)
def let_go():
    yield
    weights.cache_clear()


def rows(model, op, sizes, count, seed=0):
    """x `[count, K]`, NaN past the last group."""
    inner = weights(model, op).shape[1]
    x = jax.random.normal(jax.random.key(seed), (count, inner), jnp.bfloat16)
    return x.at[int(sum(sizes)) :].set(jnp.nan)


def routed(model, tokens, seed=0):
    experts, _, _, top = EXPERTS[model]
    noise = np.random.default_rng(seed).random((tokens, experts))
    chosen = np.argpartition(noise, top, axis=1)[:, :top]
    return np.bincount(chosen.ravel(), minlength=experts)


def poison(shape):
    """Free memory that holds NaN, where the next output is likely to be put."""
    jax.block_until_ready(jnp.full(shape, jnp.nan, jnp.bfloat16))


def assert_right(model, op, sizes, count, product=run, seed=0):
    x, w = rows(model, op, sizes, count, seed), weights(model, op)
    sizes = jnp.asarray(sizes, jnp.int32)
    real = int(sizes.sum())
    expected = truth(x, w, sizes, op=op)[:real]
    poison(expected.shape)
    y = product(x, w, sizes, op=op)
    assert not bool(jnp.any(y[real:] != 0))
    error = jnp.linalg.norm(y[:real].astype(jnp.float32) - expected)
    assert float(error) <= TOLERANCE * float(jnp.linalg.norm(expected))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("model", EXPERTS)
def test_routed_tokens_meet_their_experts(model, op, tokens):
    sizes = routed(model, tokens, seed=tokens)
    assert_right(model, op, sizes, int(sizes.sum()), seed=tokens)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("model", EXPERTS)
def test_uneven_groups_and_rows_of_none(model, op):
    experts = EXPERTS[model][0]
    full, everything, nothing, one, skewed = (np.zeros(experts, int) for _ in range(5))
    full[0], everything[experts // 2], one[-1] = 1037, 1000, 1
    skewed[::7] = np.arange(len(skewed[::7])) % 25
    for sizes in (full, everything, nothing, one, skewed):
        assert_right(model, op, sizes, 1037)


def test_one_row():
    sizes = np.zeros(256, int)
    assert_right("kimi", "matmul", sizes, 1)
    sizes[77] = 1
    assert_right("kimi", "matmul", sizes, 1)


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("op", OPS)
def test_every_tiling_is_right(op, tiling):
    if tiling.misfit(2304, 1024, 2) if op == "swiglu" else tiling.misfit(1024, 2304, 1):
        pytest.skip("this tiling is for the other product")
    ours = {"matmul": kernel.grouped_matmul, "swiglu": kernel.grouped_swiglu}[op]

    def product(x, w, sizes, *, op):
        return jax.jit(functools.partial(ours, tiling=tiling))(x, w, sizes)

    sizes = np.random.default_rng(3).poisson(20, 256)
    sizes[::5] = 0
    assert_right("kimi", op, sizes, int(sizes.sum()) + 5, product)


@pytest.mark.parametrize("model, tokens", [("kimi", 32), ("qwen", 1), ("qwen", 512)])
def test_a_thousand_repeats_give_the_same_bits(model, tokens):
    sizes = jnp.asarray(routed(model, tokens), jnp.int32)
    for op in OPS:
        x, w = rows(model, op, sizes, int(sizes.sum()) + 3), weights(model, op)
        first = run(x, w, sizes, op=op)
        differ = sum(jnp.any(run(x, w, sizes, op=op) != first) for _ in range(1000))
        assert int(differ) == 0


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("model", EXPERTS)
def test_bits_of_a_row_depend_on_nothing_else_in_its_tiling(model, op):
    sizes = routed(model, 64)
    count = int(sizes.sum())
    x, w = rows(model, op, sizes, count), weights(model, op)
    together = run(x, w, jnp.asarray(sizes, jnp.int32), op=op)
    changed = x.at[count // 2 :].set(1.0)
    other = run(changed, w, jnp.asarray(sizes, jnp.int32), op=op)
    np.testing.assert_array_equal(together[: count // 2], other[: count // 2])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("impl", ["mosaic", "xla"])
def test_temporaries_are_bounded(impl, op):
    w, spec = weights("kimi", op), jax.ShapeDtypeStruct
    x, sizes = spec((65536, w.shape[1]), jnp.bfloat16), spec(w.shape[:1], jnp.int32)
    compiled = run.lower(x, w, sizes, op=op, impl=impl).compile()
    memory = compiled.memory_analysis()
    output = 65536 * w.shape[2] * 2
    assert memory.temp_size_in_bytes < 2 * output
