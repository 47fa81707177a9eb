"""The program `dasc tables`: Table 1 and figures 2, 4, 5 and 6 of the paper, of any checkpoint."""

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from jaxtyping import Float64
from rich.console import Console
from rich.progress import Progress, track

from dasc_jax.analysis import correlation, horizon_figures, intervention
from dasc_jax.analysis.chart import write_csv, write_figure
from dasc_jax.analysis.observe import observe
from dasc_jax.analysis.profile import load_profile
from dasc_jax.config import ModelConfig
from dasc_jax.evals.ruler import Generator
from dasc_jax.model import Model
from dasc_jax.programs.loading import load
from dasc_jax.programs.runtime import FAILED, ProgramError, complaints, machine, settle
from dasc_jax.published import PUBLISHED

Part = Literal["1a", "1b", "2", "4", "5", "6"]
OF_KIND: dict[str, tuple[Part, ...]] = {"kda": ("2", "5", "6"), "gdn": ("2", "4")}
"""The figures that a kind of decay has."""

Horizons = Sequence[Float64[np.ndarray, "H *K"]]


@dataclasses.dataclass(frozen=True)
class TablesArgs:
    """Make Table 1 and figures 2, 4, 5 and 6 of the DASC paper for a model.

    MODEL is a checkpoint directory, or a published profile (kimi-linear-48b, qwen3-next-80b), which
    has the figures but, without weights to run, no tables. Figure 4 is of models whose decay is one
    a head (GDN), figures 5 and 6 of those with one a key channel (KDA).

    Table 1a clears the attention KV, the recurrent states, both or neither of a cached prefix, and
    asks for the needle in it (RULER's NIAH-S1). Table 1b compares horizons read from the weights
    with what prefixes show: Spearman's correlation over the units of a layer.

    Every part is written to the output folder as CSV and PNG, with run.json to say of what.

    Example: dasc tables --model checkpoints/kimi-linear-mini --out results/kimi --n 20
    """

    model: str
    """Checkpoint directory, or published profile."""
    out: Path
    """Folder for the files; made if missing."""
    only: tuple[Part, ...] = ()
    """Parts to make; all that the model has if none is given."""
    n: int = 5
    """Table 1a: questions at each depth (the paper has 100)."""
    depths: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    """Table 1a: where the needle is, as parts of the context."""
    length: int = 1024
    """Table 1a: tokens of a prompt and the room for its answer."""
    new_tokens: int = 32
    """Table 1a: tokens generated at most."""
    batch: int = 10
    """Table 1a: sequences that run together."""
    prefixes: int = 4
    """Table 1b: prefixes of each length (the paper has 8)."""
    lengths: tuple[int, ...] = (2048, 1024)
    """Table 1b: tokens of a prefix (the paper has 16384 8192 4096 1024)."""
    text: Path | None = None
    """Table 1b: take prefixes out of this file; by default they are prompts of RULER's tasks."""
    dtype: Literal["bfloat16", "float32"] = "float32"
    """Of weights and activations; recurrent states are float32 always."""
    seed: int = 0
    """Of the questions and the prefixes."""
    compilation_cache: Annotated[str, tyro.conf.arg(metavar="DIR|auto|off")] = "auto"
    """Directory that keeps compiled steps. auto: $JAX_COMPILATION_CACHE_DIR, else one under
    ~/.cache; off: none."""


def main(argv: list[str] | None = None) -> int:
    """Runs the program on `argv` (default: the command line); returns the exit code."""
    args = tyro.cli(TablesArgs, args=argv, prog="dasc tables")
    console = Console()
    try:
        with complaints():
            settle(args.compilation_cache)
            config, h = load_profile(args.model)
            parts = wanted(args, config.delta.kind)
            check(args, config, parts)
            _note(args, config, parts, console)
            _figures(args, config, h, parts, console)
            if {"1a", "1b"} & set(parts):
                model = load(Path(args.model), args.dtype, Console(stderr=True))
                _tables(args, model, h, parts, console)
    except ProgramError:
        return FAILED
    except KeyboardInterrupt:
        return 130
    console.print(f"written: {args.out}", markup=False, highlight=False, soft_wrap=True)
    return 0


def wanted(args: TablesArgs, kind: str) -> tuple[Part, ...]:
    """The parts to make, in the paper's order.

    Raises:
        ValueError: a part that this model cannot have.
    """
    tables: tuple[Part, ...] = () if args.model in PUBLISHED else ("1a", "1b")
    possible = (*tables, *OF_KIND[kind])
    if impossible := [part for part in args.only if part not in possible]:
        raise ValueError(
            f"{args.model} ({kind.upper()}) has no part {', '.join(impossible)};"
            f" it has {', '.join(possible)}"
        )
    return tuple(part for part in possible if part in args.only or not args.only)


def check(args: TablesArgs, config: ModelConfig, parts: Sequence[Part]) -> None:
    """Raises ValueError for sizes that cannot run, before anything is loaded."""
    sizes = {"n": args.n, "batch": args.batch, "new-tokens": args.new_tokens}
    sizes |= {"prefixes": args.prefixes, "lengths": min(args.lengths, default=0)}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1")
    if not args.depths or not all(0 <= depth <= 1 for depth in args.depths):
        raise ValueError(f"depths are {args.depths}; they must lie in 0 to 1")
    longest = {"1a": args.length, "1b": max(args.lengths)}
    for part, tokens in longest.items():
        if part in parts and tokens > config.max_context:
            raise ValueError(
                f"Table {part} would take {tokens} tokens; the context is {config.max_context}"
            )


def table_1a(model: Model, args: TablesArgs, progress: Console) -> list[intervention.Answer]:
    """The answers to all questions of Table 1a under all interventions, shown as they come."""
    tokenizer = intervention.tokenizer_of(model)
    generator = Generator(tokenizer, split="eval", seed=args.seed)
    # No needle is used at two depths: all answers are independent.
    depths = enumerate(args.depths)
    asked = [(depth, at * args.n + index) for at, depth in depths for index in range(args.n)]
    probes = [
        intervention.make_probe(tokenizer, generator, args.length, depth, index, args.new_tokens)
        for depth, index in track(asked, "Table 1a: questions", console=progress, transient=True)
    ]
    answers: list[intervention.Answer] = []
    with Progress(console=progress, transient=True) as bar:
        total = len(probes) * len(intervention.INTERVENTIONS)
        task = bar.add_task("Table 1a: answers", total=total)
        for some in intervention.run(model, probes, args.batch):
            answers += some
            bar.update(task, advance=len(some))
    return answers


def table_1b(
    model: Model, h: Horizons, args: TablesArgs, progress: Console
) -> list[correlation.Correlation]:
    """The correlations of all prefixes, layers and pairs of Table 1b."""
    tokenizer = intervention.tokenizer_of(model)
    if args.text is not None:
        prefixes = correlation.text_prefixes(
            tokenizer, args.text, args.lengths, args.prefixes, args.seed
        )
    else:
        generator = Generator(tokenizer, split="eval", seed=args.seed)
        prefixes = correlation.prompt_prefixes(tokenizer, generator, args.lengths, args.prefixes)
    rows, room = [], max(args.lengths)
    shown = track(prefixes, "Table 1b: prefixes", console=progress, transient=True)
    for number, prefix in enumerate(shown):
        seen = observe(model, prefix.tokens, room)
        rows += correlation.correlate(model.config, h, seen, number, prefix.source)
    return rows


def _tables(
    args: TablesArgs, model: Model, h: Horizons, parts: Sequence[Part], console: Console
) -> None:
    name, progress = Path(args.model).name, Console(stderr=True)
    if "1a" in parts:
        answers = table_1a(model, args, progress)
        cells = intervention.accuracies(answers)
        write_csv(args.out / "table_1a.csv", cells)
        _write_jsonl(args.out / "table_1a_answers.jsonl", answers)
        write_figure(args.out / "table_1a.png", intervention.draw(cells, name))
        console.print(intervention.table(cells, name))
    if "1b" in parts:
        rows = table_1b(model, h, args, progress)
        lines = correlation.summarise(model.config.delta.kind, rows)
        write_csv(args.out / "table_1b.csv", lines)
        write_csv(args.out / "table_1b_pairs.csv", rows)
        write_figure(args.out / "table_1b.png", correlation.draw(rows, name))
        console.print(correlation.table(lines, name))


def _figures(
    args: TablesArgs,
    config: ModelConfig,
    h: Horizons,
    parts: Sequence[Part],
    console: Console,
) -> None:
    name, of = Path(args.model).name, horizon_figures
    makers: dict[Part, tuple[Callable[[], Sequence[Any]], Callable[[], Any]]] = {
        "2": (lambda: of.profile_points(h), lambda: of.draw_profile(h, name)),
        "4": (lambda: of.head_horizons(config, h), lambda: of.draw_heads(config, h, name)),
        "5": (lambda: of.head_fractions(config, h), lambda: of.draw_fractions(config, h, name)),
        "6": (lambda: of.channel_horizons(config, h), lambda: of.draw_channels(config, h, name)),
    }
    for part, (cells, drawn) in makers.items():
        if part in parts:
            write_csv(args.out / f"figure_{part}.csv", cells())
            write_figure(args.out / f"figure_{part}.png", drawn())
    if "2" in parts:
        console.print(f"Figure 2: {of.profile_summary(h)}", highlight=False)


def _note(args: TablesArgs, config: ModelConfig, parts: Sequence[Part], console: Console) -> None:
    """What is made, of what and on what: printed, and written to run.json."""
    run = dataclasses.asdict(args) | {"only": parts, "family": config.family, "machine": machine()}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "run.json").write_text(json.dumps(run, indent=2, default=str) + "\n")
    console.print(
        f"{args.model}: {config.family}, {config.delta.kind.upper()}; parts {', '.join(parts)};"
        f" {args.dtype} on {machine()}; seed {args.seed}",
        markup=False, highlight=False,
    )  # fmt: skip


def _write_jsonl(path: Path, rows: Sequence[Any]) -> None:
    path.write_text("".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
