"""Table 1b against scipy, and the prefixes that it is made of."""

import numpy as np
import pytest
import scipy.stats

from dasc_jax.analysis.correlation import (
    PAIRS,
    Correlation,
    correlate,
    draw,
    prompt_prefixes,
    summarise,
    table,
    text_prefixes,
)
from dasc_jax.analysis.observe import Observed
from dasc_jax.evals.ruler import TASKS, Generator
from dasc_jax.horizons import HorizonError
from tests.engines import MODELS, golden_model
from tests.tiny import tiny_model

both = pytest.mark.parametrize("name", MODELS)


def invented(config, seed=0):
    """An observation of random numbers in the shapes of a model, and horizons to go with it."""
    random, d = np.random.default_rng(seed), config.delta
    layers, heads = len(config.recurrent_layers), d.num_value_heads
    units = (heads, d.key_dim) if d.kind == "kda" else (heads,)
    seen = Observed(
        log_decay=-random.uniform(0.01, 2, (layers, *units)),
        temporal=random.normal(size=(layers, heads, d.key_dim, d.value_dim)).astype(np.float32),
        query=random.normal(size=(layers, heads, d.key_dim)).astype(np.float32),
        logits=np.zeros(4, np.float32),
        tokens=99,
    )
    return seen, [random.uniform(1, 500, units) for _ in range(layers)]


@both
def test_correlations_are_scipys_of_equations_4_and_5(name):
    config = golden_model(name).config
    seen, static = invented(config)
    rows = correlate(config, static, seen, 5, "book")
    assert len(rows) == len(PAIRS) * len(config.recurrent_layers)
    for at, layer in enumerate(config.recurrent_layers):
        S, q = seen.temporal[at].astype(float), seen.query[at].astype(float)
        if config.delta.kind == "kda":
            sizes = np.linalg.norm(S, axis=-1), np.linalg.norm(S * q[..., None], axis=-1)
        else:
            read = np.einsum("hkv,hk->hv", S, q)
            sizes = np.linalg.norm(S, axis=(1, 2)), np.linalg.norm(read, axis=-1)
        measured = zip(PAIRS, (np.log(1e-3) / seen.log_decay[at], *sizes), strict=True)
        for pair, values in measured:
            (row,) = [r for r in rows if r.layer == layer and r.pair == pair]
            want = scipy.stats.spearmanr(static[at].ravel(), values.ravel()).statistic
            assert row.rho == pytest.approx(want, abs=1e-12)
            assert (row.prefix, row.source, row.tokens) == (5, "book", 99)
            assert row.units == values.size


def test_a_prefix_that_decays_as_the_weights_say_correlates_perfectly():
    config = golden_model(MODELS[0]).config
    seen, _ = invented(config)
    rows = correlate(config, list(np.log(1e-3) / seen.log_decay), seen)
    assert all(r.rho == pytest.approx(1) for r in rows if r.pair == "H_e")


def test_a_decay_that_never_was_below_zero_is_named():
    config = golden_model(MODELS[0]).config
    seen, static = invented(config)
    seen.log_decay[1] = 0.0
    with pytest.raises(HorizonError, match=f"layer {config.recurrent_layers[1]}, head 0"):
        correlate(config, static, seen)


def test_the_summary_is_median_and_quartiles_of_the_defined_correlations():
    values = [0.1, 0.5, float("nan"), 0.9, -0.2]
    rows = [Correlation(i, "", 64, 0, "H_e", 8, rho) for i, rho in enumerate(values)]
    first, *others = summarise("kda", rows)
    assert first.comparisons == 4
    assert (first.q1, first.median, first.q3) == pytest.approx(
        tuple(np.quantile([-0.2, 0.1, 0.5, 0.9], (0.25, 0.5, 0.75)))
    )
    assert all(line.comparisons == 0 and np.isnan(line.median) for line in others)
    assert table([first, *others], "x").row_count == len(PAIRS)


def test_the_picture_has_a_panel_a_pair_and_a_point_a_correlation():
    config = golden_model(MODELS[0]).config
    rows = [r for seed in range(3) for r in correlate(config, *invented(config, seed)[::-1], seed)]
    figure = draw(rows, "x")
    assert [axes.get_title("left") for axes in figure.axes] == list(PAIRS.values())
    for axes in figure.axes:
        points = [line for line in axes.lines if line.get_marker() == "."]
        assert sum(len(line.get_xdata()) for line in points) == len(rows) / len(PAIRS)


def test_prompt_prefixes_are_the_last_tokens_of_the_tasks_in_turn():
    tokenizer = tiny_model().tokenizer
    generator = Generator(tokenizer, seed=1)
    made = prompt_prefixes(tokenizer, generator, (512, 1024), each=2)
    assert [p.source for p in made] == list(TASKS[:4])
    assert [len(p.tokens) for p in made] == [1024, 1024, 512, 512]
    whole = generator.instance(TASKS[1], 1024 + 64 + 256, 1).prompt
    assert tokenizer.decode(made[1].tokens) == whole[-1024:]
    assert made == prompt_prefixes(tokenizer, Generator(tokenizer, seed=1), (512, 1024), each=2)


def test_text_prefixes_are_pieces_of_the_text_that_the_seed_draws(tmp_path):
    tokenizer, path = tiny_model().tokenizer, tmp_path / "book.txt"
    text = "".join(chr(97 + i * i % 26) for i in range(900))
    path.write_text(text)
    made = text_prefixes(tokenizer, path, (64, 128), each=2, seed=4)
    assert [len(p.tokens) for p in made] == [128, 128, 64, 64]
    assert all(tokenizer.decode(p.tokens) in text for p in made)
    assert made == text_prefixes(tokenizer, path, (64, 128), each=2, seed=4)
    assert made != text_prefixes(tokenizer, path, (64, 128), each=2, seed=5)
    with pytest.raises(ValueError, match="has 900 tokens; a prefix takes 901"):
        text_prefixes(tokenizer, path, (901,), each=1, seed=0)
