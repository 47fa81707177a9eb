"""`dasc eval-tasks`: the end tasks of the DASC paper against a running server.

Section 5.1 and appendix C.3: every problem is answered several times, with seeds fixed by question
and try and so shared by all arms; the unique problem is the statistical unit; requests run through
normal concurrent serving, whatever the prefix cache does for them, and the hit rate is aggregated
over tokens beside the score.
"""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dasc_jax.evals.task_client import SAMPLING, Api, Client, ServerError, seed_of
from dasc_jax.evals.task_files import Question, load_questions
from dasc_jax.evals.task_results import (
    TASKS,
    Generation,
    read_generations,
    score_answer,
    summarise,
    table,
)


@dataclass(frozen=True)
class TasksArgs:
    """Answer the problems of a benchmark through a running server, and score the answers.

    FILE is the benchmark as its authors publish it (.json, .jsonl or .csv). Every generation is a
    line of OUT. MMLU-Pro, GPQA, AIME, HMMT and IMO-AnswerBench are scored by accuracy, LoCoMo by
    token F1; nothing is judged by another model.

    Example: dasc eval-tasks --task gpqa --file gpqa_diamond.csv --out gpqa.jsonl --sampling kimi
    """

    task: Literal["mmlu_pro", "gpqa", "aime", "hmmt", "imo", "locomo"]
    """The benchmark."""
    file: tuple[Path, ...]
    """Its file, or several (AIME I and II)."""
    out: Path
    """Where the generations go, as JSON lines."""
    url: str = "http://127.0.0.1:8000"
    """The server."""
    model: str | None = None
    """The model to ask for; by default the first that the server lists."""
    api: Api = "chat"
    """completions sends the bare prompt, for models without a chat template."""
    sampling: Literal["kimi", "qwen", "greedy"] = "kimi"
    """The paper's settings for Kimi-Linear or Qwen3-Next; LoCoMo is always greedy."""
    state_policy: Literal["dense", "nr", "wr"] | None = None
    """Load policy of every request; by default the server's."""
    repeats: int | None = None
    """Generations a problem; by default the paper's."""
    limit: int | None = None
    """Only the first so many problems."""
    max_tokens: int | None = None
    """Longest answer; by default 4096 tokens, for LoCoMo 64."""
    concurrency: int = 32
    """Requests at once."""
    timeout: float = 3600.0
    """Seconds to wait for one answer."""
    resume: bool = False
    """Keep what OUT already holds, and generate the rest."""


def main(argv: list[str] | None = None) -> int:
    """Runs the program on `argv` (default: the command line); returns the exit code."""
    args = tyro.cli(TasksArgs, args=argv, prog="dasc eval-tasks")
    console = Console()
    try:
        questions = load_questions(args.task, args.file)[: args.limit]
        for name in ("repeats", "limit", "max_tokens", "concurrency"):
            if (value := getattr(args, name)) is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        generations = run(args, questions, console)
    except (OSError, ValueError, ServerError) as error:
        Console(stderr=True, soft_wrap=True).print(f"error: {error}", markup=False, highlight=False)
        return 1
    summary = summarise(generations)
    console.print(table(args.task, summary))
    if summary.failed == summary.generations:
        console.print(f"the server refused every request: {generations[0].error}", markup=False)
        return 1
    return 0


def run(args: TasksArgs, questions: Sequence[Question], console: Console) -> list[Generation]:
    """Generate what `args.out` lacks, appending line by line; all generations, by question and try.

    Raises:
        ValueError: `args.out` exists without `resume`, or holds another run.
        ServerError: the server is gone; what was generated is in the file.
    """
    task = TASKS[args.task]
    with Client(
        args.url, args.model, args.api, args.concurrency, args.timeout, args.state_policy
    ) as client:
        found = _earlier(args, client, {question.id for question in questions})
        done = {(g.question_id, g.try_id) for g in found}
        attempts = range(args.repeats or task.repeats)
        # Tries of one question follow on each other, and questions keep the file's order.
        todo = [(q, t) for q in questions for t in attempts if (q.id, t) not in done]
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a", encoding="utf-8") as file, _progress(console) as bar:
            row = bar.add_task(args.task, total=len(todo) + len(found), completed=len(found))
            for generation in _generate(args, client, todo):
                file.write(json.dumps(asdict(generation), ensure_ascii=False) + "\n")
                file.flush()
                found.append(generation)
                bar.advance(row)
    place = {question.id: at for at, question in enumerate(questions)}
    return sorted(found, key=lambda g: (place[g.question_id], g.try_id))


def _generate(
    args: TasksArgs, client: Client, todo: Sequence[tuple[Question, int]]
) -> Iterator[Generation]:
    """Generations as they end; the first fault of the server ends them all."""
    with ThreadPoolExecutor(args.concurrency) as threads:
        futures = [threads.submit(_one, args, client, q, attempt) for q, attempt in todo]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def _one(args: TasksArgs, client: Client, question: Question, attempt: int) -> Generation:
    task, setting, seed = TASKS[args.task], _setting(args, client), seed_of(question.id, attempt)
    sampling, limit = SAMPLING[setting["sampling"]], args.max_tokens or task.max_tokens
    reply = client.ask(question.prompt, sampling, seed, limit, task.stop)
    answer, score = score_answer(args.task, question, reply.text)
    return Generation(
        **setting,
        question_id=question.id,
        try_id=attempt,
        seed=seed,
        reference=question.reference,
        answer=answer,
        score=0.0 if reply.error else score,
        **asdict(reply),
    )


def _setting(args: TasksArgs, client: Client) -> dict[str, Any]:
    """What must be the same in all lines of one file."""
    return {
        "task": args.task,
        "model": client.model,
        "api": args.api,
        "sampling": "greedy" if args.task == "locomo" else args.sampling,
        "state_policy": args.state_policy,
    }


def _earlier(args: TasksArgs, client: Client, wanted: set[str]) -> list[Generation]:
    if not args.out.exists():
        return []
    if not args.resume:
        raise ValueError(f"{args.out} exists; --resume keeps what it holds")
    setting, found = _setting(args, client), read_generations(args.out)
    for generation in found:
        other = {name: getattr(generation, name) for name in setting}
        if other != setting:
            raise ValueError(f"{args.out} holds another run: {other}, not {setting}")
    attempts = args.repeats or TASKS[args.task].repeats
    return [g for g in found if g.question_id in wanted and g.try_id < attempts]


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console)
