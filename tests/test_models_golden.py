"""Both model families against what transformers computed from the same tiny checkpoints."""

from functools import lru_cache

import numpy as np
import pytest

from dasc_jax.model import Cache, forward
from tests.engines import GOLDEN, MODELS, golden_model

LOGITS, STATES = 3e-4, 1e-4
GROUPS = ("t1", "t3", "t37", "t130")

pytestmark = pytest.mark.parametrize("name", MODELS)


@lru_cache
def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / name / "golden.npz") as archive:
        return dict(archive)


@lru_cache
def prefilled(name: str, group: str) -> tuple[np.ndarray, Cache]:
    logits, cache = forward(golden_model(name), golden(name)[f"{group}/input_ids"])
    return np.asarray(logits), cache


@lru_cache
def ragged(name: str) -> tuple[np.ndarray, np.ndarray, Cache]:
    """Lengths of the left-padded batch, and what `forward` makes of it padded on the right."""
    g = golden(name)
    lengths = g["ragged/attention_mask"].sum(axis=1)
    width = g["ragged/input_ids"].shape[1]
    rows = zip(g["ragged/input_ids"], lengths, strict=True)
    tokens = np.stack([np.roll(row, length - width) for row, length in rows])
    logits, cache = forward(golden_model(name), tokens, lengths=lengths)
    return lengths, np.asarray(logits), cache


def near(ours, theirs, tolerance):
    np.testing.assert_allclose(np.asarray(ours), theirs, rtol=0, atol=tolerance)


def attention_rows(cache: Cache, row: int, length: int) -> list[np.ndarray]:
    """The rows `[length, ...]` of sequence `row` in each page array of the only attention layer."""
    pages = slice(1 + row * cache.pages_each, 1 + (row + 1) * cache.pages_each)
    arrays = [np.asarray(a[0, pages]) for a in cache.state.pages.arrays]
    return [a.reshape(-1, *a.shape[2:])[:length] for a in arrays]


def golden_rows(g: dict[str, np.ndarray], prefix: str, row: int) -> list[np.ndarray]:
    """The reference's keys and values in our layout, token by token."""
    key, value = (np.moveaxis(g[f"{prefix}/{kind}"][row], 0, 1) for kind in ("key", "value"))
    if key.shape[1] == 1:
        return [np.concatenate([key[:, 0], value[:, 0]], axis=-1)]
    return [key, value]


def check_states(name: str, cache: Cache, prefix: str) -> None:
    """Recurrent states and convolution windows of `cache` against the fixture's."""
    g, config = golden(name), golden_model(name).config
    for at, layer in enumerate(config.recurrent_layers):
        there = f"{prefix}/layer{layer}"
        near(cache.recurrent.temporal[at], g[f"{there}/recurrent_state"], STATES)
        near(cache.recurrent.conv[at], g[f"{there}/conv_state"][..., 1:], STATES)


def check_cache(name: str, cache: Cache, prefix: str) -> None:
    """The same, and every attention row."""
    check_states(name, cache, prefix)
    g = golden(name)
    (layer,) = golden_model(name).config.attention_layers
    for row, length in enumerate(cache.lengths):
        ours = attention_rows(cache, row, length)
        theirs = golden_rows(g, f"{prefix}/layer{layer}", row)
        for a, b in zip(ours, theirs, strict=True):
            near(a, b, STATES)


@pytest.mark.parametrize("group", GROUPS)
def test_prompt_logits_and_caches_are_the_references(name, group):
    logits, cache = prefilled(name, group)
    near(logits, golden(name)[f"{group}/logits"], LOGITS)
    check_cache(name, cache, f"{group}/prefill")


def continue_greedily(name: str, group: str, logits: np.ndarray, cache: Cache) -> Cache:
    """Feed the 8 tokens the reference chose: each must be our choice, with its logits after it."""
    g, model = golden(name), golden_model(name)
    for step in range(8):
        chosen = logits.argmax(axis=-1)
        np.testing.assert_array_equal(chosen, g[f"{group}/greedy_tokens"][:, step])
        out, cache = forward(model, chosen[:, None], cache)
        logits = np.asarray(out)[:, 0]
        near(logits, g[f"{group}/decode_logits"][:, step], LOGITS)
    return cache


@pytest.mark.parametrize("group", GROUPS)
def test_greedy_tokens_are_exactly_the_references(name, group):
    logits, cache = prefilled(name, group)
    cache = continue_greedily(name, group, logits[:, -1], cache)
    if group == "t37":
        check_cache(name, cache, "t37/after_decode")


def test_a_ragged_batch_gives_what_its_prompts_give_alone(name):
    g = golden(name)
    lengths, logits, cache = ragged(name)
    for row, length in enumerate(lengths):
        near(logits[row, :length], g["ragged/logits"][row, -length:], LOGITS)
    # Not the attention rows: padding on the left shifts the positions that keys are rotated by.
    check_states(name, cache, "ragged/prefill")
    last = logits[np.arange(2), lengths - 1]
    continue_greedily(name, "ragged", last, cache)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def mean_kl(exact: np.ndarray, other: np.ndarray) -> float:
    """Mean over positions of KL(exact || other), in nats."""
    p, q = log_softmax(exact), log_softmax(other)
    return float((np.exp(p) * (p - q)).sum(axis=-1).mean())


def test_bfloat16_errs_no_more_than_the_reference_does_in_bfloat16(name):
    """Random routers flip experts at near ties, so single logits may differ by units in both."""
    g = golden(name)
    logits, _ = forward(golden_model(name, "bfloat16"), g["t37/input_ids"])
    ours = mean_kl(g["t37/logits"], np.asarray(logits))
    theirs = mean_kl(g["t37/logits"], g["t37/logits_bf16_compute"])
    assert ours < 0.03
    assert ours < 2 * theirs
