"""The demo asks what its documents say, counts right answers as such, and shows every policy."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console

from dasc_jax.config import DascConfig
from dasc_jax.evals.arms import DENSE, Arm
from dasc_jax.programs.comparison import (
    answers_table,
    draw_outcomes,
    policies_table,
    write_outcomes,
)
from dasc_jax.programs.demo import DemoArgs
from dasc_jax.programs.documents import Document, Question, make_documents
from dasc_jax.programs.outcomes import Answer, Outcome, wrong
from dasc_jax.programs.runtime import EMBEDDED
from dasc_jax.tokenizer import load_tokenizer
from dasc_jax.types import PAGE

ROOT = Path(__file__).resolve().parent.parent
NR = Arm(DascConfig(w_max=16, policy="nr"))


@cache
def documents(seed: int) -> tuple[Document, ...]:
    return make_documents(load_tokenizer(EMBEDDED), needles=2, facts=2, length=700, seed=seed)


@pytest.mark.parametrize("seed", [0, 1])
def test_every_question_is_answered_by_the_document_it_stands_behind(seed: int) -> None:
    for document in documents(seed):
        assert len({question.prompt for question in document.questions}) == 4
        for question in document.questions:
            assert question.prompt.startswith(document.text)
            asked = question.prompt.removeprefix(document.text)
            assert question.answer in document.text and question.answer not in asked


@pytest.mark.parametrize("seed", [0, 1])
def test_the_last_boundary_cuts_the_last_number_of_an_essay(seed: int) -> None:
    encode = load_tokenizer(EMBEDDED).encode
    for document in documents(seed)[:2]:
        tokens = encode(document.text)
        behind = load_tokenizer(EMBEDDED).decode(tokens[len(tokens) // PAGE * PAGE :])
        number = document.questions[-1].answer
        assert behind.endswith(".") and 3 <= len(behind.rstrip(".")) <= 5
        assert number.endswith(behind.rstrip("."))


@pytest.mark.parametrize("seed", [0, 1])
def test_prompts_share_all_pages_of_their_document_and_have_the_length_asked_for(seed: int) -> None:
    encode = load_tokenizer(EMBEDDED).encode
    for document in documents(seed):
        whole = len(encode(document.text)) // PAGE * PAGE
        for question in document.questions:
            tokens = encode(question.prompt)
            assert tokens[:whole] == encode(document.text)[:whole]
            assert question.tokens == len(tokens)
            assert 600 <= len(tokens) <= 700 + 8 * PAGE


def test_no_document_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="0 documents of needles and 0 of facts"):
        make_documents(load_tokenizer(EMBEDDED), 0, 0, 700)


def outcome(arm: Arm | None, *texts: str) -> Outcome:
    """Answers to two questions whose right answers are "1" and "2"."""
    questions = (Question("one?", "p", 100, "1"), Question("two?", "q", 100, "2"))
    cached = 64 if arm else 0
    answers = tuple(Answer(text, 100, cached, 16 if arm is NR else 0, 0.5) for text in texts)
    return Outcome(arm, questions, answers, 50 if arm is NR else 100, 100)


def test_an_answer_is_right_only_word_for_word() -> None:
    one = outcome(NR, "1", "2.")
    assert one.right == (True, False)
    assert (one.cached_tokens, one.prompt_tokens, one.replayed) == (128, 200, 16)
    assert (one.ttft, one.compression) == (0.5, 2.0)


def test_tables_and_files_name_every_policy_and_every_wrong_answer(tmp_path: Path) -> None:
    outcomes = [outcome(None, "1", "2"), outcome(DENSE, "1", "2"), outcome(NR, "1", "seven")]
    assert wrong(outcomes, 0) == {} and wrong(outcomes, 1) == {"nr W16": "seven"}
    console = Console(width=80)
    with console.capture() as capture:
        console.print(answers_table(outcomes), policies_table(outcomes, "title"))
    shown = capture.get()
    assert "nr W16: 'seven'" in shown and "2/3" in shown and "…" not in shown
    assert all(name in shown for name in ("cold", "dense", "1/2", "64.0 %", "2.00"))
    write_outcomes(outcomes, {"load": 0.1}, tmp_path / "new" / "demo.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "new" / "demo.jsonl").read_text().splitlines()]
    assert [row["right"] for row in rows] == [2, 2, 1]
    assert [row["compression"] for row in rows] == [None, 1.0, 2.0]
    assert rows[2]["answers"] == ["1", "seven"] and rows[2]["load"] == 0.1
    draw_outcomes(outcomes, "title", tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_the_demo_compares_dense_and_three_policies_a_threshold() -> None:
    names = [arm.name for arm in DemoArgs(w_max=(16, 512)).arms]
    assert names[:4] == ["dense", "nr W16", "wr W16", "nr W16 int8"] and len(set(names)) == 7


@pytest.mark.slow
def test_a_small_demo_answers_every_question_under_every_policy(tmp_path: Path) -> None:
    sizes = ["--essays", "1", "--facts", "1", "--tokens", "700", "--w-max", "16"]
    command = [sys.executable, str(ROOT / "scripts" / "demo.py"), *sizes, "--out", str(tmp_path)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=280)
    assert ran.returncode == 0
    assert "8 questions about 2 documents" in ran.stdout
    assert f"written: {tmp_path / 'demo.jsonl'}" in ran.stdout
    rows = [json.loads(line) for line in (tmp_path / "demo.jsonl").read_text().splitlines()]
    by_name = {row["name"]: row for row in rows}
    assert list(by_name) == ["cold", "dense", "nr W16", "wr W16", "nr W16 int8"]
    assert by_name["cold"]["cached_tokens"] == 0 and by_name["cold"]["right"] == 8
    assert by_name["dense"]["answers"] == by_name["cold"]["answers"]
    cached = {row["cached_tokens"] for row in rows[1:]}
    assert len(cached) == 1 and cached.pop() > 0.85 * rows[0]["prompt_tokens"]
    assert [row["replayed_tokens_mean"] for row in rows] == [0, 0, 0, 16, 0]
    assert 1 < by_name["nr W16"]["compression"] < by_name["nr W16 int8"]["compression"]
    ttft = [row["ttft_seconds_median"] for row in rows]
    assert max(ttft[1:]) < ttft[0]
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
