"""What is observed of a prefix is what the model's own passes compute, in both families."""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dasc_jax.analysis import observe as module
from dasc_jax.analysis.observe import observe
from dasc_jax.model import Model, init_recurrent, random_model
from dasc_jax.models import State, delta, functions, init_pages
from dasc_jax.models.packing import ZERO, PrefillBucket, Segment, pack_segments
from tests.engines import MODELS, prompt
from tests.tiny import tiny_config

TOKENS = prompt(100, seed=3)
both = pytest.mark.parametrize("name", MODELS)


@lru_cache
def two_recurrent_layers(name: str) -> Model:
    """A model of a family, with an attention layer between them."""
    kinds = ("delta", "attention", "delta")
    layers = {"num_layers": 3, "layer_kinds": kinds, "ffn_kinds": ("dense",) * 3}
    return random_model(replace(tiny_config(name), **layers), "float32")


@pytest.fixture(autouse=True)
def short_passes(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 64)


class Watched(NamedTuple):
    """A pass over TOKENS without any hook: what enters and leaves each layer's recurrence."""

    g: list[np.ndarray]
    o: list[np.ndarray]
    temporal: np.ndarray
    logits: np.ndarray


def watched(name: str, monkeypatch: pytest.MonkeyPatch) -> Watched:
    model, plain = two_recurrent_layers(name), delta.delta_prefill
    decays, outputs = [], []

    def noting(q, k, v, g, *rest, **options):
        out = plain(q, k, v, g, *rest, **options)
        decays.append(g[: len(TOKENS)])
        outputs.append(out.o[: len(TOKENS)])
        return out

    monkeypatch.setattr(delta, "delta_prefill", noting)
    pages = init_pages(model.config, 3, jnp.dtype("float32"))
    state = State(init_recurrent(model.config, 2, "float32"), pages)
    segment = Segment(np.array(TOKENS, np.int32), 0, (1, 2), 1, 1, ZERO)
    d = model.config.delta
    keep = np.ones((2, d.num_value_heads, d.key_dim), bool)
    batch = pack_segments([segment], [], [len(TOKENS) - 1], keep, PrefillBucket(128, 1, 0, 2, 1))

    @jax.jit
    def step(params, state, batch):
        after, out = functions(model.config, "float32").prefill(params, state, batch)
        return decays, outputs, after.recurrent.temporal[:, 1], out.logits[0]

    return Watched(*jax.tree.map(np.asarray, step(model.params, state, batch)))


@both
def test_what_is_observed_in_several_passes_is_what_one_plain_pass_computes(name, monkeypatch):
    model, plain = two_recurrent_layers(name), watched(name, monkeypatch)
    seen = observe(model, TOKENS, room=128)
    np.testing.assert_allclose(seen.logits, plain.logits, rtol=0, atol=3e-5)
    np.testing.assert_allclose(seen.temporal, plain.temporal, rtol=0, atol=3e-5)
    assert seen.tokens == len(TOKENS) and len(plain.g) == 2
    for at in range(2):
        np.testing.assert_allclose(seen.log_decay[at], plain.g[at].mean(axis=0), rtol=1e-4)
        read = np.einsum("hkv,hk->hv", seen.temporal[at], seen.query[at])
        np.testing.assert_allclose(read, plain.o[at][-1], rtol=0, atol=3e-5)
    short = observe(model, TOKENS[:40], room=128)
    for at in range(2):
        np.testing.assert_allclose(short.log_decay[at], plain.g[at][:40].mean(axis=0), rtol=1e-4)
        read = np.einsum("hkv,hk->hv", short.temporal[at], short.query[at])
        np.testing.assert_allclose(read, plain.o[at][39], rtol=0, atol=3e-5)


def test_the_hook_stays_with_the_pass_that_it_was_made_for():
    before = delta.DeltaMixer.prefill
    observe(two_recurrent_layers(MODELS[0]), TOKENS[:40], room=128)
    assert delta.DeltaMixer.prefill is before


@pytest.mark.parametrize(("tokens", "room"), [(0, None), (65, 64)])
def test_prefixes_without_room_are_refused_with_the_numbers(tokens, room):
    with pytest.raises(ValueError, match=f"a prefix of {tokens} tokens"):
        observe(two_recurrent_layers(MODELS[0]), TOKENS[:tokens], room)
