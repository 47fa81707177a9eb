"""The forward that trains is the forward that serves."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dasc_jax as dj
import pallas_kernels as pk
from dasc_jax.models import functions
from dasc_jax.training.attention import causal_attention
from tests.engines import golden_model
from tests.kernels import cases

FAMILIES = ("kimi_linear_a", "qwen3_next_a")


@pytest.mark.parametrize("kind", cases.KINDS)
@pytest.mark.parametrize("tokens", [64, 192])
def test_whole_sequences_follow_the_recurrence(kind, tokens):
    rng = np.random.default_rng(tokens)
    batch = [cases.random_inputs(rng, kind, tokens) for _ in range(2)]
    batch = [inputs._replace(g=jnp.maximum(inputs.g, -5.0)) for inputs in batch]
    o = pk.delta_train(*(jnp.stack(x) for x in zip(*batch, strict=True)))
    for row, inputs in zip(o, batch, strict=True):
        zero = np.zeros((1, cases.HEADS, cases.KEY, cases.VALUE))
        truth = cases.oracle(inputs, [cases.Segment(tokens, mode=pk.ZERO)], zero)
        assert cases.distance(row, truth.o) <= 3e-4


def mild(model):
    """The model with log decays between -5, below which training clamps them, and 0."""
    params = {
        name: jnp.full_like(value, -1.0) if name.endswith(("A_log", "dt_bias")) else value
        for name, value in model.params.items()
    }
    return replace(model, params=params)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_and_serving_compute_the_same_logits(family):
    model = mild(golden_model(family))
    tokens = np.random.default_rng(1).integers(0, model.config.vocab_size, (2, 192), np.int32)
    train = functions(model.config, model.dtype).train
    with jax.default_matmul_precision("highest"):
        out = jax.jit(train, static_argnums=2)(model.params, jnp.asarray(tokens), causal_attention)
        served, _ = dj.forward(model, tokens)
    np.testing.assert_allclose(out.logits, served, atol=1e-4)
    np.testing.assert_allclose(jnp.sum(out.load, axis=-1), 1.0, rtol=1e-5)
    assert np.all(np.asarray(out.balance) > 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_but_the_choice_bias_gets_a_gradient(family):
    model = golden_model(family)
    tokens = np.random.default_rng(2).integers(0, model.config.vocab_size, (1, 128), np.int32)
    train = functions(model.config, model.dtype).train

    def loss(params):
        out = train(params, jnp.asarray(tokens), causal_attention)
        return jnp.mean(jnp.square(jax.nn.log_softmax(out.logits))) + jnp.sum(out.balance)

    for name, gradient in jax.jit(jax.grad(loss))(model.params).items():
        assert np.all(np.isfinite(gradient)), name
        assert np.any(gradient) != name.endswith("router.bias"), name
