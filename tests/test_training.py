"""Training of the demo checkpoints: its data, its schedule, and that a stopped run goes on as if it
had not stopped."""

import json
import struct
import zlib
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dasc_jax as dj
from dasc_jax.evals.pools import split_of
from dasc_jax.evals.ruler import TASKS, Generator
from dasc_jax.tokenizer import load_tokenizer, save_tokenizer
from dasc_jax.training import bpe, card, data, novels, train
from dasc_jax.training.loader import batches
from dasc_jax.training.minis import MINIS, VOCABULARY, initial_params, mini_config
from dasc_jax.training.step import learning_rate

NOVEL = [f"It was the {word} day of a long year, and nobody came." for word in "abcdefghij"] * 40


def r_strings(lines):
    """A serialised R character vector, as R's lazy-load files hold it."""
    out = b"X\n" + struct.pack(">4I", 3, 0x040003, 0x030500, 5) + b"UTF-8"
    out += struct.pack(">2I", novels.STRINGS, len(lines))
    for line in lines:
        if line is None:
            out += struct.pack(">2I", 9, novels.MISSING)
        else:
            out += struct.pack(">2I", 0x00040009, len(line.encode())) + line.encode()
    return struct.pack(">I", len(out)) + zlib.compress(out)


@pytest.fixture(scope="module")
def novels_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("novels") / "Rdata.rdb"
    path.write_bytes(b"".join(r_strings(NOVEL) for _ in range(6)))
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    essays = "\n".join(NOVEL)
    texts = bpe.training_texts(essays, seed=0, prompts=1)
    save_tokenizer(bpe.train_bpe(texts, 600), directory)
    return data.Corpus(str(directory / "tokenizer.json"), essays)


@given(st.lists(st.one_of(st.none(), st.text(st.characters(codec="utf-8"))), max_size=20))
def test_novels_are_read_from_the_lazy_load_format_of_r(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("r") / "Rdata.rdb"
    path.write_bytes(r_strings(lines) + r_strings(["one", "two", "", " three "]))
    first, second = novels.read_novels(path)
    assert second == "one two\nthree"
    words = [word for line in lines if line is not None for word in line.split()]
    assert first.split() == words


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-3], lambda b: b"text, no archive", lambda b: b[5:]]
)
def test_a_file_that_is_no_lazy_load_file_is_refused(tmp_path, damage):
    path = tmp_path / "Rdata.rdb"
    path.write_bytes(damage(r_strings(["one"])))
    with pytest.raises(novels.TextError):
        novels.read_novels(path)


def test_digits_stand_alone_and_text_survives(corpus, tmp_path):
    tokenizer = load_tokenizer(str(Path(corpus.tokenizer_file).parent))
    text = "The number is 1234567; käse <3f2504e0>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert [tokenizer.decode([i]).strip() for i in ids].count("1") == 1
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)


@pytest.mark.parametrize("length", [512, 1024])
def test_rows_weigh_their_answers_and_nothing_behind_their_end(corpus, length):
    batch = data.Rows(corpus, 3).batch(3, 0, 16, length)
    position = np.arange(length)
    for tokens, end, answer in zip(batch.tokens, batch.lengths, batch.answer, strict=True):
        assert 0 < end <= length
        assert not answer[position >= end].any()
        assert (tokens[position >= end] == bpe.END_OF_TEXT).all()
        weights = answer[answer > 0]
        # A row that was cut has lost some of the tokens that its weights were made for.
        assert not weights.size or (np.ptp(weights) == 0 < weights[0] <= 1.001 * weights.size**-0.5)
    assert (batch.answer > 0).any()


def test_batches_are_a_function_of_seed_and_step(corpus):
    plan = data.Plan(corpus, seed=5, steps=40, tokens=8192, rows=2)
    made = list(batches(plan, 36, processes=0))
    assert len(made) == 4
    for other in (list(batches(plan, 36, processes=2)), list(batches(plan, 36, processes=0))):
        for one, two in zip(made, other, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
    assert not np.array_equal(made[0].tokens, made[1].tokens)


def test_no_row_holds_an_item_of_the_evaluation(corpus):
    """The needles of rows are of the training pools, those of evaluations of the others."""
    rows = data.Rows(corpus, 7)
    evaluation = Generator(rows._tokenizer, split="eval", essays=corpus.essays)
    asked = {
        reference
        for task in TASKS
        if task.startswith("niah")
        for index in range(3)
        for reference in evaluation.instance(task, 1024, index).references
    }
    assert all(split_of(reference) == "eval" for reference in asked)
    text = []
    for seed in range(120):
        _, parts = rows._row(Random(seed), 1024)
        text.append(rows._tokenizer.decode([token for ids, _ in parts for token in ids]))
    words = {word.strip(".,") for row in text for word in row.split()}
    numbers = {word for word in words if word.isdigit() and len(word) == 7}
    uuids = {word for word in words if len(word) == 36 and word.count("-") == 4}
    assert len(numbers) > 50 and len(uuids) > 10
    assert {split_of(item) for item in numbers | uuids} == {"train"}
    assert not asked & words


def test_row_lengths_grow_and_the_rate_warms_up_and_falls():
    lengths = [data.row_length(0, step, 1000) for step in range(1000)]
    assert set(lengths[:350]) == {512} and max(lengths) == 4096
    assert np.mean(lengths[:550]) < np.mean(lengths[550:700]) < np.mean(lengths[700:])
    rates = [learning_rate(step, 1.0, 1000) for step in range(1000)]
    assert np.argmax(rates) in (99, 100) and rates[0] < 0.02 and 0.05 <= rates[-1] < 0.051
    assert max(rates) <= 1.0


@pytest.mark.parametrize("name", MINIS)
def test_a_mini_has_every_feature_of_its_architecture(name):
    config = mini_config(name)
    count = sum(value.size for value in initial_params(config, 0).values())
    assert 6e6 <= count <= 7e6
    assert config.delta.key_dim >= 64 and config.max_context >= 4096
    assert config.layer_kinds == ("delta", "delta", "delta", "attention") * 2
    assert config.moe is not None and config.moe.shared_intermediate


def test_an_unknown_mini_is_refused(novels_file, tmp_path):
    with pytest.raises(SystemExit, match="unknown mini 'llama'"):
        train.main(["llama", "--novels", str(novels_file), "--out", str(tmp_path)])


@pytest.mark.slow
def test_a_stopped_run_goes_on_where_it_was_and_publishes_what_it_learned(novels_file, tmp_path):
    base = ["qwen3-next-mini", "--novels", str(novels_file), "--batch-tokens", "512"]
    base += ["--processes", "0", "--log-steps", "1"]
    common = [*base, "--steps", "3"]
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert train.main([*common, "--out", str(whole)]) == 0
    assert train.main([*common, "--out", str(halves), "--stop-seconds", "0"]) == 3
    assert train.main([*common, "--out", str(halves)]) == 0
    one, two = (dj.load_model(path / "model") for path in (whole, halves))
    assert one.config == mini_config("qwen3-next-mini")
    for name, value in one.params.items():
        np.testing.assert_array_equal(value, two.params[name], err_msg=name)
    assert len((halves / "train.jsonl").read_text().splitlines()) == 3
    assert json.loads((whole / "train.jsonl").read_text().splitlines()[0])["step"] == 1
    assert card.check_sums(whole / "model") == []
    again = [*base, "--out", str(tmp_path / "again"), "--init", str(whole / "model")]
    assert train.main([*again, "--steps", "1", "--peak-rate", "0"]) == 0
    for name, value in dj.load_model(tmp_path / "again" / "model").params.items():
        np.testing.assert_array_equal(value, one.params[name], err_msg=name)
    (whole / "model" / "tokenizer.json").write_text("{}")
    assert card.check_sums(whole / "model") == ["tokenizer.json"]
    assert one.tokenizer is not None and len(one.tokenizer) == VOCABULARY
