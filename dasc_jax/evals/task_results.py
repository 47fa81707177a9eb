"""Answers of the end tasks: what one is worth, the lines they are kept in, their summary."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from rich.table import Table

from dasc_jax.evals.scoring import choice_letter, final_answer, locomo_score, same_answer
from dasc_jax.evals.stats import Estimate, mean_interval
from dasc_jax.evals.task_files import Question, TaskFileError


@dataclass(frozen=True)
class Task:
    """A benchmark: how often each problem is answered (appendix C.3), and how long at most."""

    repeats: int
    kind: Literal["choice", "integer", "math", "phrase"]
    max_tokens: int = 4096
    stop: tuple[str, ...] = ()


TASKS = {
    "mmlu_pro": Task(8, "choice"),
    "gpqa": Task(16, "choice"),
    "aime": Task(32, "integer"),
    "hmmt": Task(32, "math"),
    "imo": Task(4, "math"),
    "locomo": Task(1, "phrase", 64, ("\n",)),
}


@dataclass(frozen=True)
class Generation:
    """One answer to one question: a line of the output file.

    `answer` is what was read out of `text`, `score` in [0, 1]. A request that the server refused
    has an `error` and scores 0.
    """

    task: str
    model: str
    api: str
    sampling: str
    state_policy: str | None
    question_id: str
    try_id: int
    seed: int
    reference: str
    answer: str | None
    score: float
    text: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reason: str | None
    error: str | None


@dataclass(frozen=True)
class Summary:
    """`score` is over questions, each the mean of its generations; `hit` is cached over prompt
    tokens; `failed` counts refused requests, `cut` answers that reached max_tokens."""

    score: Estimate
    generations: int
    hit: float
    failed: int
    cut: int


def read_generations(path: Path) -> list[Generation]:
    """The lines of an output file.

    Raises:
        TaskFileError: a line that is no generation, with its number.
    """
    found = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                found.append(Generation(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise TaskFileError(f"{path}:{number} is no generation: {error}") from error
    return found


def score_answer(task: str, question: Question, text: str) -> tuple[str | None, float]:
    """What `text` answers to `question`, and what that is worth, in [0, 1]."""
    kind = TASKS[task].kind
    if kind == "phrase":
        answer = text.strip()
        return answer, locomo_score(question.reference, answer, question.category)
    if kind == "choice":
        letter = choice_letter(text, question.choices)
        return letter, float(letter == question.reference)
    found = final_answer(text, integer=kind == "integer")
    return found, float(found is not None and same_answer(question.reference, found))


def question_scores(generations: Iterable[Generation]) -> dict[str, float]:
    """The mean score of every question: what arms are paired by."""
    scores: dict[str, list[float]] = {}
    for generation in generations:
        scores.setdefault(generation.question_id, []).append(generation.score)
    return {name: sum(values) / len(values) for name, values in scores.items()}


def summarise(generations: Sequence[Generation]) -> Summary:
    """Score, hit rate and failures of one run."""
    prompt = sum(g.prompt_tokens for g in generations)
    return Summary(
        score=mean_interval(np.array(list(question_scores(generations).values()))),
        generations=len(generations),
        hit=sum(g.cached_tokens for g in generations) / prompt if prompt else 0.0,
        failed=sum(g.error is not None for g in generations),
        cut=sum(g.finish_reason == "length" for g in generations),
    )


def table(task: str, summary: Summary) -> Table:
    """The summary as a table of one row."""
    result = Table(title=f"{task}: {'token F1' if task == 'locomo' else 'accuracy'}")
    for name in ("score", "95 % interval", "n", "generations", "hit rate", "cut", "failed"):
        result.add_column(name, justify="right")
    score = summary.score
    result.add_row(
        f"{score.mean:.4f}",
        f"{score.low:.4f} to {score.high:.4f}",
        str(score.n),
        str(summary.generations),
        f"{100 * summary.hit:.1f} %",
        str(summary.cut),
        str(summary.failed),
    )
    return result
