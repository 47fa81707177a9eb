"""`dasc demo`: the same conversations cold and cached, through the real server, compared."""

import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dasc_jax.config import DascConfig
from dasc_jax.engine.config import EngineConfig
from dasc_jax.engine.engine import Engine
from dasc_jax.layout import account
from dasc_jax.model import Model
from dasc_jax.programs.arms import Answer, Arm, Outcome, ask, ask_all, outcome
from dasc_jax.programs.comparison import comparison_table, draw_outcomes, write_outcomes
from dasc_jax.programs.conversations import Conversations, Workload
from dasc_jax.programs.loading import load
from dasc_jax.programs.runtime import EMBEDDED, FAILED, ProgramError, complaints, machine, settle
from dasc_jax.programs.serving import serving
from dasc_jax.types import PAGE

MODEL_NAME = "demo"


@dataclass(frozen=True)
class DemoArgs:
    """Send the same conversations to the server without a prefix cache (cold) and with one, under
    one budget for state checkpoints, and compare.

    Several conversations share a system prompt and take turns, so that each comes back only after
    all others have run. dense keeps whole states, and few fit the budget; nr and wr keep the units
    that remember more than W_max tokens, so that more fit. nr starts the other units at zero, wr
    recomputes them from the last tokens of the prefix. Replies are the cold run's, so that every
    policy sees the same prompts. Computed in float32, on whatever device JAX finds.
    """

    conversations: int = 6
    """Conversations under one system prompt."""
    turns: int = 4
    """Turns of each."""
    system_tokens: int = 420
    """About how many tokens the system prompt has."""
    user_tokens: int = 100
    """About how many tokens a question has."""
    reply_tokens: int = 16
    """Tokens of an answer."""
    w_max: tuple[int, ...] = (16, 128)
    """Thresholds for nr and wr, in tokens."""
    int8: bool = True
    """Also run nr with int8 rows at the first threshold."""
    budget: int = 640 * 1024
    """Bytes for state checkpoints, the same for every policy."""
    model: Path = EMBEDDED
    """Checkpoint directory with a tokenizer."""
    out: Path = Path("out")
    """Directory for demo.jsonl (an object a policy) and demo.png."""
    compilation_cache: str = "auto"
    """Directory that keeps compiled steps for the next time. auto: $JAX_COMPILATION_CACHE_DIR,
    else one under ~/.cache; off: none."""

    @property
    def arms(self) -> list[Arm]:
        """Every arm, those that share an engine next to each other; the reference first."""
        lossy = [Arm(policy, w) for w in self.w_max for policy in ("nr", "wr")]
        int8 = [Arm("nr", w, "int8") for w in self.w_max[:1] if self.int8]
        return [Arm("dense", cold=True), Arm("dense"), *lossy, *int8]

    @property
    def workload(self) -> Workload:
        """The conversations; raises ValueError for a size below 1."""
        return Workload(self.conversations, self.turns, self.system_tokens, self.user_tokens)


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
    workload = args.workload
    settle(args.compilation_cache)
    model = load(args.model, "float32", console)
    if model.tokenizer is None:
        raise ValueError(f"{args.model} has no tokenizer; the demo writes its prompts as text")
    outcomes = run(args, workload, model, console)
    when = datetime.now(UTC).strftime("%Y-%m-%d")
    console.print()
    console.print(comparison_table(outcomes, _title(args, outcomes)))
    console.print(f"\n{command}\n{when}, {machine()}", highlight=False, soft_wrap=True)
    context = {"date": when, "machine": machine(), "command": command, "budget": args.budget}
    write_outcomes(outcomes, context, args.out / "demo.jsonl")
    draw_outcomes(outcomes, f"{when}, {machine()}", args.out / "demo.png")
    for name in ("demo.jsonl", "demo.png"):
        console.print(f"written: {args.out / name}", markup=False, highlight=False, soft_wrap=True)


def _title(args: DemoArgs, outcomes: Sequence[Outcome]) -> str:
    return (
        f"{args.conversations} conversations of {args.turns} turns, one system prompt,"
        f" {args.budget:,} bytes for checkpoints"
    )


def run(args: DemoArgs, workload: Workload, model: Model, console: Console) -> list[Outcome]:
    """The outcome of every arm, in their order.

    Raises:
        ValueError: a workload past the model's context, or a budget too small for a checkpoint.
    """
    outcomes: list[Outcome] = []
    prompts: list[tuple[int, ...]] = []
    cold: list[Answer] = []
    requests = workload.conversations * workload.turns
    with _progress(console) as bar:
        task = bar.add_task("", total=len(args.arms) * requests)

        def answered() -> None:
            bar.update(task, advance=1)

        for config, arms in groupby(args.arms, lambda arm: _config(args, arm, model)):
            engine = _build(model, config, bar)
            with serving(engine, MODEL_NAME) as url, _client(url) as client:
                for arm in arms:
                    bar.update(task, description=f"asking: {_label(arm)}")
                    one = _asker(client, arm, args.reply_tokens, model)
                    _settle_down(client, one, workload)
                    if arm.cold:
                        prompts, cold = _converse(workload, model, one, answered)
                    answers = cold if arm.cold else ask_all(prompts, one, answered)
                    size, slots = _capacity(engine)
                    outcomes.append(outcome(arm, answers, cold, size, slots))
    return outcomes


def _label(arm: Arm) -> str:
    return f"{arm.name}, W_max {arm.w_max}" if arm.w_max else arm.name


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console)


def _build(model: Model, config: EngineConfig, bar: Progress) -> Engine:
    task = bar.add_task("compiling", total=None)
    engine = Engine(
        model, config, lambda done, total: bar.update(task, completed=done, total=total)
    )
    bar.remove_task(task)
    return engine


def _config(args: DemoArgs, arm: Arm, model: Model) -> EngineConfig:
    """The engine of an arm. One request runs at a time, so few shapes compile; nr and wr at one
    threshold share an engine, and the policy goes with the request."""
    policy = "dense" if arm.policy == "dense" else "nr"
    turn = args.user_tokens + args.reply_tokens + 2 * PAGE
    context = -(-(args.system_tokens + PAGE + args.turns * turn) // PAGE) * PAGE
    return EngineConfig(
        dasc=DascConfig(arm.w_max, policy=policy, quantization=arm.quantization),
        max_context=min(context, model.config.max_context),
        max_running=1,
        prefill_tokens=max(256, -(-(max(args.w_max, default=0) + 3) // PAGE) * PAGE + PAGE),
        pages=2 + (args.conversations + 1) * (context // PAGE),
        checkpoint_bytes=args.budget,
        prefix_cache=not arm.cold,
    )


def _capacity(engine: Engine) -> tuple[int, int]:
    """Bytes of a checkpoint, and how many the pool holds."""
    loop, quantization = engine.loop, engine.config.dasc.quantization
    stored = replace(engine.model.config, dtype=engine.model.dtype)
    cost = account(stored, loop.plan, tp=1, quantization=quantization)
    return cost.bytes_per_slot, loop.residency.checkpoint_slots


@contextmanager
def _client(url: str) -> Iterator[Any]:
    try:
        from openai import OpenAI
    except ImportError as error:
        raise ValueError("the demo needs the openai package: pip install openai") from error
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client


def _asker(client: Any, arm: Arm, reply: int, model: Model) -> Callable[[Sequence[int]], Answer]:
    return lambda prompt: ask(client, MODEL_NAME, prompt, arm, reply, model.config.vocab_size)


def _settle_down(client: Any, one: Callable[..., Answer], workload: Workload) -> None:
    """Run every kind of step once, untimed, then forget what that cached."""
    first = tuple(range(1, 200))
    one(first[:130])
    one(first)
    client.with_options(base_url=str(client.base_url).removesuffix("v1/")).post(
        "/flush_cache", cast_to=object
    )


def _converse(
    workload: Workload,
    model: Model,
    one: Callable[[Sequence[int]], Answer],
    progress: Callable[[], None],
) -> tuple[list[tuple[int, ...]], list[Answer]]:
    """Hold the conversations; gives their prompts and answers in the order of arrival."""
    conversations = Conversations(workload, model.tokenizer)
    prompts, answers = [], []
    for conversation, _ in workload.order():
        prompts.append(conversations.ask(conversation))
        answers.append(one(prompts[-1]))
        conversations.answer(conversation, answers[-1].tokens)
        progress()
    return prompts, answers
