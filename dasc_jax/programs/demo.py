"""`dasc demo`: questions about long documents, answered cold and under every cache policy."""

import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dasc_jax.config import DascConfig
from dasc_jax.engine.config import EngineConfig
from dasc_jax.engine.engine import Engine
from dasc_jax.evals.arms import DENSE, Arm
from dasc_jax.evals.rounds import slot_bytes
from dasc_jax.model import Model
from dasc_jax.programs.comparison import (
    answers_table,
    draw_outcomes,
    policies_table,
    write_outcomes,
)
from dasc_jax.programs.documents import Document, Question, make_documents
from dasc_jax.programs.loading import build, load
from dasc_jax.programs.outcomes import Answer, Outcome, ask
from dasc_jax.programs.runtime import EMBEDDED, FAILED, ProgramError, complaints, machine, settle
from dasc_jax.programs.serving import serving
from dasc_jax.types import PAGE

MODEL_NAME = "demo"
ANSWER_TOKENS = 16


@dataclass(frozen=True)
class DemoArgs:
    """Ask a trained model questions about long documents, through the real server, and check the
    answers: without reuse (cold), then with the documents cached under every policy.

    The documents are read once, with exact checkpoints of the recurrent state. For each policy
    these are repacked into what it keeps, and the same questions are asked again: dense keeps whole
    states; nr and wr keep the units that remember more than W tokens, in float32 or int8. nr starts
    the other units at zero, wr recomputes them from the last tokens of the prefix. Questions about
    an essay ask for numbers hidden in it, the last of them cut in two by the checkpoint's boundary.
    Computed in float32, on whatever device JAX finds.
    """

    essays: int = 2
    """Essays with four numbers hidden in each; a question for each number."""
    facts: int = 1
    """Collections of facts about invented people and towns; four questions about each."""
    tokens: int = 1300
    """About how many tokens a document has."""
    w_max: tuple[int, ...] = (16, 512)
    """Thresholds W for nr and wr, in tokens."""
    model: Path = EMBEDDED
    """Checkpoint directory with a tokenizer."""
    out: Path = Path("out")
    """Directory for demo.jsonl (an object a policy) and demo.png."""
    compilation_cache: str = "auto"
    """Directory that keeps compiled steps for the next time. auto: $JAX_COMPILATION_CACHE_DIR,
    else one under ~/.cache; off: none."""
    seed: int = 0
    """Of the documents."""

    @property
    def arms(self) -> tuple[Arm, ...]:
        """The policies in the order of the tables."""
        kinds: tuple[dict[str, Any], ...] = (
            {"policy": "nr"},
            {"policy": "wr"},
            {"policy": "nr", "quantization": "int8"},
        )
        return (DENSE, *(Arm(DascConfig(w_max=w, **kind)) for w in self.w_max for kind in kinds))


def main(argv: list[str] | None = None) -> int:
    """Run the program on `argv` (default: the command line); returns the exit code."""
    args = tyro.cli(DemoArgs, args=argv, prog="dasc demo")
    console = Console()
    began = time.perf_counter()
    try:
        with complaints():
            _demo(args, " ".join(["dasc demo", shlex.join(argv or [])]).strip(), console)
    except ProgramError:
        return FAILED
    except KeyboardInterrupt:
        return 130
    console.print(f"{time.perf_counter() - began:.0f} seconds in all", highlight=False)
    return 0


def _demo(args: DemoArgs, command: str, console: Console) -> None:
    load_average = os.getloadavg()[0]
    settle(args.compilation_cache)
    model = load(args.model, "float32", console)
    if model.tokenizer is None:
        raise ValueError(f"{args.model} has no tokenizer; the demo writes its prompts as text")
    documents = make_documents(model.tokenizer, args.essays, args.facts, args.tokens, args.seed)
    outcomes = run(args.arms, documents, model, console)
    when = datetime.now(UTC).strftime("%Y-%m-%d")
    where = f"{when}, {machine()}, load average {load_average:.1f} at the start"
    console.print()
    console.print(answers_table(outcomes))
    console.print()
    console.print(policies_table(outcomes, _title(documents, args.model.name)))
    console.print(f"\n{command}\n{where}", highlight=False, soft_wrap=True)
    context = {"date": when, "machine": machine(), "load": load_average, "command": command}
    write_outcomes(outcomes, {**context, "model": args.model.name}, args.out / "demo.jsonl")
    draw_outcomes(outcomes, f"{args.model.name}, {where}", args.out / "demo.png")
    for name in ("demo.jsonl", "demo.png"):
        console.print(f"written: {args.out / name}", markup=False, highlight=False, soft_wrap=True)


def _title(documents: Sequence[Document], model: str) -> str:
    questions = sum(len(document.questions) for document in documents)
    return f"{model}: {questions} questions about {len(documents)} documents"


def run(
    arms: Sequence[Arm], documents: Sequence[Document], model: Model, console: Console
) -> list[Outcome]:
    """The outcome of a cold run, then of every arm, over one engine compiled once.

    Raises:
        ValueError: documents past the model's context.
    """
    questions = tuple(q for document in documents for q in document.questions)
    engine = build(model, _config(arms, questions), console)
    with serving(engine, MODEL_NAME) as url, _client(url) as client, _progress(console) as bar:
        task = bar.add_task("", total=len(documents) + (1 + len(arms)) * len(questions))

        def one(prompt: str, max_tokens: int = ANSWER_TOKENS) -> Answer:
            answer = ask(client, MODEL_NAME, prompt, max_tokens)
            bar.update(task, advance=1)
            return answer

        bar.update(task, description="asking: cold")
        answers = tuple(_cold(engine, one, question) for question in questions)
        dense = _checkpoint_bytes(engine)
        outcomes = [Outcome(None, questions, answers, dense, dense)]
        bar.update(task, description="reading documents")
        engine.flush_cache()
        for document in documents:
            one(document.text, 1)
        kept = engine.keep()
        for arm in arms:
            bar.update(task, description=f"asking: {arm.name}")
            engine.adopt(kept, arm.dasc)
            answers = tuple(one(question.prompt) for question in questions)
            outcomes.append(Outcome(arm, questions, answers, _checkpoint_bytes(engine), dense))
    return outcomes


def _cold(engine: Engine, one: Callable[[str], Answer], question: Question) -> Answer:
    engine.flush_cache()
    return one(question.prompt)


def _checkpoint_bytes(engine: Engine) -> int:
    return slot_bytes(engine.loop.device.memory.pool).total


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console)


def _config(arms: Sequence[Arm], questions: Sequence[Question]) -> EngineConfig:
    """One request runs at a time, so few shapes compile; nothing that is cached gets evicted."""
    context = _pages(max(question.tokens for question in questions) + ANSWER_TOKENS)
    refresh = _pages(max(arm.w_max for arm in arms) + 3) + 1
    return EngineConfig(
        dasc=DENSE.dasc,
        max_context=context * PAGE,
        max_running=1,
        prefill_tokens=max(4, refresh) * PAGE,
        pages=1 + (1 + len(questions)) * context,
        checkpoint_slots=3 * len(questions),
    )


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE)


@contextmanager
def _client(url: str) -> Iterator[Any]:
    try:
        from openai import OpenAI
    except ImportError as error:
        raise ValueError("the demo needs the openai package: pip install openai") from error
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client
