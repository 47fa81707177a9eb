"""The experts of a token: every implementation against float64, the kernel in the interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import expert_mlp
from pallas_kernels.experts import FEW_CHOICES
from pallas_kernels.mgpu import experts as kernel
from tests.kernels.grouped_cases import BF16, TOLERANCE


def truth(h, gate_up, down, chosen):
    """A token after the other, a choice after the other."""
    out = np.zeros((*chosen.shape, h.shape[1]))
    for at in np.ndindex(chosen.shape):
        if chosen[at] < len(down):
            gate, up = np.split(h[at[0]] @ gate_up[chosen[at]], 2)
            out[at] = (gate / (1 + np.exp(-gate)) * up) @ down[chosen[at]]
    return out


def operands(tokens: int, top: int, experts: int, width: int, inner: int, dtype=np.float32):
    """Random ones; of two choices of the last token, no expert is chosen."""
    rng = np.random.default_rng(tokens)
    h = rng.normal(size=(tokens, width)).astype(dtype)
    gate_up = (rng.normal(size=(experts, width, 2 * inner)) / width**0.5).astype(dtype)
    down = (rng.normal(size=(experts, inner, width)) / inner**0.5).astype(dtype)
    chosen = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top].astype(np.int32)
    chosen[-1, :2] = experts
    return h, gate_up, down, chosen


@pytest.mark.parametrize("impl", ["xla", "reference"])
@pytest.mark.parametrize("tokens", [1, 5, FEW_CHOICES // 4 + 1])
def test_each_choice_gets_what_its_expert_makes_of_the_token(tokens, impl):
    args = operands(tokens, 4, 6, 16, 8)
    made = np.asarray(expert_mlp(*map(jnp.asarray, args), impl=impl))
    expected = truth(*(x.astype(np.float64) for x in args[:3]), args[3])
    np.testing.assert_allclose(made, expected, atol=2e-5)
    assert not made[-1, :2].any()


@pytest.mark.parametrize("tokens", [2, 5])
def test_the_kernel_does_too(tokens):
    args = operands(tokens, 4, 6, 128, 64, BF16)
    run = jax.jit(lambda *a: kernel.run(*a, interpret=plgpu.InterpretGPUParams()))
    made = np.asarray(run(*map(jnp.asarray, args))).astype(np.float64)
    expected = truth(*(x.astype(np.float64) for x in args[:3]), args[3])
    assert np.linalg.norm(made - expected) <= 2 * TOLERANCE * np.linalg.norm(expected)
    assert not made[-1, :2].any()


@pytest.mark.parametrize("tokens", [2, 32, 1024])
def test_the_kernel_lowers_at_the_size_of_kimi_linear(tokens):
    shapes = ((tokens, 2304), (256, 2304, 2048), (256, 1024, 2304))
    specs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    chosen = jax.ShapeDtypeStruct((tokens, 8), jnp.int32)
    text = jax.jit(kernel.run).trace(*specs, chosen).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 2
