"""The program of the quality study: RULER cold and reused, the paper's tables, drift; one command.

It writes a line for every model, task, length and arm as soon as it is measured, starts again where
it was stopped, and makes a page of tables from the lines.
"""

import csv
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path

import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dasc_jax.analysis import lineage, tables
from dasc_jax.engine.engine import Engine
from dasc_jax.evals.arms import Arm
from dasc_jax.evals.quality.args import QualityArgs, check, sizes, task_names
from dasc_jax.evals.quality.cells import COLD, EXACT, Cell, Note, Run, Store
from dasc_jax.evals.quality.measure import (
    Lines,
    Suite,
    arms_of,
    engine_config,
    key_of,
    longest_window,
    make_suite,
)
from dasc_jax.evals.quality.merge import merge
from dasc_jax.evals.quality.page import write_page
from dasc_jax.evals.quality.plans import plan_rows
from dasc_jax.evals.reuse import Reuse
from dasc_jax.evals.ruler import TASKS
from dasc_jax.horizons import retention_horizons
from dasc_jax.model import Model
from dasc_jax.plan import make_plan
from dasc_jax.programs.loading import build, load
from dasc_jax.programs.runtime import FAILED, ProgramError, complaints, machine, settle

PROBES = 64
"""Most questions of Table 1a that run together: all logits of their prefill steps exist."""


class BudgetSpentError(Exception):
    """The next piece of work would end after the device budget."""


@dataclass
class Clock:
    """Refuses work that would end after `budget` seconds from `begun` (None: never)."""

    budget: float | None
    begun: float

    def check(self, ahead: float = 0.0) -> None:
        """`ahead` is what the work is expected to take, in seconds."""
        spent = time.perf_counter() - self.begun
        if self.budget is not None and spent + ahead > self.budget:
            raise BudgetSpentError(f"{spent:.0f} of {self.budget:.0f} seconds spent")


def main(argv: list[str] | None = None) -> int:
    """Runs the program on `argv` (default: the command line); returns the exit code."""
    begun = time.perf_counter()
    args = tyro.cli(QualityArgs, args=argv, prog="reproduce_quality")
    words = sys.argv[1:] if argv is None else argv
    console = Console(soft_wrap=True, highlight=False)
    try:
        with complaints():
            check(args)
            settle(args.compilation_cache)
            store = Store(args.out)
            command = shlex.join(["scripts/reproduce_quality.py", *words])
            run = Run(machine(), datetime.now(UTC).date().isoformat(), command)
            for path in args.merge:
                console.print(f"{path}: {merge(store, path)} new lines", markup=False)
            try:
                for path in args.models if args.parts else ():
                    study(path, args, store, run, Clock(args.device_budget, begun), console)
            except BudgetSpentError as spent:
                console.print(f"stopped: {spent}; the same command goes on from here", markup=False)
            page = write_page(store, args.out)
    except ProgramError:
        return FAILED
    except KeyboardInterrupt:
        return 130
    console.print(f"written: {args.out} ({len(store.cells)} lines), {page}", markup=False)
    return 0


def study(
    path: Path, args: QualityArgs, store: Store, run: Run, clock: Clock, console: Console
) -> None:
    """Measure what the store lacks of one model.

    Raises:
        BudgetSpentError: between two pieces of work. ValueError: the store has other settings.
    """
    model = load(path, args.dtype, Console(stderr=True))
    name = path.resolve().name
    horizons = retention_horizons(model)
    if {"cold", "sweep", "random"} & set(args.parts):
        lines = Lines(model, name, make_plan(horizons, 0).id[:12], run)
        _ruler(lines, args, store, clock, console)
    for w_max in args.w_max if "plans" in args.parts else ():
        if w_max and not any(row["w_max"] == w_max for row in store.noted("plan", name)):
            store.add([Note("plan", name, plan_rows(horizons, w_max, args.seeds), run)])
    if "tables" in args.parts and not store.noted("table_1b", name):
        clock.check()
        store.add(note._replace(run=run) for note in _tables(path, name, args))
    for w_max in args.drift_w_max if "drift" in args.parts else ():
        if not any(row["w_max"] == w_max for row in store.noted("drift", name)):
            clock.check()
            store.add(note._replace(run=run) for note in _drift(model, path, name, w_max, args))


def _ruler(lines: Lines, args: QualityArgs, store: Store, clock: Clock, console: Console) -> None:
    """Cold runs of every length first, then the arms of a length after those of another."""
    for length in args.lengths:
        store.require(lines.name, length, args.rounds, weights=lines.weights, dtype=args.dtype,
                      n=args.n, generator_seed=args.seed)  # fmt: skip
    tokenizer = lines.model.tokenizer
    if tokenizer is None:
        raise ValueError(f"{lines.name} has no tokenizer: RULER's tasks are text")
    tasks = [task for task in TASKS if task in {task_names()[given] for given in args.tasks}]
    suites = [make_suite(tokenizer, tasks, n, args.n, args.seed) for n in args.lengths]
    for text in (text for suite in suites for text in suite.left_out):
        console.print(f"left out: {text}", markup=False)
    suites = [suite for suite in suites if suite.prompts]
    arms = [arm for arm in arms_of(args.w_max, args.quantizations, args.seeds)
            if ("random" if arm.selector == "random" else "sweep") in args.parts
            or (key_of(arm) == EXACT and "random" in args.parts)]  # fmt: skip
    cold = [s for s in suites if "cold" in args.parts and _lacks(store, lines, s, COLD)]
    todo = [(s, [a for a in arms if _lacks(store, lines, s, key_of(a))]) for s in suites]
    todo = [(suite, some) for suite, some in todo if some]
    total = len(cold) + sum(len(some) for _, some in todo)
    if not total:
        return
    clock.check()
    window = longest_window(lines.model, [arm.w_max for arm in arms])
    needed = [suite for suite in suites if suite in cold or suite in [s for s, _ in todo]]
    config = engine_config(sizes(args), needed, args.rounds, window)
    engine = build(lines.model, config, Console(stderr=True), f"{lines.name}: compiling")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as bar:
        row = bar.add_task(lines.name, total=total)
        for suite in cold:
            clock.check()
            begun = time.perf_counter()
            _keep(store, lines.cold(engine, suite), begun, console)
            bar.advance(row)
        for suite, some in todo:
            for _ in _replays(lines, engine, suite, some, args, store, clock, console):
                bar.advance(row)


def _replays(
    lines: Lines, engine: Engine, suite: Suite, arms: Sequence[Arm], args: QualityArgs,
    store: Store, clock: Clock, console: Console,
):  # fmt: skip
    """Warm up once, and yield behind every arm."""
    clock.check()
    reuse = Reuse(engine, suite.prompts, suite.limits)
    slowest: dict[str, float] = {}
    for arm in arms:
        policy = arm.dasc.policy
        clock.check(slowest.get(policy, max(slowest.values(), default=0.0)))
        begun = time.perf_counter()
        exact = store.select(lines.name, suite.length, EXACT)
        dense = {task: np.array(cell.scores) for task, cell in exact.items()}
        replay = reuse.replay(arm, args.rounds)
        made = lines.replayed(suite, replay, None if key_of(arm) == EXACT else dense)
        _keep(store, made, begun, console)
        slowest[policy] = max(slowest.get(policy, 0.0), time.perf_counter() - begun)
        yield arm


def _keep(store: Store, made, begun: float, console: Console) -> None:
    """Store the lines that are new, and say what they are in one."""
    made = list(made)
    first: Cell = made[0]
    known = store.select(first.model, first.length, first.arm)
    store.add(cell for cell in made if cell.task not in known)
    words = " ".join(str(word) for word in first.arm if word not in (None, "dasc"))
    score = np.mean([cell.score for cell in made])
    moved = [cell.difference for cell in made if cell.difference is not None]
    against = f" ({np.mean(moved):+.4f} to dense)" if moved else ""
    faults = "; ".join(dict.fromkeys(fault for cell in made for fault in cell.faults))
    console.print(
        f"{first.model} {first.length}: {words}: {score:.4f}{against},"
        f" {time.perf_counter() - begun:.1f} s {faults}",
        markup=False,
    )


def _lacks(store: Store, lines: Lines, suite: Suite, arm) -> bool:
    known = store.select(lines.name, suite.length, arm)
    return any(task not in known for task in suite.tasks)


def _tables(path: Path, name: str, args: QualityArgs) -> list[Note]:
    """Table 1 and the horizon figures by `dasc tables`, their files below the page's folder."""
    out = args.out.with_suffix("") / name
    lengths = [str(n) for n in args.prefix_lengths]
    failed = tables.main(
        ["--model", str(path), "--out", str(out), "--n", str(args.needles),
         "--prefixes", str(args.prefixes), "--lengths", *lengths, "--dtype", args.dtype,
         "--batch", str(min(sizes(args).max_running, PROBES)), "--seed", str(args.seed),
         "--compilation-cache", args.compilation_cache]
    )  # fmt: skip
    if failed:
        raise ProgramError
    made = []
    for kind in ("table_1a", "table_1b"):
        with (out / f"{kind}.csv").open(newline="") as file:
            made += [Note(kind, name, dict(row)) for row in csv.DictReader(file)]
    return made


def _drift(model: Model, path: Path, name: str, w_max: int, args: QualityArgs) -> list[Note]:
    with resources.as_file(resources.files("dasc_jax.evals") / "data" / "essays.txt") as text:
        wanted = lineage.LineageArgs(
            model=path, w_max=w_max, turns=args.turns, conversations=args.conversations,
            text=text, dtype=args.dtype, seed=args.seed,
        )  # fmt: skip
        rows = lineage.report(model, wanted, Console(stderr=True))
    return [Note("drift", name, {"w_max": w_max, **asdict(row)}) for row in rows]


if __name__ == "__main__":
    sys.exit(main())
