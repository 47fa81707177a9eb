"""Times one decode step of a released model at its real size, with random weights.

    python scripts/bench_decode_step.py --batches 1 32

The step is the one the engine runs: model and sampling in one program, its state donated. Tokens go
from a step to the next on the device, so the host only launches. What the step cannot be faster
than is the time to read its weights, states and pages once.
"""

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from dasc_jax.config import MLAConfig, ModelConfig
from dasc_jax.engine.buckets import abstract
from dasc_jax.engine.request import SamplingParams
from dasc_jax.engine.sampling import Sampled, SamplingBatch, sampling_batch
from dasc_jax.engine.step import model_steps
from dasc_jax.models import DecodeBatch, Params, abstract_params
from dasc_jax.programs.runtime import machine, settle
from dasc_jax.programs.step_profile import Share, large_copies, origins, shares
from dasc_jax.programs.synthetic import device_params, device_state
from dasc_jax.published import published_config
from dasc_jax.types import PAGE
from pallas_kernels.bench.clocks import kernel_times
from pallas_kernels.bench.timing import floor_ms

PROFILED = 5
"""Steps under CUPTI."""


@dataclass(frozen=True)
class Args:
    """What is timed."""

    model: str = "kimi-linear-48b"
    """A released configuration (`dasc_jax.published`)."""
    batches: tuple[int, ...] = (1, 32)
    """Requests decoded at once."""
    context: int = 1024
    """Tokens every request has behind it."""
    max_context: int = 4096
    """What its page table has room for."""
    steps: int = 50
    """Steps timed in a row, without waiting in between."""
    layers: int | None = None
    """Only the first so many layers; None: all."""
    mem_fraction: float = 0.95
    """Share of the device's memory that JAX reserves."""
    compiler_options: tuple[str, ...] = ()
    """Options of XLA for this step, NAME=INTEGER, such as xla_gpu_dot_merger_threshold_mb=0."""
    out: Path | None = None
    """A file that gets one JSON line a batch size."""


class StepTime(NamedTuple):
    """Milliseconds of a decode step at one batch size."""

    batch: int
    ms: float
    """Host clock over many steps in a row, launches overlapping."""
    synced_ms: float
    """The same, waiting for the tokens of every step as an engine does."""
    dispatch_ms: float
    """What the host needs to launch a step."""
    kernel_ms: float
    """Sum of its kernels; NaN without CUPTI."""
    kernels: float
    floor_ms: float
    temporaries: int
    """Bytes of device memory the step needs beside its arguments."""
    copied: int
    """Bytes of whole arrays it copies outside kernels: pools that are not updated in place."""
    parts: tuple[Share, ...]


class Step:
    """A compiled decode step with its state, ready to be run on."""

    def __init__(self, config: ModelConfig, params: Params, batch: int, args: Args):
        pages = -(-args.max_context // PAGE)
        state = device_state(config, config.dtype, batch + 1, 1 + batch * pages)
        random = np.random.default_rng(batch)
        self.slots = (1 + random.permutation(batch)).astype(np.int32)
        self.table = (1 + random.permutation(batch * pages)).astype(np.int32).reshape(batch, pages)
        self.position, self.batch = args.context, batch
        self.params, self.state = params, state
        self.tokens: Any = random.integers(0, config.vocab_size, batch).astype(np.int32)
        step = jax.jit(model_steps(config, config.dtype).decode, donate_argnums=0)
        lowered = step.lower(*abstract((state, params, *self._batch())))
        named = (option.split("=", 1) for option in args.compiler_options)
        compiled = lowered.compile({name: int(value) for name, value in named} or None)
        self.compiled, self.text = compiled, compiled.as_text() or ""

    def _batch(self) -> tuple[DecodeBatch, SamplingBatch]:
        positions = np.full(self.batch, self.position, np.int32)
        greedy = [SamplingParams(max_tokens=1)] * self.batch
        sampling = sampling_batch(greedy, positions.tolist(), self.batch)
        return DecodeBatch(self.tokens, positions, self.slots, self.table), sampling

    def run(self) -> Sampled:
        """The next step; its tokens are the input of the one after it."""
        batch, sampling = jax.tree.map(jax.device_put, self._batch())
        self.state, sampled = self.compiled(self.state, self.params, batch, sampling)
        self.tokens, self.position = sampled.tokens, self.position + 1
        return sampled


def time_step(config: ModelConfig, params: Params, batch: int, args: Args) -> StepTime:
    """Compile and time the step at one batch size.

    Raises:
        ValueError: the steps run past `max_context`.
        FloatingPointError: a log-probability that is no number.
    """
    if args.context + 2 * args.steps + PROFILED + 3 > args.max_context:
        raise ValueError(f"{args.steps} steps twice behind {args.context} tokens do not fit")
    step = Step(config, params, batch, args)
    for _ in range(3):
        sampled = step.run()
    if not np.isfinite(np.asarray(sampled.logprobs)).all():
        raise FloatingPointError("the step gives log-probabilities that are no numbers")
    start = time.perf_counter()
    for _ in range(args.steps):
        sampled = step.run()
    dispatched = time.perf_counter()
    jax.block_until_ready(sampled)
    done = time.perf_counter()
    for _ in range(args.steps):
        np.asarray(step.run().tokens)
    synced = time.perf_counter()
    launched = kernel_times(lambda: [step.run() for _ in range(PROFILED)][-1])
    per_step, memory = 1e3 / args.steps, step.compiled.memory_analysis()
    return StepTime(
        batch,
        (done - start) * per_step,
        (synced - done) * per_step,
        (dispatched - start) * per_step,
        sum(ms for _, ms in launched) / PROFILED if launched else math.nan,
        len(launched) / PROFILED,
        floor_ms(step_bytes(config, batch, args.context)),
        memory.temp_size_in_bytes if memory else 0,
        sum(large_copies(step.text).values()),
        tuple(shares(launched, PROFILED, origins(step.text))),
    )


def step_bytes(config: ModelConfig, batch: int, context: int) -> float:
    """Bytes a decode step has to move: weights read once, states read and written, pages read.

    Of the experts, those that `batch` tokens choose if every choice is equally likely.
    """
    touched = 1.0
    if config.moe is not None:
        touched = 1.0 - (1.0 - config.moe.top_k / config.moe.num_experts) ** batch
    total = 0.0
    for path, spec in abstract_params(config, config.dtype).items():
        size = math.prod(spec.shape) * spec.dtype.itemsize
        if path == "embed.weight" and not config.tie_word_embeddings:
            size = batch * config.hidden_size * spec.dtype.itemsize
        total += size * touched if ".experts." in path else size
    d, a = config.delta, config.attention
    state = 4 * d.num_value_heads * d.key_dim * d.value_dim
    row = (
        a.latent_dim + a.shared_dim if isinstance(a, MLAConfig) else 2 * a.num_kv_heads * a.head_dim
    )
    pages = len(config.attention_layers) * context * row * np.dtype(np.float16).itemsize
    return total + batch * (2 * len(config.recurrent_layers) * state + pages)


def bench(config: ModelConfig, args: Args) -> Iterator[StepTime]:
    """The step at every batch size, over one set of weights."""
    params = jax.block_until_ready(device_params(config, config.dtype))
    for batch in args.batches:
        yield time_step(config, params, batch, args)


def shortened(config: ModelConfig, layers: int | None) -> ModelConfig:
    """The model with only its first layers.

    Raises:
        ConfigError: they do not make a model.
    """
    if layers is None:
        return config
    return replace(
        config,
        num_layers=layers,
        layer_kinds=config.layer_kinds[:layers],
        ffn_kinds=config.ffn_kinds[:layers],
    )


def tables(took: StepTime) -> Iterator[Table]:
    """The figures of a batch size, and where the kernels' time goes."""
    names = ("batch", "ms a step", "waiting", "launching", "kernels", "number", "floor")
    table = Table(*names, "temporaries", "copied")
    figures = (took.ms, took.synced_ms, took.dispatch_ms, took.kernel_ms)
    table.add_row(
        str(took.batch),
        *(f"{ms:.3f}" for ms in figures),
        f"{took.kernels:.0f}",
        f"{took.floor_ms:.3f}",
        f"{took.temporaries / 1e6:.1f} MB",
        f"{took.copied / 1e6:.1f} MB",
    )
    yield table
    if took.parts:
        table = Table("part", "ms", "share", "kernels", "most of it")
        for share in took.parts:
            portion = f"{share.ms / took.kernel_ms:.0%}"
            names = ", ".join(name[:60] for name in share.examples)
            table.add_row(share.part, f"{share.ms:.3f}", portion, f"{share.kernels:.0f}", names)
        yield table


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program on `argv` (default: the command line); returns the exit code."""
    args = tyro.cli(Args, args=argv)
    settle("auto", args.mem_fraction)
    config = shortened(published_config(args.model), args.layers)
    console = Console(width=160)
    console.print(f"{args.model}, {config.num_layers} layers, {config.dtype}; {machine()}")
    for took in bench(config, args):
        for table in tables(took):
            console.print(table)
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            where = {"model": args.model, "machine": machine(), "date": date.today().isoformat()}
            line = took._asdict() | {"parts": [s._asdict() for s in took.parts]} | where
            with args.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
