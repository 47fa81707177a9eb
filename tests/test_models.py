"""What must hold of `forward`, `generate` and the parameters, besides the reference's numbers."""

import dataclasses

import jax
import numpy as np
import pytest

from dasc_jax.config import ModelConfig
from dasc_jax.horizons import retention_horizons
from dasc_jax.model import Cache, Model, forward, generate, init_state, random_model
from dasc_jax.models import abstract_params
from dasc_jax.weights import param_specs
from tests.checkpoints import ROOT
from tests.engines import GOLDEN, MODELS, golden_model

WIDTH = 37
TOLERANCE = 3e-5
CONFIGS = [
    *(ROOT / "checkpoints" / "configs").glob("*.json"),
    *(GOLDEN / name / "config.json" for name in MODELS),
]
both = pytest.mark.parametrize("name", MODELS)


def tokens_of(name: str) -> np.ndarray:
    with np.load(GOLDEN / name / "golden.npz") as archive:
        return archive["t37/input_ids"]


def fed(model: Model, tokens: np.ndarray, lengths, cache: Cache | None = None):
    """`forward` over tokens padded to one width, so that all calls share a compiled program."""
    padded = np.zeros((len(tokens), WIDTH), np.int32)
    padded[:, : tokens.shape[1]] = tokens
    logits, cache = forward(model, padded, cache, np.broadcast_to(lengths, len(tokens)))
    return np.asarray(logits)[:, : tokens.shape[1]], cache


def assert_near(a: Cache, b: Cache) -> None:
    for x, y in zip(jax.tree.leaves(a.recurrent), jax.tree.leaves(b.recurrent), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(a.lengths, b.lengths)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.parent.name + "/" + p.stem)
def test_models_declare_the_parameters_that_loading_gives(path, dtype, tied):
    config = dataclasses.replace(ModelConfig.from_hf(path), tie_word_embeddings=tied)
    assert abstract_params(config, dtype) == param_specs(config, dtype)


@both
def test_a_prompt_in_two_parts_or_token_by_token_is_the_prompt(name):
    model, tokens = golden_model(name), tokens_of(name)
    whole, end = fed(model, tokens, WIDTH)
    first, middle = fed(model, tokens[:, :20], 20)
    second, parts = fed(model, tokens[:, 20:], 17, middle)
    np.testing.assert_allclose(np.concatenate([first, second], 1), whole, rtol=0, atol=TOLERANCE)
    assert_near(parts, end)
    cache, steps = None, []
    for at in range(WIDTH):
        logits, cache = forward(model, tokens[:, at : at + 1], cache)
        steps.append(np.asarray(logits))
    np.testing.assert_allclose(np.concatenate(steps, 1), whole, rtol=0, atol=TOLERANCE)
    assert_near(cache, end)


@both
def test_a_cache_is_a_value(name):
    """Continuing from it changes nothing in it: a second continuation gives the same bits."""
    model, tokens = golden_model(name), tokens_of(name)
    _, start = fed(model, tokens[:, :20], 20)
    once, _ = fed(model, tokens[:, 20:], 17, start)
    fed(model, tokens[:, :5], 5, start)
    forward(model, tokens[:, :1], start)
    again, _ = fed(model, tokens[:, 20:], 17, start)
    np.testing.assert_array_equal(once, again)
    assert start.lengths.tolist() == [20, 20]


@both
def test_rows_of_length_zero_stay_as_they_were(name):
    model, tokens = golden_model(name), tokens_of(name)
    whole, _ = fed(model, tokens, WIDTH)
    alone, cache = fed(model, tokens, [WIDTH, 0])
    np.testing.assert_allclose(alone[0], whole[0], rtol=0, atol=TOLERANCE)
    assert cache.lengths.tolist() == [WIDTH, 0]
    assert not np.asarray(cache.recurrent.temporal[:, 1]).any()
    before = jax.tree.map(lambda x: np.asarray(x[:, 0]), cache.recurrent)
    late, cache = fed(model, tokens, [0, WIDTH], cache)
    np.testing.assert_allclose(late[1], whole[1], rtol=0, atol=TOLERANCE)
    after = jax.tree.map(lambda x: np.asarray(x[:, 0]), cache.recurrent)
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert cache.lengths.tolist() == [WIDTH, WIDTH]


@both
def test_padding_does_not_matter(name):
    model, tokens = golden_model(name), tokens_of(name)
    clean, a = fed(model, tokens[:, :20], 20)
    garbage = np.where(np.arange(WIDTH) < 20, tokens, 255)
    dirty, b = fed(model, garbage, 20)
    np.testing.assert_array_equal(clean, dirty[:, :20])
    jax.tree.map(np.testing.assert_array_equal, a.recurrent, b.recurrent)


def test_bad_input_is_refused_with_the_numbers():
    model = golden_model(MODELS[0])
    tokens = np.ones((2, 3), np.int32)
    short = dataclasses.replace(model, config=dataclasses.replace(model.config, max_context=2))
    cases = [
        (lambda: forward(model, tokens[:, :0]), r"shape \(2, 0\)"),
        (lambda: forward(model, tokens, init_state(model, 3)), "cache of 3 sequences"),
        (lambda: forward(model, tokens, lengths=np.array([4, 1])), r"\[4, 1\] must lie in 0\.\.3"),
        (lambda: forward(model, tokens, lengths=np.array([3, -1])), r"\[3, -1\]"),
        (lambda: forward(model, tokens * 256), r"256\.\.256; the vocabulary has 256"),
        (lambda: forward(model, -tokens), r"-1\.\.-1"),
        (lambda: forward(short, tokens), "3 tokens exceed the context of 2"),
        (lambda: init_state(model, 0), "batch is 0"),
        (lambda: generate(model, [], 1), "prompt is empty"),
        (lambda: generate(model, [1], 0), "max_tokens is 0"),
        (lambda: generate(model, [1], 1, temperature=-1.0), r"temperature is -1\.0"),
        (lambda: generate(model, [256], 1), r"256\.\.256"),
        (lambda: generate(short, [1, 2, 3], 1), "3 prompt tokens and 1 new ones make 4"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


@both
def test_generate_is_the_chain_of_most_likely_tokens(name):
    model, prompt = golden_model(name), tokens_of(name)[0].tolist()
    with np.load(GOLDEN / name / "golden.npz") as archive:
        expected = archive["t37/greedy_tokens"][0].tolist()
    assert generate(model, prompt, 8) == expected


def test_generate_stops_behind_an_end_token():
    model = golden_model(MODELS[0])
    every = dataclasses.replace(model.config, eos_token_ids=tuple(range(256)))
    assert len(generate(dataclasses.replace(model, config=every), [5], 8)) == 1


@both
def test_generate_draws_the_same_with_the_same_seed(name):
    model, prompt = golden_model(name), tokens_of(name)[0].tolist()
    a, b, c = (generate(model, prompt, 8, temperature=2.0, seed=seed) for seed in (7, 7, 8))
    assert a == b != c


@both
def test_a_random_model_remembers_over_a_wide_range_of_horizons(name):
    config = golden_model(name).config
    model = random_model(config, "float32")
    spread = np.concatenate([h.reshape(-1) for h in retention_horizons(model)])
    assert spread.min() < 10 and spread.max() > 1000
    assert 0.1 < np.mean(spread > 64) < 0.9
    logits, _ = fed(model, tokens_of(name), WIDTH)
    assert np.isfinite(logits).all() and logits.std() > 0.1
    other = random_model(config, "float32", seed=1).params["lm_head.kernel"]
    assert not np.array_equal(model.params["lm_head.kernel"], other)
