"""Table 1a: one cached prefix, four ways to reuse it, and nothing else that differs."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from dasc_jax.analysis import intervention as module
from dasc_jax.analysis.intervention import (
    INTERVENTIONS,
    Answer,
    Probe,
    accuracies,
    continued,
    draw,
    intervened,
    make_probe,
    prefilled,
    run,
    table,
    tokenizer_of,
)
from dasc_jax.evals.ruler import Generator
from dasc_jax.model import forward
from tests.engines import MODELS, golden_model, prompt
from tests.tiny import tiny_model

BASELINE, NO_KV, NO_STATE, NEITHER = INTERVENTIONS
both = pytest.mark.parametrize("name", MODELS)


ROOM = 192


@pytest.fixture(autouse=True)
def one_shape(monkeypatch):
    """Two sequences, 64 tokens at a time, ROOM tokens of pages: what all tests here compile."""
    monkeypatch.setattr(module, "SLICE", 64)


def probe(index, cached=128, rest=9, limit=4):
    tokens = prompt(cached + rest, index)
    return Probe(0.5, index, tokens[:cached], tokens[cached:], ("x",), limit)


def answered(model, probes):
    return [answer for some in run(model, probes, batch=2) for answer in some]


def test_an_untouched_cache_continues_as_the_whole_prompt_does():
    model = tiny_model()
    prefixes, rests = [prompt(128), prompt(64, 1)], [prompt(9, 2), prompt(5, 3)]
    cache = prefilled(model, prefixes, ROOM)
    tokens = continued(model, intervened(cache, BASELINE), rests, [4, 2], 64)
    assert [len(t) for t in tokens] == [4, 2]
    rows = [[*p, *r, *t] for p, r, t in zip(prefixes, rests, tokens, strict=True)]
    padded = np.array([row + [0] * (ROOM - len(row)) for row in rows], np.int32)
    logits, _ = forward(model, padded, lengths=np.array([len(row) for row in rows]))
    for row, prefix, rest, chosen in zip(logits, prefixes, rests, tokens, strict=True):
        at = len(prefix) + len(rest) - 1
        assert np.argmax(row[at : at + len(chosen)], axis=-1).tolist() == chosen
    _, whole = forward(model, padded, lengths=np.array([128, 64]))
    for x, y in zip(cache.recurrent, whole.recurrent, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=3e-5)
    np.testing.assert_array_equal(cache.lengths, whole.lengths)


def test_answers_do_not_depend_on_the_neighbours_and_each_probe_counts_once():
    probes = [probe(0), probe(1, cached=64, rest=5), probe(2, rest=7, limit=2)]
    one, two = (answered(tiny_model(), some) for some in (probes, probes[::-1]))
    key = {i.name: at for at, i in enumerate(INTERVENTIONS)}
    one, two = (sorted(x, key=lambda a: (a.index, key[a.intervention])) for x in (one, two))
    assert one == two and len(one) == len(probes) * len(INTERVENTIONS)
    assert [a.cached_tokens for a in one[::4]] == [128, 64, 128]
    assert [a.prompt_tokens for a in one[::4]] == [137, 69, 135]
    assert len({a.text for a in one[:4]}) > 1


@both
def test_an_intervention_zeroes_what_it_names_and_nothing_else(name):
    model = tiny_model(name)
    cache = prefilled(model, [prompt(64), prompt(64, 1)], ROOM)
    for chosen in INTERVENTIONS:
        got = intervened(cache, chosen)
        for part, cleared in (("pages", chosen.pages), ("recurrent", chosen.recurrent)):
            olds, news = (jax.tree.leaves(getattr(c.state, part)) for c in (cache, got))
            for old, new in zip(olds, news, strict=True):
                assert np.asarray(old).any()
                np.testing.assert_array_equal(new, np.zeros_like(old) if cleared else old)
        np.testing.assert_array_equal(got.lengths, cache.lengths)


@both
def test_behind_a_cleared_state_only_attention_tells_prefixes_apart(name):
    """The first layer is recurrent and blind to the prefix: two prefixes give it the same state.
    With the attention cleared too, they give the same logits."""
    model, tokens = tiny_model(name), np.array([prompt(64, 7)] * 2)
    cache = prefilled(model, [prompt(64), prompt(64, 1)], ROOM)
    logits, states = {}, {}
    for chosen in INTERVENTIONS:
        out, after = forward(model, tokens, intervened(cache, chosen), np.array([9, 9]))
        logits[chosen], states[chosen] = np.asarray(out[:, :9]), after.recurrent.temporal[0]
    for chosen in (BASELINE, NO_KV, NO_STATE):
        assert np.abs(np.subtract(*logits[chosen])).max() > 1e-3
    for chosen in (NO_STATE, NEITHER):
        np.testing.assert_array_equal(*states[chosen])
    np.testing.assert_allclose(*logits[NEITHER], rtol=0, atol=1e-6)


def test_an_end_token_ends_an_answer_and_is_no_part_of_it():
    model = tiny_model()
    cache = prefilled(model, [prompt(64)] * 2, ROOM)
    rests = [prompt(5, 1), prompt(5, 2)]
    free = continued(model, cache, rests, [4, 1], 64)
    assert [len(tokens) for tokens in free] == [4, 1]
    ends = replace(model, config=replace(model.config, eos_token_ids=(free[0][0],)))
    assert continued(ends, cache, rests, [4, 1], 64)[0] == []


def test_a_probe_is_the_prompt_cut_before_its_question_and_behind_its_needle():
    tokenizer = tokenizer_of(tiny_model())
    generator = Generator(tokenizer, seed=2)
    for depth in (0.0, 0.5, 0.7):
        made = generator.instance("niah_single_1", 1024, 3, depth=depth)
        cut = make_probe(tokenizer, generator, 1024, depth, 3, 20)
        assert tokenizer.decode(cut.prefix + cut.rest) == made.prompt
        assert len(cut.prefix) % 64 == 0 and "\nWhat is" in tokenizer.decode(cut.rest)
        assert cut.references[0] in tokenizer.decode(cut.prefix)
        assert cut.max_new_tokens == 20
    with pytest.raises(ValueError, match="depth 1 of .* not within the"):
        make_probe(tokenizer, generator, 1024, 1.0, 3, 20)


def test_a_model_without_tokenizer_cannot_be_asked():
    with pytest.raises(ValueError, match="no tokenizer"):
        tokenizer_of(golden_model(MODELS[0]))


def test_accuracies_are_means_over_all_and_over_each_depth():
    scores = {"baseline": (1, 1, 0, 1), "zero-linear": (1, 0, 0, 1)}
    answers = [
        Answer(i.name, depth, at, 64, 70, float(scores.get(i.name, (0,) * 4)[at]), "", "")
        for i in INTERVENTIONS
        for at, depth in enumerate((0.1, 0.1, 0.9, 0.9))
    ]
    cells = accuracies(answers)
    assert [c.depth for c in cells[:3]] == ["all", "0.1", "0.9"]
    got = {(c.intervention, c.depth): c.accuracy for c in cells}
    assert got["baseline", "all"] == 0.75 and got["baseline", "0.1"] == 1
    assert got["zero-linear", "0.9"] == 0.5 and got["zero-both", "all"] == 0
    assert all(c.low <= c.accuracy <= c.high for c in cells)
    assert [c.n for c in cells[:3]] == [4, 2, 2]
    assert table(cells, "x").row_count == 4
    (axes,) = draw(cells, "x").axes
    assert len(axes.texts) == len(cells)
