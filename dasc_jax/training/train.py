"""Train a demo checkpoint: `scripts/train_demo.py kimi-linear-mini --novels Rdata.rdb --out DIR`.

The run directory holds the tokenizer, the log (`train.jsonl`, an object every `--log-steps` steps)
and the last Orbax checkpoint of the training state, from which the same command resumes. When the
last step is done, `model/` holds the checkpoint to serve: bfloat16, tokenizer, model card, SHA-256
sums.
"""

import json
import math
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import tyro
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.progress import Progress, TextColumn

from dasc_jax.config import ModelConfig
from dasc_jax.tokenizer import save_tokenizer
from dasc_jax.training import card
from dasc_jax.training.bpe import train_bpe, training_texts
from dasc_jax.training.data import KINDS, Batch, Corpus, Plan
from dasc_jax.training.loader import batches
from dasc_jax.training.minis import MINIS, VOCABULARY, initial_params, mini_config
from dasc_jax.training.novels import HELD_OUT, read_novels
from dasc_jax.training.step import Report, TrainState, learning_rate, make_step, optimizer
from dasc_jax.weights import load_params


@dataclass(frozen=True)
class Args:
    """Train a small hybrid model to retrieve, on generated tasks and Jane Austen's novels."""

    name: tyro.conf.Positional[str]
    """kimi-linear-mini or qwen3-next-mini."""
    novels: Path
    """Rdata.rdb of Debian's package r-cran-janeaustenr (see dasc_jax/training/novels.py)."""
    out: Path
    """Run directory. If it holds a training state, the run goes on from there."""
    init: Path | None = None
    """Published checkpoint of the same mini to start from, instead of random weights."""
    steps: int = 6000
    """Optimiser steps of the whole run; fixes the schedules of learning rate and row length."""
    batch_tokens: int = 131072
    """Most tokens a step, padding included."""
    batch_rows: int = 64
    """Most rows a step."""
    peak_rate: float = 2e-3
    """Highest learning rate."""
    seed: int = 2026
    """Of initial weights and of all data."""
    processes: int = 12
    """Processes that make batches; 0 makes them in this one."""
    log_steps: int = 25
    """Steps a line of the log."""
    save_seconds: float = 120.0
    """Time between two training states."""
    stop_seconds: float = float("inf")
    """Save and stop after this long; the same command resumes."""


def main(argv: list[str] | None = None) -> int:
    """Run the trainer; 0 when all steps are done, 3 when it stopped early and can be resumed."""
    args = tyro.cli(Args, args=argv)
    if args.name not in MINIS:
        raise SystemExit(f"unknown mini {args.name!r}; there are {', '.join(MINIS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    essays = "\n".join(text for i, text in enumerate(read_novels(args.novels)) if i != HELD_OUT)
    tokenizer = args.out / "tokenizer"
    if not (tokenizer / "tokenizer.json").exists():
        save_tokenizer(train_bpe(training_texts(essays, args.seed), VOCABULARY), tokenizer)
    corpus = Corpus(str(tokenizer / "tokenizer.json"), essays)
    plan = Plan(corpus, args.seed, args.steps, args.batch_tokens, args.batch_rows)
    config = mini_config(args.name)
    state = run(args, config, plan)
    if int(state.step) < args.steps:
        print(f"stopped at step {int(state.step)} of {args.steps}; the same command resumes")
        return 3
    tokens = sum(math.prod(plan.shape(step)) for step in range(args.steps))
    card.publish(args.out, args.name, config, state.params, asdict(args), tokens)
    print(f"wrote {args.out / 'model'}")
    return 0


def run(args: Args, config: ModelConfig, plan: Plan) -> TrainState:
    """All steps that are left, or as many as the time allows."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    transform = optimizer()
    params = (
        load_params(args.init, config, "float32")
        if args.init
        else initial_params(config, args.seed)
    )
    fresh = TrainState(params, transform.init(params), jnp.zeros((), jnp.int32))
    state = _restored(args.out, jax.device_put(fresh, everywhere))
    steps = _Steps(config, transform, plan, mesh, state)
    begun = saved = time.monotonic()
    log = (args.out / "train.jsonl").open("a")
    with Progress(*Progress.get_default_columns(), TextColumn("{task.fields[note]}")) as progress:
        bar = progress.add_task(args.name, total=args.steps, completed=int(state.step), note="")
        meter = _Meter()
        for number, batch in enumerate(
            batches(plan, int(state.step), args.processes), int(state.step)
        ):
            rate = learning_rate(number, args.peak_rate, args.steps)
            state, report = steps(state, batch, rate)
            meter.add(batch, report)
            if (number + 1) % args.log_steps == 0:
                line = meter.line(number + 1)
                log.write(json.dumps(line) + "\n")
                log.flush()
                print(json.dumps(line), flush=True)
                progress.update(bar, note=f"answer {line['answer_loss']:.3f}")
            progress.advance(bar)
            now = time.monotonic()
            if now - saved > args.save_seconds or now - begun > args.stop_seconds:
                _save(args.out, state)
                saved = now
            if now - begun > args.stop_seconds:
                break
    log.close()
    _save(args.out, state)
    return state


class _Steps:
    """The step, compiled ahead for every shape of batch, all at once in threads."""

    def __init__(
        self, config: ModelConfig, transform: Any, plan: Plan, mesh: Mesh, state: TrainState
    ):
        self._rows = NamedSharding(mesh, PartitionSpec("data"))
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
        step = jax.jit(make_step(config, transform, dtype), donate_argnums=0)
        shapes = dict.fromkeys(map(plan.shape, range(int(state.step), plan.steps)))
        pool = ThreadPoolExecutor(max(len(shapes), 1))
        self._compiled: dict[tuple[int, ...], Future[Any]] = {
            shape: pool.submit(self._compile, step, state, *shape) for shape in shapes
        }

    def _compile(self, step: Any, state: TrainState, rows: int, length: int) -> Any:
        wide, thin = (rows, length), (rows,)
        kinds = ((wide, jnp.int32), (thin, jnp.int32), (wide, jnp.float32), (thin, jnp.int32))
        batch: Any = [jax.ShapeDtypeStruct(*kind, sharding=self._rows) for kind in kinds]
        return step.lower(state, Batch(*batch), jax.ShapeDtypeStruct((), jnp.float32)).compile()

    def __call__(self, state: TrainState, batch: Batch, rate: float) -> tuple[TrainState, Report]:
        compiled = self._compiled[batch.tokens.shape].result()
        return compiled(state, jax.device_put(batch, self._rows), jnp.float32(rate))


class _Meter:
    """Losses, answers right by kind, and speed since the last line; read only when asked for, so
    that the device is not waited for at every step."""

    def __init__(self):
        self._kept, self._since = [], time.monotonic()

    def add(self, batch: Batch, report: Report) -> None:
        self._kept.append((batch.kind, batch.tokens.shape, report))

    def line(self, step: int) -> dict[str, Any]:
        """What happened since the last call, as one JSON object."""
        reports = jax.device_get([report for _, _, report in self._kept])
        kinds = np.concatenate([kind for kind, _, _ in self._kept])
        right = np.concatenate([report.right for report in reports])
        means = {
            KINDS[kind]: round(float(right[kinds == kind].mean()), 3) for kind in np.unique(kinds)
        }
        now = time.monotonic()
        tokens = sum(rows * length for _, (rows, length), _ in self._kept)
        speed, self._since = tokens / (now - self._since), now
        line = {
            "step": step,
            "answer_loss": round(float(np.mean([r.answer for r in reports])), 4),
            "text_loss": round(float(np.mean([r.text for r in reports])), 4),
            "balance": round(float(np.mean([r.balance for r in reports])), 4),
            "tokens_per_second": round(speed),
            "row_length": round(float(np.mean([shape[1] for _, shape, _ in self._kept]))),
            "right": means,
        }
        self._kept = []
        return line


def _states(out: Path) -> Iterator[tuple[int, Path]]:
    for path in out.glob("state-*"):
        number = path.name.removeprefix("state-")
        if number.isdigit():
            yield int(number), path


def _restored(out: Path, fresh: TrainState) -> TrainState:
    """The newest training state of the directory, or the fresh one."""
    newest = max(_states(out), default=None)
    if newest is None:
        return fresh
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), fresh
    )
    return ocp.load(str(newest[1].absolute()), like)


def _save(out: Path, state: TrainState) -> None:
    """Writes the training state, then drops older ones: a crash in between loses neither."""
    path = out / f"state-{int(state.step)}"
    if path.exists():
        return
    ocp.save(str(path.absolute()), state)
    for number, old in list(_states(out)):
        if number < int(state.step):
            shutil.rmtree(old)
