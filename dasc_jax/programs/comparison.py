"""How a comparison of policies is shown: two tables, a line of JSON a policy, one figure."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from dasc_jax.programs.outcomes import Outcome, wrong

NONE = "-"


def answers_table(outcomes: Sequence[Outcome]) -> Table:
    """A row a question, with the answers of every policy that are not the expected one."""
    table = _table("questions and answers")
    for name in ("question", "expected", "right", "wrong answers"):
        table.add_column(name, justify="right" if name == "right" else "left")
    for place, question in enumerate(outcomes[0].questions):
        missed = wrong(outcomes, place)
        said = "; ".join(f"{name}: {text!r}" for name, text in missed.items())
        right = f"{len(outcomes) - len(missed)}/{len(outcomes)}"
        table.add_row(question.short, question.answer, right, Text(said, "red"))
    return table


def policies_table(outcomes: Sequence[Outcome], title: str) -> Table:
    """A row a policy."""
    table = _table(title, padding=0)
    table.add_column("policy", no_wrap=True)
    for name in (
        "bytes a\ncheckpoint",
        "times\nsmaller",
        "cached\ntokens",
        "token\nhit rate",
        "replayed\na request",
        "TTFT ms\nmedian",
        "right\nanswers",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for one in outcomes:
        size = (f"{one.slot:,}", f"{one.compression:.2f}") if one.arm else (NONE, NONE)
        table.add_row(
            one.name,
            *size,
            f"{one.cached_tokens:,}",
            f"{100 * one.cached_tokens / one.prompt_tokens:.1f} %",
            f"{one.replayed:.0f}",
            f"{1e3 * one.ttft:.0f}",
            f"{sum(one.right)}/{len(one.right)}",
        )
    return table


def _table(title: str, padding: int | tuple[int, int] = (0, 1)) -> Table:
    return Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=padding
    )


def write_outcomes(outcomes: Sequence[Outcome], context: dict[str, Any], file: Path) -> None:
    """A JSON object a policy, each with the `context` (date, machine, load, command)."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for one in outcomes:
        values = {
            "name": one.name,
            "checkpoint_bytes": one.slot if one.arm else None,
            "compression": one.compression if one.arm else None,
            "requests": len(one.answers),
            "right": sum(one.right),
            "prompt_tokens": one.prompt_tokens,
            "cached_tokens": one.cached_tokens,
            "replayed_tokens_mean": one.replayed,
            "ttft_seconds_median": one.ttft,
            "ttft_seconds": [answer.ttft for answer in one.answers],
            "answers": [answer.text for answer in one.answers],
            "expected": [question.answer for question in one.questions],
        }
        lines.append(json.dumps({**values, **context}))
    file.write_text("\n".join(lines) + "\n")


def draw_outcomes(outcomes: Sequence[Outcome], title: str, file: Path) -> None:
    """Token hit rate, median time to the first token and bytes of a checkpoint, as a PNG."""
    from matplotlib.figure import Figure

    labels = [f"{one.name}  {sum(one.right)}/{len(one.right)} right" for one in outcomes]
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    panels = zip(
        figure.subplots(1, 3, sharey=True),
        (
            [100 * one.cached_tokens / one.prompt_tokens for one in outcomes],
            [1e3 * one.ttft for one in outcomes],
            [one.slot / 1e3 if one.arm else 0.0 for one in outcomes],
        ),
        ("prompt tokens from the cache, %", "median TTFT, ms", "a checkpoint, kB"),
        ("#3b6ea5", "#c0722e", "#5a8f4e"),
        strict=True,
    )
    for axes, values, name, colour in panels:
        bars = axes.barh(labels, values, color=colour)
        axes.bar_label(bars, fmt="%.0f", fontsize=8, padding=2)
        axes.margins(x=0.12)
        axes.set_title(name, fontsize=10)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].invert_yaxis()
    figure.suptitle(title, fontsize=9)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
