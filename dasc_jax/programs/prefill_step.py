"""Times one prefill of a released model at its real size, with random weights.

    python scripts/bench_prefill_step.py --prompts 1x1024 1x8192 32x512

The step is the one the engine runs, in the engine's bucket of that size: whole prompts that start
from nothing, logits of their last tokens, their last states as checkpoints.
"""

import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tyro

from dasc_jax.config import ModelConfig
from dasc_jax.engine.buckets import abstract, prefill_buckets
from dasc_jax.engine.config import EngineConfig
from dasc_jax.engine.sampling import Sampled
from dasc_jax.engine.step import model_steps
from dasc_jax.models import Params, PrefillBatch
from dasc_jax.models.packing import ZERO, Segment, pack_segments
from dasc_jax.programs.runtime import machine, settle
from dasc_jax.programs.step_program import (
    REFUSED,
    Say,
    clock,
    compile_step,
    failure,
    follow,
    profile,
)
from dasc_jax.programs.step_report import Failure, PrefillTime
from dasc_jax.programs.step_size import prefill_floor_ms, shortened
from dasc_jax.programs.synthetic import device_params, device_state, state_specs
from dasc_jax.published import published_config
from dasc_jax.types import PAGE


@dataclass(frozen=True)
class Args:
    """What is timed."""

    model: str = "kimi-linear-48b"
    """A released configuration (`dasc_jax.published`)."""
    prompts: tuple[str, ...] = ("1x1024", "1x8192", "32x512")
    """REQUESTSxTOKENS of a prefill: so many prompts of so many tokens, packed."""
    variants: tuple[str, ...] = ("engine",)
    """Ways to compile the step, all timed over one set of weights: "engine" as the engine does, or
    further options of XLA as NAME=VALUE;NAME=VALUE."""
    steps: int = 10
    """Steps timed in a row, without waiting in between."""
    layers: int | None = None
    """Only the first so many layers; None: all."""
    mem_fraction: float = 0.95
    """Share of the device's memory that JAX reserves."""
    out: Path | None = None
    """A file that gets one JSON line a size and variant."""


class Size(NamedTuple):
    """Prompts of a prefill, and the tokens of each."""

    requests: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.requests}x{self.tokens}"

    @property
    def pages(self) -> int:
        """Attention pages of all prompts."""
        return self.requests * -(-self.tokens // PAGE)


def size_of(text: str) -> Size:
    """The size that REQUESTSxTOKENS names.

    Raises:
        ValueError: it names none, or one that is no multiple of 64 tokens.
    """
    requests, _, tokens = text.partition("x")
    if not (requests.isdigit() and tokens.isdigit()) or 0 in (int(requests), int(tokens)):
        raise ValueError(f"{text!r} is no REQUESTSxTOKENS")
    if int(tokens) % PAGE:
        raise ValueError(f"prompts of {tokens} tokens end off the grid of {PAGE}")
    return Size(int(requests), int(tokens))


def prompts(config: ModelConfig, size: Size) -> PrefillBatch:
    """A prefill batch of the engine: random prompts from nothing, a checkpoint at their ends."""
    requests, tokens = size
    engine = EngineConfig(
        max_context=tokens,
        max_running=requests,
        prefill_tokens=requests * tokens,
        prefill_requests=requests,
    )
    random, each = np.random.default_rng(tokens), size.pages // requests
    pages = 1 + random.permutation(size.pages).reshape(requests, each)
    words = random.integers(0, config.vocab_size, size).astype(np.int32)
    segments = [
        Segment(words[i], 0, pages[i].tolist(), i + 1, i + 1, ZERO) for i in range(requests)
    ]
    d = config.delta
    units = (len(config.recurrent_layers), d.num_value_heads)
    return pack_segments(
        segments,
        [(i, tokens) for i in range(requests)],
        [(i + 1) * tokens - 1 for i in range(requests)],
        np.ones((*units, d.key_dim), bool),
        prefill_buckets(engine)[-1],
    )


def lower(config: ModelConfig, params: Any, size: Size) -> Any:
    """The step of a size, lowered: (state, params, batch) -> (state, sampled, ...)."""
    step = jax.jit(model_steps(config, config.dtype).prefill, donate_argnums=0)
    state = state_specs(config, config.dtype, size.requests + 1, size.pages + 1)
    return step.lower(*abstract((state, params, prompts(config, size))))


class Prefill:
    """A compiled prefill with its state and batch, ready to be run over and over."""

    def __init__(self, config: ModelConfig, params: Params, size: Size, compiled: Any):
        self.params, self.compiled = params, compiled
        self.state = device_state(config, config.dtype, size.requests + 1, size.pages + 1)
        self.host = prompts(config, size)
        self.batch = jax.device_put(self.host)

    def run(self) -> Sampled:
        """The same prompts once more."""
        self.state, sampled, *_ = self.compiled(self.state, self.params, self.batch)
        return sampled

    def run_on_host(self) -> None:
        """The same as the engine takes it: the batch comes from the host, the tokens go to it."""
        self.batch = jax.device_put(self.host)
        np.asarray(self.run().tokens)


def time_prefill(prefill: Prefill, steps: int) -> dict[str, float]:
    """Milliseconds of a prefill by the host clock: fields of `PrefillTime`.

    Raises:
        FloatingPointError: logits that are no numbers.
    """
    for _ in range(2):
        sampled = prefill.run()
    if not np.isfinite(np.asarray(sampled.logits)).all():
        raise FloatingPointError("the prefill gives logits that are no numbers")
    start = time.perf_counter()
    for _ in range(steps):
        sampled = prefill.run()
    dispatched = time.perf_counter()
    jax.block_until_ready(sampled)
    done = time.perf_counter()
    for _ in range(steps):
        prefill.run_on_host()
    synced = time.perf_counter()
    each = [1e3 * t / steps for t in (done - start, synced - done, dispatched - start)]
    return dict(zip(("ms", "synced_ms", "dispatch_ms"), each, strict=True))


def measure(
    config: ModelConfig,
    params: Params,
    size: Size,
    variant: str,
    steps: int,
    lowered: Any,
    say: Say,
) -> PrefillTime:
    """Compile and time the prefill of one size.

    Raises:
        FloatingPointError: logits that are no numbers.
    """
    compiled = compile_step(lowered, str(size), variant, say)
    prefill = Prefill(config, params, size, compiled)
    clocked = time_prefill(prefill, steps)
    say(f"{size}, {variant}: {clocked['ms']:.2f} ms, waiting {clocked['synced_ms']:.2f}")
    return PrefillTime(
        *size,
        variant,
        **clocked,
        floor_ms=prefill_floor_ms(config, *size),
        **profile(compiled, prefill.run),
    )


def bench(
    config: ModelConfig, args: Args, say: Say = lambda line: None
) -> Iterator[PrefillTime | Failure]:
    """The prefill of every size and in every variant, over one set of weights.

    What a device refuses (memory, an option) is a `Failure`, and the next one has its turn.

    Raises:
        ValueError: a size that is none.
    """
    sizes = [size_of(text) for text in args.prompts]
    params = jax.block_until_ready(device_params(config, config.dtype))
    say(f"{sum(x.nbytes for x in params.values()) / 1e9:.1f} GB of weights made")
    for size in sizes:
        begun = time.perf_counter()
        lowered = lower(config, params, size)
        say(f"{size}: lowered in {time.perf_counter() - begun:.1f} s")
        for variant in args.variants:
            try:
                yield measure(config, params, size, variant, args.steps, lowered, say)
            except REFUSED as error:
                yield failure(str(size), variant, error)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program on `argv` (default: the command line); returns the exit code."""
    given = sys.argv[1:] if argv is None else argv
    args = tyro.cli(Args, args=given)
    settle("auto", args.mem_fraction)
    config = shortened(published_config(args.model), args.layers)
    say = clock()
    say(f"{args.model}, {config.num_layers} layers, {config.dtype}; {machine()}")
    where = {
        "model": args.model,
        "device": jax.devices()[0].device_kind,
        "command": shlex.join(["scripts/bench_prefill_step.py", *given]),
    }
    return follow(bench(config, args, say), where, args.out, say)


if __name__ == "__main__":
    sys.exit(main())
