"""Times one decode step of a released model at its real size, with random weights.

    python scripts/bench_decode_step.py --batches 1 32

The step is the one the engine runs, greedy, its state donated. Tokens go from a step to the next on
the device, so the host only launches. What the step cannot be faster
than is the time to read its weights, states and pages once.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from dasc_jax.config import ModelConfig
from dasc_jax.engine.buckets import abstract
from dasc_jax.engine.sampling import Sampled
from dasc_jax.engine.step import model_steps
from dasc_jax.models import Params, State
from dasc_jax.programs.runtime import machine, settle
from dasc_jax.programs.step_program import (
    PROFILED,
    REFUSED,
    Say,
    clock,
    compile_step,
    failure,
    follow,
    profile,
)
from dasc_jax.programs.step_report import Failure, StepTime
from dasc_jax.programs.step_size import shortened, step_bytes
from dasc_jax.programs.synthetic import device_params, device_state, state_specs
from dasc_jax.published import published_config
from dasc_jax.types import PAGE
from pallas_kernels.bench.timing import floor_ms


@dataclass(frozen=True)
class Args:
    """What is timed."""

    model: str = "kimi-linear-48b"
    """A released configuration (`dasc_jax.published`)."""
    batches: tuple[int, ...] = (1, 32)
    """Requests decoded at once."""
    variants: tuple[str, ...] = ("engine",)
    """Ways to compile the step, all timed over one set of weights: "engine" as the engine does, or
    further options of XLA as NAME=VALUE;NAME=VALUE."""
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
    out: Path | None = None
    """A file that gets one JSON line a batch size and variant."""


def first_rows(config: ModelConfig, batch: int, args: Args) -> np.ndarray:
    """A decode batch of the engine, random tokens and pages, filled up to its smallest bucket."""
    pages = -(-args.max_context // PAGE)
    random = np.random.default_rng(batch)
    rows = np.zeros((max(batch, 2), 3 + pages), np.int32)
    rows[:batch, 0] = random.integers(0, config.vocab_size, batch)
    rows[:batch, 1] = args.context
    rows[:batch, 2] = 1 + random.permutation(batch)
    rows[:batch, 3:] = 1 + random.permutation(batch * pages).reshape(batch, pages)
    return rows


def lower(config: ModelConfig, params: Any, batch: int, args: Args) -> Any:
    """The step of a batch size, lowered: (state, params, rows) -> (state, next rows, sampled)."""
    decode = model_steps(config, config.dtype).decode

    def step(state: State, params: Params, rows: jax.Array) -> tuple[State, jax.Array, Sampled]:
        state, sampled = decode(state, params, rows)
        moved = rows[:, 1] + (rows[:, 2] > 0)
        following = [sampled.tokens[:, None], moved[:, None], rows[:, 2:]]
        return state, jnp.concatenate(following, axis=1), sampled

    rows = first_rows(config, batch, args)
    state = state_specs(config, config.dtype, batch + 1, 1 + batch * (rows.shape[1] - 3))
    return jax.jit(step, donate_argnums=0).lower(*abstract((state, params, rows)))


class Step:
    """A compiled decode step with its state, ready to be run on."""

    def __init__(self, config: ModelConfig, params: Params, batch: int, args: Args, compiled: Any):
        rows = first_rows(config, batch, args)
        pages = 1 + batch * (rows.shape[1] - 3)
        self.params, self.state = params, device_state(config, config.dtype, batch + 1, pages)
        self.host, self.rows, self.compiled = rows, jax.device_put(rows.copy()), compiled
        self.live = rows[:, 2] > 0

    def run(self) -> Sampled:
        """The next step; its tokens are the input of the one after it, without the host."""
        self.state, self.rows, sampled = self.compiled(self.state, self.params, self.rows)
        return sampled

    def from_host(self) -> None:
        """Make the rows of `run` those of the host, which `run_on_host` goes on with."""
        self.host = np.array(self.rows)

    def run_on_host(self) -> None:
        """The next step as the engine takes it: its tokens come to the host and go back."""
        rows = jax.device_put(self.host.copy())
        self.state, _, sampled = self.compiled(self.state, self.params, rows)
        self.host[:, 0] = np.asarray(sampled.tokens)
        self.host[self.live, 1] += 1


def time_step(step: Step, batch: int, variant: str, args: Args, say: Say) -> dict[str, Any]:
    """Milliseconds of a step by the host clock: the first fields of `StepTime`.

    Raises:
        FloatingPointError: logits that are no numbers.
    """
    for _ in range(3):
        sampled = step.run()
    if not np.isfinite(np.asarray(sampled.logits)).all():
        raise FloatingPointError("the step gives logits that are no numbers")
    start = time.perf_counter()
    for _ in range(args.steps):
        sampled = step.run()
    dispatched = time.perf_counter()
    jax.block_until_ready(sampled)
    done = time.perf_counter()
    step.from_host()
    began = time.perf_counter()
    for _ in range(args.steps):
        step.run_on_host()
    synced = time.perf_counter()
    each = [1e3 * t / args.steps for t in (done - start, synced - began, dispatched - start)]
    say(f"batch {batch}, {variant}: {each[0]:.3f} ms a step, waiting {each[1]:.3f}")
    return dict(zip(("ms", "synced_ms", "dispatch_ms"), each, strict=True))


def measure(
    config: ModelConfig,
    params: Params,
    batch: int,
    variant: str,
    args: Args,
    lowered: Any,
    say: Say,
) -> StepTime:
    """Compile and time the step at one batch size.

    Raises:
        FloatingPointError: logits that are no numbers.
    """
    compiled = compile_step(lowered, f"batch {batch}", variant, say)
    step = Step(config, params, batch, args, compiled)
    return StepTime(
        batch=batch,
        variant=variant,
        **time_step(step, batch, variant, args, say),
        floor_ms=floor_ms(step_bytes(config, batch, args.context)),
        **profile(compiled, step.run),
    )


def bench(
    config: ModelConfig, args: Args, say: Say = lambda line: None
) -> Iterator[StepTime | Failure]:
    """The step at every batch size and in every variant, over one set of weights.

    What a device refuses (memory, an option) is a `Failure`, and the next one has its turn.

    Raises:
        ValueError: the steps run past `max_context`.
    """
    if args.context + 2 * args.steps + PROFILED + 3 > args.max_context:
        raise ValueError(f"{args.steps} steps twice behind {args.context} tokens do not fit")
    params = jax.block_until_ready(device_params(config, config.dtype))
    say(f"{sum(x.nbytes for x in params.values()) / 1e9:.1f} GB of weights made")
    for batch in args.batches:
        begun = time.perf_counter()
        lowered = lower(config, params, batch, args)
        say(f"batch {batch}: lowered in {time.perf_counter() - begun:.1f} s")
        for variant in args.variants:
            try:
                yield measure(config, params, batch, variant, args, lowered, say)
            except REFUSED as error:
                yield failure(batch, variant, error)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program on `argv` (default: the command line); returns the exit code."""
    args = tyro.cli(Args, args=argv)
    settle("auto", args.mem_fraction)
    config = shortened(published_config(args.model), args.layers)
    say = clock()
    say(f"{args.model}, {config.num_layers} layers, {config.dtype}; {machine()}")
    return follow(bench(config, args, say), {"model": args.model}, args.out, say)


if __name__ == "__main__":
    sys.exit(main())
