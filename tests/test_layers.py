"""Attention and routing against plain numpy in float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dasc_jax.config import MLAConfig, MoEConfig
from dasc_jax.models.attention import LatentAttention
from dasc_jax.models.moe import Router
from dasc_jax.models.packing import ZERO, PrefillBucket, Segment, pack_segments
from dasc_jax.types import AttentionPages

WIDTH = 24


def randomise(module: nnx.Module, seed: int) -> dict[str, np.ndarray]:
    """Give every parameter random values; returns them in float64 by dotted path."""
    rng, values = np.random.default_rng(seed), {}
    graph, state = nnx.split(module)
    flat = []
    for path, variable in nnx.to_flat_state(state):
        value = rng.normal(size=variable.shape).astype(np.float32) * 0.4
        values[".".join(map(str, path))] = value.astype(np.float64)
        flat.append((path, variable.replace(jnp.asarray(value))))
    nnx.update(module, nnx.from_flat_state(flat))
    return values


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def expanded_attention(h: np.ndarray, w: dict[str, np.ndarray], c: MLAConfig) -> np.ndarray:
    """MLA with the keys and values of every head made from the latent, as the checkpoint has it."""
    latent, shared = np.split(h @ w["kv_a.kernel"], [c.latent_dim], axis=-1)
    norm = np.sqrt(np.mean(latent**2, axis=-1, keepdims=True) + c.latent_norm_eps)
    latent = w["kv_norm.weight"] * latent / norm
    q = (h @ w["q_proj.kernel"]).reshape(len(h), c.num_heads, -1)
    hidden = np.triu(np.ones((len(h), len(h)), bool), 1)
    heads = []
    for head in range(c.num_heads):
        key = np.concatenate([latent @ w["k_up"][head].T, shared], axis=-1)
        scores = q[:, head] @ key.T / np.sqrt(c.nope_dim + c.shared_dim)
        weights = softmax(np.where(hidden, -np.inf, scores))
        heads.append(weights @ (latent @ w["v_up"][head].T))
    return np.concatenate(heads, axis=-1) @ w["o_proj.kernel"]


def test_absorbed_latent_attention_is_the_expanded_form():
    config = MLAConfig(num_heads=3, nope_dim=8, shared_dim=4, value_dim=6, latent_dim=10)
    layer = LatentAttention(WIDTH, config, 0, jnp.dtype("float32"))
    weights = randomise(layer, 0)
    tokens = 70
    h = np.random.default_rng(1).normal(size=(128, WIDTH))
    segment = Segment(np.zeros(tokens, np.int32), 0, (2, 1), 1, 1, ZERO)
    keep = np.ones((1, 1, 1), bool)
    packed = pack_segments([segment], [], [0], keep, PrefillBucket(128, 1, 0, 2, 1))
    batch = jax.tree.map(jnp.asarray, packed)
    # Sink and pages hold NaN: nothing but the tokens' own rows may be read.
    pages = AttentionPages((jnp.full((1, 3, 64, 14), jnp.nan),))
    out, _ = layer.prefill(jnp.asarray(h, jnp.float32), pages, batch)
    expected = expanded_attention(h[:tokens], weights, config)
    np.testing.assert_allclose(out[:tokens], expected, rtol=0, atol=2e-5 * abs(expected).max())


def moe(scoring: str, **options: object) -> MoEConfig:
    values = {"renormalize": True, "scaling": 1.0, "groups": 1, "top_groups": 1, **options}
    return MoEConfig(16, 4, 8, 8, scoring=scoring, shared_gate=False, **values)


def routed(h: np.ndarray, w: dict[str, np.ndarray], c: MoEConfig) -> np.ndarray:
    """The weight of each expert for each token, `[T, E]`."""
    logits, out = h @ w["kernel"], np.zeros((len(h), c.num_experts))
    scores = softmax(logits) if c.scoring == "softmax" else 1 / (1 + np.exp(-logits))
    biased = scores if c.scoring == "softmax" else scores + w["bias"]
    size = c.num_experts // c.groups
    for row, choice in zip(range(len(h)), biased.copy(), strict=True):
        strength = [np.sort(choice[g * size :][:size])[-2:].sum() for g in range(c.groups)]
        for group in np.argsort(strength)[: c.groups - c.top_groups]:
            choice[group * size :][:size] = -np.inf
        chosen = np.argsort(choice)[-c.top_k :]
        picked = (biased if c.weights_use_bias else scores)[row, chosen]
        out[row, chosen] = c.scaling * (picked / picked.sum() if c.renormalize else picked)
    return out


ROUTERS = {
    "softmax": moe("softmax"),
    "softmax, plain": moe("softmax", renormalize=False),
    "sigmoid": moe("sigmoid", scaling=2.446),
    "sigmoid, plain": moe("sigmoid", renormalize=False),
    "sigmoid, 2 of 4 groups": moe("sigmoid", groups=4, top_groups=2),
    "sigmoid, 1 of 4 groups": moe("sigmoid", groups=4, top_groups=1),
    "sigmoid, biased weights": moe("sigmoid", weights_use_bias=True),
}


def weights_of(config: MoEConfig) -> tuple[np.ndarray, np.ndarray]:
    """What the router gives and what it should, as `[T, E]`."""
    router = Router(WIDTH, config, jnp.dtype("float32"))
    values = randomise(router, 2)
    h = np.random.default_rng(3).normal(size=(40, WIDTH))
    weights, chosen = router(jnp.asarray(h, jnp.float32))
    dense = np.zeros((len(h), config.num_experts))
    np.put_along_axis(dense, np.asarray(chosen), np.asarray(weights), axis=1)
    return dense, routed(h, values, config)


@pytest.mark.parametrize("kind", ROUTERS)
def test_routers_choose_and_weigh_as_the_equations_say(kind):
    ours, theirs = weights_of(ROUTERS[kind])
    assert ((ours > 0).sum(axis=1) == ROUTERS[kind].top_k).all()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6)


def test_every_routing_option_changes_the_weights():
    given = [weights_of(config)[0] for config in ROUTERS.values()]
    for a, b in itertools.combinations(given, 2):
        assert abs(a - b).max() > 1e-3
