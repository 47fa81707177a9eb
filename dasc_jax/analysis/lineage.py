"""How far answers drift when every turn of a conversation resumes from the last one's lossy state.

A turn stores a checkpoint, the next one loads it with its local units dropped or refreshed (or its
rows in int8), and stores another: after n turns n losses lie behind the state. The report sets the
distribution of each turn's first token against that of a run that reuses nothing.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from jaxtyping import Float64
from rich.console import Console
from rich.progress import track
from rich.table import Table

from dasc_jax.config import DascConfig
from dasc_jax.engine.config import EngineConfig
from dasc_jax.engine.engine import Engine
from dasc_jax.engine.request import Request, RequestResult, SamplingParams, StatePolicy
from dasc_jax.horizons import retention_horizons
from dasc_jax.model import Model, load_model
from dasc_jax.plan import make_plan
from dasc_jax.types import PAGE

RUNNING = 1
"""Requests at once: few steps to compile, and no batch that could blur a difference."""

Conversations = list[tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class LineageArgs:
    """Measure how answers drift over the turns of conversations that reuse lossy checkpoints.

    MODEL is a checkpoint directory (Hugging Face or native). Every turn appends tokens to its
    conversation and resumes from the checkpoint of the turn before. A line of the result gives, for
    a policy and a turn, the Kullback-Leibler divergence (nats) of the next token's distribution
    from that of a run without any reuse, over all conversations, and how often both prefer the same
    token.

    nr zeroes local units, wr refreshes them, int8 keeps every unit with its rows in int8.

    Example: lineage_report checkpoints/kimi-linear-mini --turns 10 --out lineage.jsonl
    """

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = Path(
        "checkpoints/kimi-linear-mini"
    )
    """Checkpoint directory."""
    w_max: int = 16
    """Threshold of nr and wr in tokens: units with a longer horizon are kept."""
    turns: int = 10
    """Turns of every conversation; the first has nothing to reuse."""
    turn_tokens: int = PAGE
    """Tokens a turn appends, a multiple of 64."""
    conversations: int = 16
    """Conversations that a line is the mean of."""
    text: Path | None = None
    """Take the conversations out of this file; by default they are random token ids."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the model."""
    seed: int = 0
    """Of the random token ids, or of the places in the text."""
    out: Path | None = None
    """Write the lines to this file, one JSON object each."""


@dataclasses.dataclass(frozen=True)
class Drift:
    """One policy at one turn: `kl_*` in nats over the conversations, `agree` the share of equal
    greedy tokens, `lineage` the most losses behind a state, `depth` the tokens that were reused."""

    policy: str
    turn: int
    depth: int
    lineage: int
    kl_mean: float
    kl_max: float
    agree: float


def main(argv: list[str] | None = None) -> int:
    """Runs the program on `argv` (default: the command line); returns the exit code."""
    args = tyro.cli(LineageArgs, args=argv, prog="lineage_report")
    errors = Console(stderr=True, soft_wrap=True)
    try:
        model = load_model(args.model, args.dtype)
        rows = report(model, args, errors)
    except (OSError, ValueError) as error:
        errors.print(f"error: {error}", markup=False, highlight=False)
        return 1
    Console().print(table(rows, args))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text("".join(json.dumps(dataclasses.asdict(r)) + "\n" for r in rows))
    return 0


def report(model: Model, args: LineageArgs, progress: Console) -> list[Drift]:
    """The lines of nr, wr and int8, each turn by turn.

    Raises:
        ValueError: turns off the grid of 64 tokens or past the model's context, a text that is too
            short or that the model has no tokenizer for.
    """
    talks = conversations(model, args)
    runs: tuple[tuple[str, StatePolicy, DascConfig, bool], ...] = (
        ("exact", "dense", DascConfig(policy="dense"), False),
        ("nr", "nr", DascConfig(w_max=args.w_max), True),
        ("wr", "wr", DascConfig(w_max=args.w_max), True),
        ("int8", "nr", DascConfig(w_max=0, quantization="int8"), True),
    )
    measured: dict[str, list[list[RequestResult]]] = {}
    engines: dict[DascConfig, Engine] = {}
    for name, policy, dasc, reuse in track(runs, "running", console=progress, transient=True):
        if dasc not in engines:
            engines[dasc] = Engine(model, sized(model, args, dasc, reuse))
        engines[dasc].flush_cache()
        measured[name] = list(turns(engines[dasc], talks, policy, args))
    exact = measured.pop("exact")
    return [
        drift(name, turn, pair[0], pair[1])
        for name, results in measured.items()
        for turn, pair in enumerate(zip(results, exact, strict=True), 1)
    ]


def sized(model: Model, args: LineageArgs, dasc: DascConfig, reuse: bool) -> EngineConfig:
    """An engine that keeps every page and checkpoint of all conversations."""
    context = args.turns * args.turn_tokens + PAGE
    window = make_plan(retention_horizons(model), dasc.w_max).window
    return EngineConfig(
        dasc=dasc,
        max_context=context,
        max_running=RUNNING,
        prefill_tokens=max(256, -(-(window + 3) // PAGE) * PAGE + PAGE),
        pages=1 + (args.conversations + RUNNING) * (context // PAGE),
        checkpoint_slots=args.conversations * args.turns + RUNNING,
        prefix_cache=reuse,
    )


def conversations(model: Model, args: LineageArgs) -> Conversations:
    """Token ids of every conversation, one more than its turns take."""
    if args.turn_tokens < PAGE or args.turn_tokens % PAGE:
        raise ValueError(f"turn_tokens is {args.turn_tokens}; it must be a multiple of {PAGE}")
    if args.turns < 1 or args.conversations < 1:
        raise ValueError(
            f"{args.turns} turns of {args.conversations} conversations: nothing to run"
        )
    length = args.turns * args.turn_tokens + 1
    random = np.random.default_rng(args.seed)
    if args.text is None:
        ids = random.integers(0, model.config.vocab_size, (args.conversations, length))
        return [tuple(row.tolist()) for row in ids]
    if model.tokenizer is None:
        raise ValueError(f"{args.model} has no tokenizer: it cannot read {args.text}")
    tokens = model.tokenizer.encode(args.text.read_text())
    if len(tokens) < length:
        raise ValueError(f"{args.text} has {len(tokens)} tokens; a conversation takes {length}")
    starts = random.integers(0, len(tokens) - length + 1, args.conversations)
    return [tuple(tokens[start : start + length]) for start in starts]


def turns(
    engine: Engine, talks: Conversations, policy: StatePolicy, args: LineageArgs
) -> Iterator[list[RequestResult]]:
    """The results of all conversations, a turn at a time."""
    sampling = SamplingParams(1, ignore_eos=True, logprobs=engine.model.config.vocab_size)
    for turn in range(1, args.turns + 1):
        prompts = [talk[: turn * args.turn_tokens + 1] for talk in talks]
        yield engine.generate(
            [Request(str(i), p, sampling, state_policy=policy) for i, p in enumerate(prompts)]
        )


def drift(
    policy: str, turn: int, results: list[RequestResult], exact: list[RequestResult]
) -> Drift:
    """What a turn lost against the exact run of the same prompts."""
    kl = [divergence(first_token(e), first_token(r)) for r, e in zip(results, exact, strict=True)]
    same = [r.tokens == e.tokens for r, e in zip(results, exact, strict=True)]
    return Drift(
        policy=policy,
        turn=turn,
        depth=min(r.cached_tokens for r in results),
        lineage=max(r.report.lineage for r in results),
        kl_mean=float(np.mean(kl)),
        kl_max=float(np.max(kl)),
        agree=float(np.mean(same)),
    )


def first_token(result: RequestResult) -> Float64[np.ndarray, " vocab"]:
    """Log-probabilities of the first generated token, by token id."""
    if not result.logprobs:
        raise ValueError(f"request {result.id!r} ended without a token: {result.error}")
    top = result.logprobs[0][1]
    return np.array([top[token] for token in range(len(top))])


def divergence(p: Float64[np.ndarray, " vocab"], q: Float64[np.ndarray, " vocab"]) -> float:
    """KL(p || q) in nats of two distributions given as log-probabilities."""
    # Rounding can leave a few 1e-9 below zero, which no divergence is.
    return max(float(np.sum(np.exp(p) * (p - q))), 0.0)


def table(rows: list[Drift], args: LineageArgs) -> Table:
    """The report as a rich table."""
    result = Table(
        title=f"{args.model}: drift from the exact run, w_max {args.w_max},"
        f" {args.conversations} conversations",
        title_justify="left",
    )
    for name in ("policy", "turn", "reused", "lineage", "KL mean", "KL max", "same token"):
        result.add_column(name, justify="left" if name == "policy" else "right")
    for r in rows:
        cells = (
            r.turn,
            r.depth,
            r.lineage,
            f"{r.kl_mean:.2e}",
            f"{r.kl_max:.2e}",
            f"{r.agree:.0%}",
        )
        result.add_row(r.policy, *map(str, cells), end_section=r.turn == args.turns)
    return result
