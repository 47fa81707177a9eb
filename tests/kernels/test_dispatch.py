"""Choosing an implementation: the first that accepts, and a message that says why none does."""

import jax.numpy as jnp
import pytest

import pallas_kernels as pk
from pallas_kernels.dispatch import Implementation, Op, anything

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
