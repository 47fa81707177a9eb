"""What the XLA forms become on a GPU, read on any machine."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from tests.kernels import cases
from tests.kernels.cases import Segment


def cuda_program(function, *args):
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("op", ["prefill", "decode"])
@pytest.mark.parametrize("kind", cases.KINDS)
def test_no_product_falls_to_reduced_precision_on_a_gpu(kind, op):
    inputs = cases.random_inputs(np.random.default_rng(0), kind)
    states = jnp.zeros((cases.SEGMENTS, cases.HEADS, cases.KEY, cases.VALUE))
    if op == "prefill":
        table = cases.table([Segment(100)])
        text = cuda_program(
            lambda *args: pk.delta_prefill(*args, table, num_boundaries=1, impl="xla"),
            *inputs,
            states,
        )
    else:
        text = cuda_program(
            lambda *args: pk.delta_decode(*args, layer=0, impl="xla"),
            *cases.cut(inputs, 0, cases.SEGMENTS),
            states[None],
            jnp.arange(cases.SEGMENTS, dtype=jnp.int32),
        )
    products = re.findall(r"stablehlo\.dot_general.*", text)
    assert products
    assert all("precision = [HIGHEST, HIGHEST]" in product for product in products)
