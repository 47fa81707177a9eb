"""The program `dasc plan`: how long a model's state remembers, and what checkpoints of it cost."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from jaxtyping import Float64
from rich import box
from rich.console import Console
from rich.table import Table

from dasc_jax.analysis.balance import Balance, balance_table, balances
from dasc_jax.analysis.profile import load_profile
from dasc_jax.config import ModelConfig
from dasc_jax.horizons import EPSILON, GATE_INPUT
from dasc_jax.layout import Account, Placement, account
from dasc_jax.plan import SelectionPlan, make_plan

DENSE_SLOTS = 128
"""The paper's budget of a rank, counted in dense checkpoints (appendix C.1)."""

FILE_WIDTH = 120
"""Columns of the report where it goes to a file or a pipe, which have no width of their own."""


@dataclasses.dataclass(frozen=True)
class PlanArgs:
    """Show how long a model's recurrent state remembers, and what its prefix checkpoints cost.

    MODEL is a checkpoint directory (Hugging Face or native), of which only the decay parameters are
    read, or the name of a published profile that needs no weights: kimi-linear-48b or
    qwen3-next-80b (synthetic decays with the statistics that the DASC paper prints).

    A checkpoint keeps the units (heads of GDN, key channels of KDA) whose retention horizon exceeds
    W_max tokens. The table has a line for every W_max: what is kept, how much smaller a checkpoint
    gets, and how many of them the budget holds.

    With --tp above 1 a second table shows what balancing the ranks gains. Every rank computes an
    equal share of the heads, but keeps unequal parts of them, and the fullest rank decides how many
    checkpoints fit. Stage 1 (head order) chooses which heads a rank computes, when the weights are
    loaded; it costs nothing later. Stage 2 (storage) lets full ranks keep units on empty ones;
    those units cross the ranks whenever a checkpoint is stored or loaded.

    Example: dasc plan kimi-linear-48b --tp 8 --figure kimi.png --ranks-figure ranks.png
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Checkpoint directory, or published profile."""
    w_max: tuple[int, ...] = (0, 16, 64, 128, 512)
    """Thresholds in tokens; 0 keeps every unit."""
    tp: int = 1
    """Tensor-parallel ranks that share a checkpoint (the paper has 8); must divide the heads."""
    placement: Placement = "hybrid"
    """Of the first table. off: each rank stores its own heads; storage: stage 2; hybrid: both."""
    budget: int | None = None
    """Bytes for checkpoints on each rank; by default 128 dense checkpoints, as in the paper."""
    eps: float = EPSILON
    """Decay factor at which a unit counts as having forgotten."""
    a: float = GATE_INPUT
    """Gate input at which decays are taken; lower gives longer horizons."""
    figure: Path | None = None
    """Draw decays, horizons, retained fractions and compression into this PNG file."""
    ranks_figure: Path | None = None
    """Draw the bytes on every rank before and after each stage into this PNG file."""
    save: Path | None = None
    """Write the plans into this directory, as w16.plan and so on."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the report: a plan, and its account with float32 and with int8 rows."""

    plan: SelectionPlan
    native: Account
    int8: Account


def main(argv: list[str] | None = None) -> int:
    """Runs the program on `argv` (default: the command line); returns the exit code."""
    args = tyro.cli(PlanArgs, args=argv, prog="dasc plan")
    try:
        if args.tp == 1 and args.ranks_figure is not None:
            raise ValueError("--ranks-figure compares ranks: it needs --tp 2 or more, not 1")
        config, h = load_profile(args.model, a=args.a, eps=args.eps)
        rows = report(config, h, args.w_max, args.tp, args.placement, a=args.a, eps=args.eps)
        budget = args.budget
        if budget is None:
            budget = DENSE_SLOTS * rows[0].native.dense_bytes_per_slot
        balance = balances(config, [row.plan for row in rows], args.tp)
        _write(args, config, h, rows, balance)
    except (OSError, ValueError) as error:
        Console(stderr=True, soft_wrap=True).print(f"error: {error}", markup=False, highlight=False)
        return 1
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, FILE_WIDTH)
    console.print(summary(config, h, args.eps), highlight=False)
    console.print(table(rows, budget, args.tp, args.placement))
    if balance:
        console.print()
        console.print(balance_table(balance, budget))
    for path in filter(None, (args.figure, args.ranks_figure, args.save)):
        console.print(f"written: {path}", markup=False, highlight=False, soft_wrap=True)
    return 0


def report(
    config: ModelConfig,
    h: Sequence[Float64[np.ndarray, "H *K"]],
    w_max: Sequence[int],
    tp: int = 1,
    placement: Placement = "hybrid",
    *,
    a: float = GATE_INPUT,
    eps: float = EPSILON,
) -> list[Row]:
    """A row for every threshold, in the order given; raises as `make_plan` and `account` do."""
    if not w_max:
        raise ValueError("no W_max given: there is nothing to report")
    plans = [make_plan(h, w, eps, a) for w in w_max]
    return [
        Row(
            plan,
            account(config, plan, tp, placement),
            account(config, plan, tp, placement, quantization="int8"),
        )
        for plan in plans
    ]


def summary(
    config: ModelConfig, h: Sequence[Float64[np.ndarray, "H *K"]], eps: float = EPSILON
) -> str:
    """Two lines: the shape of the recurrent state, and the spread of its decays and horizons."""
    pooled = np.concatenate([x.ravel() for x in h])
    alpha = np.quantile(eps ** (1 / pooled), (0.25, 0.5, 0.75))
    tokens = np.quantile(pooled, (0.25, 0.5, 0.75))
    delta = config.delta
    unit = "key channels" if delta.kind == "kda" else "heads"
    return (
        f"{config.family}: {len(h)} {delta.kind.upper()} layers of {delta.num_value_heads} heads,"
        f" {pooled.size:,} units ({unit})\n"
        f"quartiles of the decay factor {_three(alpha, '.3f')}, of the horizon"
        f" {_three(tokens, '.3g')} tokens; longest {pooled.max():,.0f}"
    )


def table(rows: Sequence[Row], budget: int, tp: int, placement: Placement) -> Table:
    """The report as a rich table; `budget` in bytes of one rank."""
    ranks = "1 rank" if tp == 1 else f"{tp} ranks, placement {placement}"
    result = Table(
        title=f"Checkpoints on {ranks}; budget {budget:,} bytes a rank",
        caption="ragged, padded: the recurrent state alone, in either layout. complete: with the"
        " convolution windows, on the fullest rank. slots: how many the budget holds.",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=0,
    )
    for name in ("W_max", "window", "units", "kept %", "ragged", "padded", "bytes/slot"):
        result.add_column(name, justify="right")
    for name in ("complete", "slots", "int8", "slots"):
        result.add_column(name, justify="right")
    for row in rows:
        plan, native, int8 = row.plan, row.native, row.int8
        result.add_row(
            str(plan.w_max),
            str(plan.window),
            f"{plan.total:,}",
            f"{100 * plan.total / plan.units:.2f}",
            _times(native.c_temp),
            _times(native.c_temp_padded),
            f"{native.bytes_per_slot:,}",
            _times(native.c_ckpt),
            f"{native.slots(budget):,}",
            _times(int8.c_ckpt),
            f"{int8.slots(budget):,}",
        )
    return result


def _write(
    args: PlanArgs,
    config: ModelConfig,
    h: Sequence[Float64[np.ndarray, "H *K"]],
    rows: Sequence[Row],
    balance: Sequence[Balance],
) -> None:
    if args.save is not None:
        for row in rows:
            row.plan.save(args.save / f"w{row.plan.w_max}.plan")
    if args.figure is not None:
        from dasc_jax.analysis.chart import write_figure
        from dasc_jax.analysis.figure import draw

        write_figure(
            args.figure,
            draw(config, h, args.w_max, args.tp, eps=args.eps, a=args.a, title=args.model),
        )
    if args.ranks_figure is not None:
        from dasc_jax.analysis.balance import draw_balance
        from dasc_jax.analysis.chart import write_figure

        write_figure(args.ranks_figure, draw_balance(balance, args.model))


def _times(ratio: float) -> str:
    return "-" if math.isinf(ratio) else f"{ratio:.2f}x"


def _three(values: Float64[np.ndarray, "3"], form: str) -> str:
    return " / ".join(format(value, form) for value in values)
