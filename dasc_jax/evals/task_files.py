"""Benchmark files as their authors publish them -> questions with a prompt and a reference.

Read are .json (an array, or an object with one array), .jsonl and .csv. The hub serves most of
these benchmarks as .parquet, whose readers are larger than this library: write those as .jsonl
once, with `datasets.load_dataset(...).to_json(path)`.
"""

import csv
import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

LETTERS = "ABCDEFGHIJ"
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Question:
    """One problem: the unit of the statistics, however often it is answered.

    `reference` is a letter, an integer, a mathematical answer or a phrase, as the task says.
    `choices` counts the options of a multiple choice, `category` is LoCoMo's kind of question.
    """

    id: str
    prompt: str
    reference: str
    choices: int = 0
    category: int = 0


class TaskFileError(ValueError):
    """A file that is not of the format of its task: what is wrong, and in which record."""


def records(path: Path) -> list[Record]:
    """The records of a .json, .jsonl or .csv file.

    Raises:
        TaskFileError: another suffix, text that does not parse, no records.
        OSError: a file that cannot be read.
    """
    kind = path.suffix.lower()
    if kind == ".parquet":
        raise TaskFileError(
            f"{path} is a parquet file; write it as .jsonl once:"
            " datasets.load_dataset('parquet', data_files=...)['train'].to_json('name.jsonl')"
        )
    if kind not in (".json", ".jsonl", ".csv"):
        raise TaskFileError(f"{path} ends in {kind!r}; .json, .jsonl and .csv are read")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            found = list(_parse(file, kind))
    except (ValueError, csv.Error) as error:
        raise TaskFileError(f"{path} is no valid {kind} file: {error}") from error
    if not found or not all(isinstance(record, dict) for record in found):
        raise TaskFileError(f"{path} holds no records")
    return found


def _parse(file: Any, kind: str) -> Iterator[Any]:
    if kind == ".csv":
        csv.field_size_limit(2**24)  # a problem with its solution can pass the default of 128 KiB
        return iter(csv.DictReader(file))
    if kind == ".jsonl":
        return (json.loads(line) for line in file if line.strip())
    value = json.load(file)
    arrays = [v for v in value.values() if isinstance(v, list)] if isinstance(value, dict) else []
    return iter(arrays[0] if len(arrays) == 1 else value if isinstance(value, list) else [value])


def _field(record: Record, at: int, *names: str) -> Any:
    """The first of `names` that the record has."""
    for name in names:
        if record.get(name) not in (None, ""):
            return record[name]
    raise TaskFileError(
        f"record {at} has no {' or '.join(map(repr, names))}; it has {list(record)}"
    )


def _multiple_choice(question: str, options: list[str]) -> str:
    listed = "\n".join(f"({LETTERS[at]}) {text}" for at, text in enumerate(options))
    return (
        f"{question.strip()}\n\n{listed}\n\nThink step by step, then finish with"
        ' "The answer is (X)", where X is the letter of the right option.'
    )


def _problem(problem: str) -> str:
    return (
        f"{problem.strip()}\n\nReason step by step, and put your final answer within \\boxed{{}}."
    )


def mmlu_pro(path: Path) -> list[Question]:
    """TIGER-Lab/MMLU-Pro: `question_id`, `question`, `options` (3 to 10), `answer` (a letter).

    Without examples before the question: the DASC paper does not say that it gives any.
    """
    found = []
    for at, record in enumerate(records(path)):
        options = _field(record, at, "options")
        options = json.loads(options) if isinstance(options, str) else options
        answer = _field(record, at, "answer")
        if not 2 <= len(options) <= len(LETTERS) or answer not in LETTERS[: len(options)]:
            raise TaskFileError(f"record {at} has answer {answer!r} to {len(options)} options")
        prompt = _multiple_choice(_field(record, at, "question"), options)
        name = str(_field(record, at, "question_id"))
        found.append(Question(name, prompt, answer, len(options)))
    return found


def gpqa(path: Path) -> list[Question]:
    """gpqa_diamond.csv: `Question`, `Correct Answer`, `Incorrect Answer 1` to `3`, `Record ID`.

    The order of the options is drawn from the question alone, so it is the same in every run.
    """
    found = []
    for at, record in enumerate(records(path)):
        names = ["Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3))]
        options = [str(_field(record, at, name)).strip() for name in names]
        question = _field(record, at, "Question")
        name = str(record.get("Record ID") or hashlib.sha256(question.encode()).hexdigest()[:16])
        order = list(range(4))
        random.Random(f"gpqa:{name}").shuffle(order)
        prompt = _multiple_choice(question, [options[i] for i in order])
        found.append(Question(name, prompt, LETTERS[order.index(0)], 4))
    return found


def matharena(path: Path) -> list[Question]:
    """MathArena's AIME and HMMT: `problem_idx`, `problem`, `answer` (an integer, or LaTeX)."""
    found = []
    for at, record in enumerate(records(path)):
        name = str(_field(record, at, "problem_idx", "id"))
        answer = str(_field(record, at, "answer"))
        found.append(Question(name, _problem(_field(record, at, "problem")), answer))
    return found


def imo_answerbench(path: Path) -> list[Question]:
    """IMO-AnswerBench's answerbench.csv: `Problem ID`, `Problem`, `Short Answer`."""
    found = []
    for at, record in enumerate(records(path)):
        answer = str(_field(record, at, "Short Answer")).strip()
        prompt = _problem(_field(record, at, "Problem"))
        found.append(Question(str(_field(record, at, "Problem ID")), prompt, answer))
    return found


def locomo(path: Path) -> list[Question]:
    """locomo10.json: conversations (`sample_id`, `conversation`, `qa`); all categories, 1 to 5.

    Every question of a conversation follows on the same history, the cached prefix. A shared image
    appears as its caption. Category 5 is asked openly, without the two options of LoCoMo's script.
    """
    found = []
    for at, record in enumerate(records(path)):
        history = _history(_field(record, at, "conversation"))
        sample = record.get("sample_id", at)
        for number, item in enumerate(_field(record, at, "qa")):
            category = int(_field(item, number, "category"))
            reference = "" if category == 5 else str(_field(item, number, "answer"))
            prompt = history + _locomo_question(_field(item, number, "question"))
            found.append(Question(f"{sample}:{number}", prompt, reference, category=category))
    return found


def _history(conversation: Record) -> str:
    names = f"{conversation.get('speaker_a')} and {conversation.get('speaker_b')}"
    parts = [f"Conversations between {names}, each with its date.\n"]
    keys = [key for key in conversation if re.fullmatch(r"session_\d+", key)]
    for key in sorted(keys, key=lambda key: int(key.rpartition("_")[2])):
        parts.append(f"\nDate: {conversation.get(key + '_date_time', 'unknown')}\n")
        for turn in conversation[key]:
            image = f" [shares {turn['blip_caption']}]" if turn.get("blip_caption") else ""
            parts.append(f"{turn.get('speaker')}: {turn.get('text', '')}{image}\n")
    return "".join(parts)


def _locomo_question(question: str) -> str:
    return (
        "\nAnswer the question from the conversations above with a short phrase, in their own words"
        ' where possible; for a point in time give the date. If it was never said, answer "not'
        f' mentioned".\n\nQuestion: {question.strip()}\nShort answer:'
    )


LOADERS: dict[str, Callable[[Path], list[Question]]] = {
    "mmlu_pro": mmlu_pro,
    "gpqa": gpqa,
    "aime": matharena,
    "hmmt": matharena,
    "imo": imo_answerbench,
    "locomo": locomo,
}


def load_questions(task: str, paths: Sequence[Path]) -> list[Question]:
    """The questions of a benchmark in order; ids of several files begin with the file's name.

    Raises:
        TaskFileError: a file of another format, or two questions of one id.
        OSError: a file that cannot be read.
    """
    questions = [
        replace(question, id=f"{path.stem}/{question.id}") if len(paths) > 1 else question
        for path in paths
        for question in LOADERS[task](path)
    ]
    twice = [name for name, count in Counter(q.id for q in questions).items() if count > 1]
    if twice:
        raise TaskFileError(f"question ids occur more than once: {', '.join(twice[:5])}")
    return questions
