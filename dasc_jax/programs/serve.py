"""`dasc serve`: the OpenAI-compatible server over one model."""

import contextlib
import logging
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from jax.sharding import Mesh
from rich.console import Console
from rich.logging import RichHandler

from dasc_jax.balance import Placement
from dasc_jax.config import DascConfig, ModelConfig
from dasc_jax.engine.config import EngineConfig
from dasc_jax.engine.lockstep import description, follow
from dasc_jax.engine.peers import Followers, Leader
from dasc_jax.engine.request import StatePolicy
from dasc_jax.programs.loading import (
    Forecast,
    build,
    compile_table,
    forecast,
    forecast_table,
    load,
    model_config,
)
from dasc_jax.programs.processes import asked_to_leave, check_processes, joined, rank_mesh
from dasc_jax.programs.runtime import (
    EMBEDDED,
    FAILED,
    ProgramError,
    complain,
    complaints,
    settle,
)
from dasc_jax.programs.serving import listen, serve

DEFAULT_CONTEXT = 4096


@dataclass(frozen=True)
class ServeArgs:
    """Start an OpenAI-compatible server (completions, chat, models, health, metrics) on one model.

    Its prefix cache keeps, beside the attention pages, checkpoints of the recurrent state: of every
    unit that remembers more than W_max tokens. A prompt that shares at least 64 tokens with an
    earlier one resumes from a checkpoint. What a checkpoint costs is printed before anything is
    allocated; GET /metrics shows what it saves.

    For example, `dasc serve --policy wr --w-max 64` serves the model that comes with the repository
    at http://127.0.0.1:8000/v1, and `dasc serve --model DIR --checkpoint-bytes 8000000000` another
    one with 8 GB of checkpoints.

    A model too large for one machine takes a process on each, all started with the same options but
    for `--process-id`. Process 0 has the server; when one of them ends, they all do.
    """

    model: Path = EMBEDDED
    """Checkpoint directory: as Hugging Face releases it, or from `dasc convert`. Default: the small
    trained model that comes with the repository."""
    served_name: str | None = None
    """Name that clients ask for; default: the name of the directory."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""
    port: int = 8000
    """Port to listen on; 0 takes a free one and prints it."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of weights, activations and attention pages; recurrent states are float32 always."""
    policy: StatePolicy = "nr"
    """What a hit does about units that were not kept: nr starts them at zero; wr recomputes them
    from the last tokens of the prefix; dense keeps every unit, so that a hit equals a cold run. A
    request may ask for another with `state_policy`."""
    w_max: int = 16
    """Keep units whose retention horizon exceeds so many tokens; 0 keeps all. Higher: smaller
    checkpoints, more of them, a coarser approximation."""
    quantization: Literal["int8"] | None = None
    """Store kept units as int8 with a scale each, instead of float32."""
    checkpoint_slots: int | None = None
    """Checkpoints to hold; default: four for every running request."""
    checkpoint_bytes: int | None = None
    """Or: bytes to hold them in."""
    interval: int | None = None
    """Also checkpoint prompts every so many tokens (a multiple of 64), not just where they end and
    branch."""
    max_lineage: int | None = None
    """Lossy hits that may follow one another before a prefix is computed anew; default: any."""
    max_running: int = 8
    """Requests that run at once."""
    prefill_tokens: int = 512
    """Prompt tokens of the largest step (a multiple of 64); longer prompts take several."""
    pages: int | None = None
    """Attention pages of 64 tokens; default: twice what the running requests can fill."""
    max_context: int | None = None
    """Tokens of a request, prompt and output together; default: the model's, at most 4096."""
    compilation_cache: str = "auto"
    """Directory that keeps compiled steps for the next start. auto: $JAX_COMPILATION_CACHE_DIR,
    else one under ~/.cache, and none for several processes, which would have to share it, since
    they compile together; off: none."""
    mem_fraction: float | None = None
    """Share of the GPU's memory that JAX reserves at the start, in (0, 1]; default: JAX's own."""
    tp: int = 1
    """Devices (ranks) that the model is cut over, as many in every process. With 1, every process
    computes all of it."""
    placement: Placement = "hybrid"
    """Which rank stores which units of a checkpoint: off: those it computes; storage: they are
    dealt out evenly; hybrid: heads are reordered too, so that less has to move."""
    coordinator: str | None = None
    """HOST:PORT of process 0, where the processes find each other. Other ports of that host are
    taken too, and the network is trusted."""
    processes: int = 1
    """Processes that serve together."""
    process_id: int = 0
    """Which of them this is, from 0."""

    def engine_config(self, model: ModelConfig) -> EngineConfig:
        """The sizes and policies of the engine; raises ConfigError for a bad combination."""
        context = self.max_context
        return EngineConfig(
            dasc=DascConfig(
                self.w_max,
                policy=self.policy,
                quantization=self.quantization,
                placement=self.placement,
            ),
            max_context=min(model.max_context, DEFAULT_CONTEXT) if context is None else context,
            max_running=self.max_running,
            prefill_tokens=self.prefill_tokens,
            pages=self.pages,
            checkpoint_slots=self.checkpoint_slots,
            checkpoint_bytes=self.checkpoint_bytes,
            checkpoint_interval=self.interval,
            max_lineage=self.max_lineage,
        )


def main(argv: list[str] | None = None) -> int:
    """Run the program on `argv` (default: the command line); returns the exit code.

    It serves until SIGINT or SIGTERM, and ends open requests first.
    """
    args = tyro.cli(ServeArgs, args=argv, prog="dasc serve")
    console = Console()
    try:
        with interruptible():
            _serve(args, console)
    except ProgramError:
        return FAILED
    except KeyboardInterrupt:
        console.print("stopped")
    return 0


@contextlib.contextmanager
def interruptible():
    """SIGTERM raises KeyboardInterrupt, as SIGINT does (in the main thread, which alone may)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _serve(args: ServeArgs, console: Console) -> None:
    with complaints():
        check_processes(args.coordinator, args.processes, args.process_id)
        alone = args.processes == 1
        cache = args.compilation_cache if alone or args.compilation_cache != "auto" else "off"
        compiled = settle(cache, args.mem_fraction)
    with joined(args.coordinator, args.processes, args.process_id) as peers:
        if isinstance(peers, Leader):
            _follow(args, console, peers)
        else:
            _lead(args, console, peers, compiled)


def _lead(
    args: ServeArgs, console: Console, followers: Followers | None, compiled: Path | None
) -> None:
    with complaints():
        config, mesh, ahead = _look_ahead(args)
        listener = listen(args.host, args.port)
    with listener:
        console.print(forecast_table(ahead, config), highlight=False)
        with complaints():
            model = load(args.model, args.dtype, console, mesh)
            engine = build(model, config, console, followers=followers)
            if followers:
                console.print("waiting for the other processes")
                followers.await_built(description(engine.loop))
        console.print(compile_table(engine))
        if compiled:
            console.print(f"kept in {compiled}", highlight=False, soft_wrap=True)
        name = args.served_name or args.model.resolve().name
        with logged(console):
            serve(engine, name, listener, console, followers)
    if followers and engine.failure:
        complain(f"the engine failed: {type(engine.failure).__name__}: {engine.failure}")
        raise ProgramError from engine.failure


def _follow(args: ServeArgs, console: Console, leader: Leader) -> None:
    with complaints():
        config, mesh, _ = _look_ahead(args)
        model = load(args.model, args.dtype, console, mesh)
        engine = build(model, config, console)
    with logged(console), asked_to_leave(leader):
        leader.built(description(engine.loop))
        console.print(f"ready: process {args.process_id} does what process 0 does")
        follow(engine.loop, leader)


def _look_ahead(args: ServeArgs) -> tuple[EngineConfig, Mesh | None, Forecast]:
    """All that can be known before weights are read. In all processes alike: where Orbax reads, it
    waits until every process does."""
    config = args.engine_config(model_config(args.model))
    mesh = rank_mesh(args.tp)
    return config, mesh, forecast(args.model, args.dtype, config, mesh)


@contextlib.contextmanager
def logged(console: Console):
    """Show what the library logs, a line a request."""
    logger, handler = logging.getLogger("dasc_jax"), RichHandler(console=console, show_path=False)
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
