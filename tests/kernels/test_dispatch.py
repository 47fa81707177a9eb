"""Choosing an implementation: the first that accepts, and a message that says why none does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels.dispatch import Implementation, Op, anything, traced_once

TWICE = Op(
    "twice",
    (
        Implementation(
            "mosaic", lambda x: "x is odd" if x % 2 else None, lambda x: ("mosaic", 2 * x)
        ),
        Implementation(
            "xla", lambda x: "x is negative" if x < 0 else None, lambda x: ("xla", 2 * x)
        ),
    ),
)


def grouped(impl):
    sizes = jnp.array([2], jnp.int32)
    return pk.grouped_matmul(jnp.ones((2, 3)), jnp.ones((1, 3, 4)), sizes, impl=impl)


@pytest.mark.parametrize(("x", "name"), [(2, "mosaic"), (3, "xla")])
def test_auto_takes_the_first_that_does_not_refuse(monkeypatch, x, name):
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    assert TWICE("auto", x) == (name, 2 * x)


def test_when_all_refuse_every_reason_is_given():
    with pytest.raises(NotImplementedError, match="mosaic: x is odd; xla: x is negative"):
        TWICE("auto", -3)


def test_a_named_implementation_that_refuses_is_not_replaced():
    with pytest.raises(NotImplementedError, match="impl='xla' cannot run this: xla: x is negative"):
        TWICE("xla", -2)


def test_an_unknown_name_is_refused_with_the_list():
    with pytest.raises(ValueError, match="'cuda'; one of auto, mosaic, xla, reference"):
        grouped("cuda")


def test_mosaic_without_a_gpu_says_so():
    with pytest.raises(RuntimeError, match="needs an NVIDIA GPU; JAX runs on cpu"):
        grouped("mosaic")


def test_mosaic_without_a_kernel_says_what_there_is(monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    only_xla = Op("thing", (Implementation("xla", anything, abs),))
    with pytest.raises(NotImplementedError, match="thing: .* it has no mosaic kernel, only xla"):
        only_xla("mosaic", -1)


def test_calls_of_the_same_shapes_are_one_function_of_a_program():
    traced = []

    def run(x, table, layer):
        traced.append((x is table[0], layer))
        return table[0] * x + layer

    op = traced_once(run)

    def program(x, y):
        for _ in range(3):
            x = op(x, (y, None), 5)
        return op(x, (x, None), 5) + op(x, (y, None), 6)

    x, y = jnp.arange(4.0), np.full(4, 2.0, np.float32)
    text = jax.jit(program).lower(x, y).as_text()
    assert traced == [(False, 5), (True, 5), (False, 6)]
    assert text.count("func.func private") == 3 and text.count("call @") == 5
    twice = 2 * (2 * (2 * x + 5) + 5) + 5
    np.testing.assert_array_equal(program(x, y), twice * twice + 5 + 2 * twice + 6)


def test_equal_values_of_different_types_are_apart():
    op = traced_once(lambda x, by: x * by)
    x = jnp.arange(3)
    assert [op(x, by).dtype for by in (1, 1.0, True)] == [x.dtype, jnp.float32, x.dtype]
