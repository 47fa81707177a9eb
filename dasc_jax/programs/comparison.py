"""How a comparison of arms is shown: one table, a line of JSON an arm, one figure."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from dasc_jax.programs.arms import Outcome

NONE = "-"


def comparison_table(outcomes: Sequence[Outcome], title: str) -> Table:
    """A row an arm."""
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=0
    )
    table.add_column("policy", no_wrap=True)
    for name in (
        "W_max",
        "bytes a\ncheckpoint",
        "slots",
        "hits",
        "token\nhit rate",
        "TTFT ms\nmean",
        "tokens\nas cold",
        "KL, nats\nmean",
        "replayed\na hit",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for one in outcomes:
        table.add_row(one.arm.name, *_cells(one))
    return table


def _cells(one: Outcome) -> list[str]:
    ttft = f"{1e3 * one.ttft:.1f}"
    if one.arm.cold:
        return [NONE, NONE, NONE, f"0/{one.requests}", "0.0 %", ttft, NONE, NONE, NONE]
    return [
        str(one.arm.w_max),
        f"{one.checkpoint_bytes:,}",
        str(one.slots),
        f"{one.hits}/{one.requests}",
        f"{100 * one.hit_rate:.1f} %",
        ttft,
        f"{100 * one.equal:.1f} %",
        f"{one.kl:.1e}",
        f"{one.replayed:.0f}",
    ]


def write_outcomes(outcomes: Sequence[Outcome], context: dict[str, Any], file: Path) -> None:
    """A JSON object an arm, each with the `context` (date, machine, command, sizes)."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for one in outcomes:
        values = dataclasses.asdict(one)
        lines.append(json.dumps({"name": one.arm.name, **values.pop("arm"), **values, **context}))
    file.write_text("\n".join(lines) + "\n")


def draw_outcomes(outcomes: Sequence[Outcome], title: str, file: Path) -> None:
    """Token hit rate and mean time to the first token of every arm, as a PNG."""
    from matplotlib.figure import Figure

    labels = [
        one.arm.name if one.arm.cold or not one.arm.w_max else f"{one.arm.name}\nW={one.arm.w_max}"
        for one in outcomes
    ]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    panels = (
        (left, [100 * one.hit_rate for one in outcomes], "token hit rate, %", "%.0f", "#3b6ea5"),
        (right, [1e3 * one.ttft for one in outcomes], "mean TTFT, ms", "%.0f", "#c0722e"),
    )
    for axes, values, name, form, colour in panels:
        bars = axes.bar(labels, values, color=colour)
        axes.bar_label(bars, fmt=form, fontsize=8)
        axes.set_title(name, fontsize=10)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
