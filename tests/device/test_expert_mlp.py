"""The experts at the size of Kimi-Linear on a GPU: few choices, many, and tokens without any."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import expert_mlp

pytestmark = pytest.mark.device
EXPERTS, WIDTH, INNER, TOP = 64, 2304, 1024, 8


@pytest.mark.parametrize("tokens", [2, 32, 128, 129, 700])
def test_the_kernel_agrees_with_the_composed_form(tokens):
    keys = jax.random.split(jax.random.key(tokens), 4)
    h = jax.random.normal(keys[0], (tokens, WIDTH), jnp.bfloat16)
    gate_up = jax.random.normal(keys[1], (EXPERTS, WIDTH, 2 * INNER), jnp.bfloat16) / WIDTH**0.5
    down = jax.random.normal(keys[2], (EXPERTS, INNER, WIDTH), jnp.bfloat16) / INNER**0.5
    scores = jax.random.uniform(keys[3], (tokens, EXPERTS))
    chosen = jax.lax.top_k(scores, TOP)[1].at[-1].set(EXPERTS)
    made, expected = (
        jax.jit(lambda *a, impl=impl: expert_mlp(*a, impl=impl))(h, gate_up, down, chosen)
        for impl in ("mosaic", "xla")
    )
    assert not made[-1].any()
    difference = made.astype(jnp.float32) - expected.astype(jnp.float32)
    assert jnp.linalg.norm(difference) <= 1e-2 * jnp.linalg.norm(expected.astype(jnp.float32))
