"""Figures of the quality page: scores by threshold, and drift over turns."""

import itertools
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dasc_jax.analysis.chart import BLUE, GREEN, INK, MUTED, ORANGE, blank, style
from dasc_jax.evals.quality.cells import ArmKey, Mode, Store
from dasc_jax.evals.quality.summary import ArmSummary, RandomSummary, View
from dasc_jax.evals.stats import Difference

SERIES: tuple[tuple[Mode, str | None, str, str], ...] = (
    ("nr", None, BLUE, "o-"),
    ("wr", None, ORANGE, "s-"),
    ("nr", "int8", BLUE, "o:"),
    ("wr", "int8", ORANGE, "s:"),
)
POLICIES = (("nr", BLUE), ("wr", ORANGE), ("int8", GREEN))


def draw_sweep(view: View) -> Figure:
    """Paired differences to dense by W_max, 95 % intervals: a row a model, a column a length.

    Of one length alone, a column a model.
    """
    models = list(dict.fromkeys(model for model, _ in view.arms))
    lengths = sorted({length for _, length in view.arms})
    rows, columns = (len(models), len(lengths)) if len(lengths) > 1 else (1, len(models))
    figure = blank(5.0 * columns, 3.8 * rows)
    panels = figure.subplots(rows, columns, squeeze=False, sharey="row").ravel()
    for axes, place in zip(panels, itertools.product(models, lengths), strict=True):
        if place in view.arms:
            title = f"{place[0]}, {place[1]:,} tokens"
            _sweep(axes, view.arms[place], view.masks_at(*place), title)
        else:
            axes.set_visible(False)
    return figure


def _sweep(
    axes: Axes, arms: Sequence[ArmSummary], masks: Sequence[RandomSummary], title: str
) -> None:
    # Places, not values: thresholds are an ordinal scale that starts at "keep everything".
    places = {w: at for at, w in enumerate(sorted({arm.first.w_max for arm in arms}))}
    paired = {arm.first.arm: arm.difference for arm in arms if arm.difference}
    axes.axhline(0, color=INK, lw=1)
    for policy, quantization, colour, form in SERIES:
        mine = {w: paired[key] for w in places
                if (key := ArmKey(policy, w, quantization)) in paired}  # fmt: skip
        if not mine:
            continue
        x, found = np.array([places[w] for w in mine]), list(mine.values())
        label = f"{policy} {quantization}" if quantization else policy
        axes.plot(x, [d.mean for d in found], form, color=colour, lw=1.6, ms=4.5, label=label)
        if quantization is None:
            ends = ([d.low for d in found], [d.high for d in found])
            axes.fill_between(x, *ends, color=colour, alpha=0.12, lw=0)
    _masks(axes, places, paired, masks)
    style(axes, title, "W_max, tokens", "RULER, mean of tasks minus dense")
    axes.set_xticks(range(len(places)), [str(w) for w in places])
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)


def _masks(
    axes: Axes,
    places: dict[int, int],
    paired: dict[ArmKey, Difference],
    masks: Sequence[RandomSummary],
) -> None:
    """The mean of the random masks with their sample deviation."""
    shown = [one for one in masks if ArmKey("nr", one.w_max) in paired]
    if not shown:
        return
    y = [paired[ArmKey("nr", one.w_max)].mean - one.difference.mean for one in shown]
    spread = np.nan_to_num([one.spread for one in shown])
    axes.errorbar([places[one.w_max] for one in shown], y, spread, fmt="x--", color=MUTED, lw=1.2,
                  capsize=3, label="nr, random masks")  # fmt: skip


def draw_drift(store: Store, models: Sequence[str]) -> Figure:
    """A panel for every model and threshold: KL from the exact run by turn, by load policy."""
    panels = [
        (model, w_max)
        for model in models
        for w_max in dict.fromkeys(row["w_max"] for row in store.noted("drift", model))
    ]
    figure = blank(4.6 * len(panels), 3.6)
    for axes, (model, w_max) in zip(
        figure.subplots(1, len(panels), squeeze=False, sharey=True).ravel(), panels, strict=True
    ):
        rows = [row for row in store.noted("drift", model) if row["w_max"] == w_max]
        for policy, colour in POLICIES:
            mine = [row for row in rows if row["policy"] == policy and row["turn"] > 1]
            turns = [row["turn"] for row in mine]
            # Zero has no place on a logarithmic axis; 1e-9 is below what float32 can show.
            for name, form in (("kl_mean", "o-"), ("kl_max", ":")):
                values = [max(row[name], 1e-9) for row in mine]
                label = policy if name == "kl_mean" else None
                axes.plot(turns, values, form, color=colour, lw=1.4, ms=4, label=label)
        style(axes, f"{model}, W_max {w_max}", "turn", "KL from the exact run, nats")
        axes.set_yscale("log")
        axes.legend(frameon=False, fontsize=8, title="mean (dotted: largest)", title_fontsize=8)
    return figure
