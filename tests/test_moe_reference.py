"""The expert block against its equations in numpy: the factor scales the routed part, once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dasc_jax.config import MoEConfig
from dasc_jax.models.moe import MoE, product_of_parts

WIDTH, TOKENS, EXPERTS, TOP = 24, 50, 16, 4


def block(config):
    """A block with random weights, and the weights by path."""
    module = MoE(WIDTH, config, jnp.dtype("float32"))
    random = np.random.default_rng(0)
    graph, state = nnx.split(module)
    flat = {
        path: variable.replace(
            jnp.asarray(random.normal(size=variable.shape) / WIDTH**0.5, jnp.float32)
        )
        for path, variable in nnx.to_flat_state(state)
    }
    weights = {".".join(map(str, path)): np.asarray(v[...], np.float64) for path, v in flat.items()}
    return nnx.merge(graph, nnx.from_flat_state(flat)), weights


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def feed_forward(x, gate, up, down):
    hidden = x @ gate
    return (hidden * sigmoid(hidden) * (x @ up)) @ down


def routing(config, weights, x):
    """Chosen experts of one token and their weights, as the released models define them."""
    logits = x @ weights["router.kernel"]
    if config.scoring == "softmax":
        scores = np.exp(logits - logits.max())
        scores /= scores.sum()
        ranked = scores
    else:
        scores = sigmoid(logits)
        ranked = scores + weights["router.bias"]
        grouped = ranked.reshape(config.groups, -1)
        strength = np.sort(grouped, axis=1)[:, -2:].sum(axis=1)
        best = np.argsort(-strength)[: config.top_groups]
        out = np.setdiff1d(np.arange(config.groups), best)
        grouped = grouped.copy()
        grouped[out] = -np.inf
        ranked = grouped.reshape(-1)
    chosen = np.argsort(-ranked)[:TOP]
    picked = scores[chosen]
    return chosen, (picked / picked.sum() if config.renormalize else picked) * config.scaling


def expected(config, weights, x):
    """Routed and shared part of one token."""
    gate, up = np.split(weights["experts.gate_up"], 2, axis=-1)
    down = weights["experts.down"]
    chosen, share = routing(config, weights, x)
    routed = sum(
        w * feed_forward(x, gate[e], up[e], down[e]) for e, w in zip(chosen, share, strict=True)
    )
    shared = feed_forward(x, *(weights[f"shared.{part}.kernel"] for part in ("gate", "up", "down")))
    if config.shared_gate:
        shared = sigmoid(x @ weights["shared_gate.kernel"]) * shared
    return routed, shared


# https://github.com/vllm-project/vllm/pull/45037
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(
    ("scoring", "scaling", "groups", "top_groups"),
    [("sigmoid", 2.4, 1, 1), ("sigmoid", 2.4, 4, 2), ("softmax", 1.0, 1, 1)],
)
def test_the_block_equals_its_equations(scoring, scaling, groups, top_groups, renormalize):
    gated = scoring == "softmax"
    config = MoEConfig(
        EXPERTS, TOP, 12, 20, scoring, renormalize, scaling, groups, top_groups, gated
    )
    module, weights = block(config)
    x = np.random.default_rng(1).normal(size=(TOKENS, WIDTH))
    found = np.asarray(jax.jit(module)(jnp.asarray(x, jnp.float32)))
    parts = [expected(config, weights, row) for row in x]
    truth = np.array([routed + shared for routed, shared in parts])
    assert np.abs(found - truth).max() <= 1e-5 * np.abs(truth).max()
    assert np.abs([routed for routed, _ in parts]).max() > 0.1 * np.abs(truth).max()


def test_three_products_in_bfloat16_are_as_exact_as_one_in_float32():
    random = np.random.default_rng(0)
    h = jnp.asarray(random.normal(size=(64, 512)), jnp.bfloat16)
    kernel = jnp.asarray(random.normal(size=(512, 32)) * np.exp(random.normal(size=32)), "float32")
    truth = np.asarray(h, np.float64) @ np.asarray(kernel, np.float64)
    whole = jnp.matmul(h.astype(jnp.float32), kernel, precision="highest")
    parts = jax.jit(product_of_parts)(h, kernel)
    error, least = (np.abs(np.asarray(x, np.float64) - truth).max() for x in (parts, whole))
    assert error <= 2 * least + 1e-6
    assert error < 1e-5 * np.abs(truth).max()


def test_parts_of_a_product_have_the_gradients_of_the_whole():
    h = jnp.ones((4, 8), jnp.bfloat16)
    kernel = jnp.linspace(-1.0, 1.0, 24, dtype=jnp.float32).reshape(8, 3)
    to_h, to_kernel = jax.grad(lambda *x: product_of_parts(*x).sum(), (0, 1))(h, kernel)
    np.testing.assert_allclose(to_kernel, np.full((8, 3), 4.0), rtol=1e-2)
    np.testing.assert_allclose(np.asarray(to_h, np.float32)[0], kernel.sum(1), atol=2e-2)
