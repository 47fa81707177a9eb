"""Options of the quality study."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro

from dasc_jax.engine.config import EngineConfig
from dasc_jax.evals.ruler import SHORT, TASKS
from dasc_jax.plan import RANDOM_SEEDS

Part = Literal["cold", "sweep", "random", "plans", "tables", "drift"]

# The XLA forms are bound by launches on a GPU: a larger step costs hardly more than a small one.
GPU = EngineConfig(max_running=256, prefill_tokens=8192, prefill_requests=32)
CPU = EngineConfig(max_running=16, prefill_tokens=1024, prefill_requests=8)


@dataclass(frozen=True)
class QualityArgs:
    """Measure what compressed checkpoints cost in quality, as the DASC paper does in section 5.2.

    Parts: cold (RULER without reuse), sweep (dense, nr and wr at every W_max, float32 and int8, on
    prompts that are replayed from the cache), random (count-matched masks in place of the
    horizons), plans (what thresholds and random masks keep, from the weights alone), tables (Tables
    1a and 1b), drift (turns of conversations that resume lossily). Results are lines of OUT; the
    page beside it (.md) and its figures are made from them at the end. A run that was stopped goes
    on where it stopped. `--parts` with nothing behind it only makes the page; with `--merge` it
    first brings together what was measured elsewhere.

    Examples:
        reproduce_quality --models checkpoints/kimi-linear-mini --out results/kimi.jsonl
        reproduce_quality --parts --merge results/kimi.jsonl results/qwen.jsonl
    """

    models: tuple[Path, ...] = (
        Path("checkpoints/kimi-linear-mini"),
        Path("checkpoints/qwen3-next-mini"),
    )
    """Checkpoint directories."""
    parts: tuple[Part, ...] = ("cold", "sweep", "random", "plans", "tables", "drift")
    """What to measure."""
    merge: tuple[Path, ...] = ()
    """Files of lines, made by this program for another OUT, that OUT takes in first together with
    their folders of figures; lines that it has already are left out."""
    tasks: tuple[str, ...] = TASKS
    """RULER's tasks, by its names or the paper's (S1, MK2, QA-H)."""
    lengths: tuple[int, ...] = (1088, 2048, 4096)
    """Tokens of prompt and answer; 1088 is the first multiple of 64 that has room for all tasks."""
    n: int = 30
    """Instances of each task and length."""
    w_max: tuple[int, ...] = (0, 16, 64, 128, 512, 1024)
    """Thresholds in tokens; 0 keeps every unit."""
    quantizations: tuple[Literal["float32", "int8"], ...] = ("float32", "int8")
    """Forms of the stored rows."""
    rounds: int = 3
    """Measured passes over all prompts of an arm."""
    seeds: tuple[int, ...] = RANDOM_SEEDS
    """Of the random masks."""
    needles: int = 100
    """Table 1a: questions at each depth."""
    prefixes: int = 8
    """Table 1b: prefixes of each length."""
    prefix_lengths: tuple[int, ...] = (4096, 2048, 1024)
    """Table 1b: tokens of a prefix."""
    turns: int = 10
    """Drift: turns of a conversation, 64 tokens each."""
    conversations: int = 16
    """Drift: conversations out of the text of the haystacks."""
    drift_w_max: tuple[int, ...] = (16, 128)
    """Drift: thresholds."""
    max_running: int | None = None
    """Requests at once; by default 256, on a CPU 16."""
    prefill_tokens: int | None = None
    """Tokens of the largest prefill step; by default 8192, on a CPU 1024."""
    prefill_requests: int | None = None
    """Requests in one prefill step; by default 32, on a CPU 8."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and activations; recurrent states are float32 always."""
    seed: int = 0
    """Of the instances."""
    device_budget: float | None = None
    """Seconds after which no further arm begins; the page is written all the same."""
    out: Path = Path("docs/quality.jsonl")
    """File of lines; its page has the suffix .md, its figures a folder without suffix."""
    compilation_cache: Annotated[str, tyro.conf.arg(metavar="DIR|auto|off")] = "auto"
    """Directory that keeps compiled steps. auto: $JAX_COMPILATION_CACHE_DIR, else one under
    ~/.cache; off: none."""


def check(args: QualityArgs) -> None:
    """Raises ValueError for what cannot run, before anything is loaded."""
    for name in ("n", "rounds", "needles", "prefixes", "turns", "conversations"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name} is {getattr(args, name)}; it must be at least 1")
    if unknown := [task for task in args.tasks if task not in task_names()]:
        raise ValueError(f"unknown tasks {', '.join(unknown)}; there are {', '.join(task_names())}")
    if absent := [str(path) for path in args.merge if not path.exists()]:
        raise ValueError(f"nothing to merge in {', '.join(absent)}")
    if negative := [w for w in (*args.w_max, *args.drift_w_max) if w < 0]:
        raise ValueError(f"w-max is {negative[0]}; it must be at least 0")


def task_names() -> dict[str, str]:
    """Full names by full and by short name."""
    return {task: task for task in TASKS} | {short: task for task, short in SHORT.items()}


def sizes(args: QualityArgs) -> EngineConfig:
    """Requests and tokens that run together on this device."""
    base = CPU if jax.default_backend() == "cpu" else GPU
    return EngineConfig(
        max_running=args.max_running or base.max_running,
        prefill_tokens=args.prefill_tokens or base.prefill_tokens,
        prefill_requests=args.prefill_requests or base.prefill_requests,
    )
