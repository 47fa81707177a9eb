import json
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dasc_jax.evals.pools import Split
from dasc_jax.evals.ruler import (
    NEW_TOKENS,
    SHORT,
    TASKS,
    Generator,
    Instance,
    expected_answer,
    read_jsonl,
    score,
    write_jsonl,
)
from dasc_jax.tokenizer import load_tokenizer, write_byte_tokenizer
from tests.small_bpe import small_bpe, small_essays

ROOT = Path(__file__).resolve().parent.parent
COARSE = {"niah_multikey_2", "niah_multikey_3"}
"""Haystacks whose smallest piece, a needle sentence, is more than a tenth of a short length."""


@cache
def tokenizer(kind: str):
    if kind == "bpe":
        return small_bpe()
    with TemporaryDirectory() as directory:
        write_byte_tokenizer(directory)
        return load_tokenizer(directory)


@cache
def generator(kind: str = "bpe", split: Split = "eval", seed: int = 0) -> Generator:
    return Generator(tokenizer(kind), split=split, seed=seed, essays=small_essays())


def tokens(kind: str, text: str) -> int:
    return len(tokenizer(kind).encode(text))


@pytest.mark.parametrize("task", TASKS)
@settings(max_examples=8)
@given(
    kind=st.sampled_from(["bpe", "bytes"]),
    split=st.sampled_from(["train", "eval"]),
    length=st.integers(256, 4096),
    index=st.integers(0, 10**6),
)
def test_an_instance_fills_its_length_and_never_passes_it(task, kind, split, length, index):
    try:
        made = generator(kind, split).instance(task, length, index)
    except ValueError as error:
        smallest = {"bpe": 1100, "bytes": 2100}[kind]
        assert length < smallest, error
        assert str(length) in str(error) and str(length - NEW_TOKENS[task]) in str(error)
        return
    used = tokens(kind, made.prompt) + made.max_new_tokens
    assert used <= length
    shortfall = length - used
    largest = max(tokens(kind, line) for line in made.prompt.split("\n")) if task in COARSE else 0
    assert shortfall <= max(0.1 * length, largest + 2)
    assert made.max_new_tokens == NEW_TOKENS[task]


@pytest.mark.parametrize("task", TASKS)
@settings(max_examples=5)
@given(split=st.sampled_from(["train", "eval"]), index=st.integers(0, 10**6))
def test_the_expected_answer_scores_one_and_the_prompts_end_scores_less(task, split, index):
    made = generator(split=split).instance(task, 1536, index)
    assert score(made, made.references, expected_answer(made)) == 1
    assert score(task, made.references, expected_answer(made).upper()) == 1
    assert score(made, made.references, made.prompt.rsplit("\n", 1)[1]) < 1
    assert not made.prompt.endswith(" ") and expected_answer(made).startswith(" ")


def test_scores_count_all_references_except_in_question_answering():
    assert score("vt", ("ABC", "DEF", "GHI", "JKL"), "abc, def and JKLM") == 0.75
    assert score("qa_1", ("red", "blue"), "It is Blue.") == 1
    assert score("qa_2", ("red", "blue"), "green") == 0


def test_names_are_rulers_and_the_papers():
    assert len(TASKS) == 13 == len(set(SHORT.values()))
    assert {SHORT[task] for task in ("qa_1", "qa_2")} == {"QA-S", "QA-H"}
    assert SHORT["niah_multivalue"] == "MV" and SHORT["niah_multiquery"] == "MQ"
    assert set(NEW_TOKENS.values()) == {128, 30, 120, 50, 32}


@pytest.mark.parametrize("task", TASKS)
def test_instances_differ_between_indices_seeds_and_splits(task):
    made = [
        generator("bpe", split, seed).instance(task, 1280, index).prompt
        for split, seed, index in (("eval", 0, 0), ("eval", 0, 1), ("eval", 1, 0), ("train", 0, 0))
    ]
    assert len(set(made)) == 4


def test_an_instance_is_the_same_in_a_process_with_other_hashes_and_history(tmp_path):
    code = """
import sys
from dasc_jax.evals.ruler import *
from dasc_jax.tokenizer import load_tokenizer
made = Generator(load_tokenizer(sys.argv[1]), seed=3, essays=open(sys.argv[2]).read())
write_jsonl(sys.argv[3], [made.instance(task, 2560, 7) for task in reversed(TASKS)])
"""
    (tmp_path / "essays").write_text(small_essays())
    write_byte_tokenizer(tmp_path)
    arguments = [tmp_path, tmp_path / "essays", tmp_path / "made"]
    subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        check=True,
        cwd=ROOT,
        env={"PYTHONHASHSEED": "77", "PATH": ""},
    )
    here = generator("bytes", seed=3)
    assert read_jsonl(tmp_path / "made")[::-1] == [here.instance(t, 2560, 7) for t in TASKS]


@settings(max_examples=20)
@given(st.text(), st.lists(st.text(), min_size=1, max_size=3), st.integers())
def test_written_instances_are_read_back(tmp_path_factory, prompt, references, index):
    path = tmp_path_factory.mktemp("written") / "made.jsonl"
    made = [Instance(task, 4096, index, prompt, tuple(references), 128) for task in TASKS[:2]]
    write_jsonl(path, made)
    assert read_jsonl(path) == made
    lines = path.read_text().splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == [prompt] * 2


def test_what_cannot_be_made_is_refused_with_its_numbers():
    with pytest.raises(ValueError, match="niah_single_4.*niah_single_1"):
        generator().instance("niah_single_4", 1024, 0)
    with pytest.raises(ValueError, match="vt has no needle"):
        generator().instance("vt", 1024, 0, depth=0.5)
    with pytest.raises(ValueError, match="one needle"):
        generator().instance("niah_multivalue", 1024, 0, depth=0.5)
    with pytest.raises(ValueError, match=r"\[0, 1\], got 1.5"):
        generator().instance("niah_single_1", 1024, 0, depth=1.5)
    for task in TASKS:
        with pytest.raises(ValueError, match=f"{task} at 60 tokens"):
            generator().instance(task, 60, 0)
    with pytest.raises(ValueError, match="no words"):
        Generator(small_bpe(), essays=" ").instance("niah_single_2", 1024, 0)


def test_the_bundled_essays_are_long_enough_for_a_haystack_without_repetition():
    made = Generator(small_bpe()).instance("niah_single_2", 4096, 0)
    assert made.prompt.count(made.prompt[200:300]) == 1


@pytest.mark.slow
def test_a_wheel_carries_the_bundled_essays(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, check=True, cwd=ROOT, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert "dasc_jax/evals/data/essays.txt" in zipfile.ZipFile(wheel).namelist()
