"""The retention profile of a model as a picture: decays, horizons, retained units, compression."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from dasc_jax.analysis.chart import BLUE, GREEN, INK, MUTED, ORANGE, blank, layer_map, style
from dasc_jax.config import ModelConfig
from dasc_jax.horizons import EPSILON, GATE_INPUT
from dasc_jax.layout import account
from dasc_jax.plan import SelectionPlan, make_plan


def draw(
    config: ModelConfig,
    h: Sequence[Float64[np.ndarray, "H *K"]],
    w_max: Sequence[int],
    tp: int = 1,
    *,
    eps: float = EPSILON,
    a: float = GATE_INPUT,
    title: str = "",
) -> Figure:
    """Four panels on the Agg canvas: call `savefig` on the result. `w_max` are tokens.

    Decays are distributions over all units of all recurrent layers; the map has a row for every
    layer of the model, attention layers in grey.
    """
    thresholds = sorted({w for w in w_max if w > 0})
    figure = blank(12.0, 9.0, f"{title or config.family}: retention profile")
    top, bottom = figure.subplots(2, 2)
    pooled = np.concatenate([x.ravel() for x in h])
    _decays(top[0], eps ** (1 / pooled), thresholds, eps)
    _horizons(top[1], pooled, thresholds)
    if config.delta.kind == "kda":
        _retained_map(bottom[0], config, h, thresholds[0] if thresholds else 0)
    else:
        _horizon_map(bottom[0], config, h)
    _compression(bottom[1], config, [make_plan(h, w, eps, a) for w in thresholds], tp)
    return figure


def _decays(axes: Axes, alpha: np.ndarray, thresholds: Sequence[int], eps: float) -> None:
    axes.plot(np.sort(alpha), (np.arange(alpha.size) + 0.5) / alpha.size, color=BLUE, lw=2)
    for w in thresholds:
        axes.axvline(eps ** (1 / w), color=ORANGE, lw=1, ls=(0, (4, 3)))
    kept = [f"W_max {w}: {np.mean(alpha > eps ** (1 / w)):.2%}" for w in thresholds]
    note = "\n".join(["kept (right of a line):", *kept]) if kept else ""
    axes.text(0.03, 0.96, note, transform=axes.transAxes, va="top", fontsize=9, color=INK)
    style(axes, "Decay of a unit per token", "decay factor alpha", "fraction of units below")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)


def _horizons(axes: Axes, pooled: np.ndarray, thresholds: Sequence[int]) -> None:
    low, high = np.floor(np.log2(pooled.min())), np.ceil(np.log2(pooled.max()))
    edges = 2.0 ** np.arange(low, high + 0.5, 0.5)
    share = np.full(pooled.size, 1 / pooled.size)
    axes.hist(pooled, edges.tolist(), weights=share, color=BLUE, alpha=0.85, edgecolor="white")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    for w in thresholds:
        axes.axvline(w, color=ORANGE, lw=1, ls=(0, (4, 3)))
        axes.annotate(f"{w}", (w, 1), xycoords=("data", "axes fraction"), xytext=(3, -10),
                      textcoords="offset points", fontsize=8, color=ORANGE)  # fmt: skip
    style(axes, "Retention horizon (kept: right of W_max)", "horizon, tokens", "share of units")


def _retained_map(
    axes: Axes, config: ModelConfig, h: Sequence[Float64[np.ndarray, "H *K"]], w_max: int
) -> None:
    values = np.array([(x > w_max).mean(axis=1) for x in h])
    image = layer_map(axes, config, values, cmap="viridis", vmin=0, vmax=1)
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes.set_title(f"Channels kept of each head at W_max {w_max}", loc="left", color=INK)


def _horizon_map(axes: Axes, config: ModelConfig, h: Sequence[Float64[np.ndarray, "H"]]) -> None:
    values = np.log2(np.array(h))
    low, high = np.quantile(values, (0.02, 0.98))
    image = layer_map(axes, config, values, cmap="viridis", vmin=low, vmax=high)
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02, extend="both")
    bar.ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{2**value:g}"))
    axes.set_title("Horizon of each head, tokens", loc="left", color=INK)


def _compression(axes: Axes, config: ModelConfig, plans: Sequence[SelectionPlan], tp: int) -> None:
    style(axes, f"Complete checkpoint, {tp} rank{'s' * (tp > 1)}", "W_max, tokens", "times smaller")
    even = "balanced" if tp > 1 else "float32"
    lines = [
        (f"{even}, int8" if tp > 1 else "int8", "hybrid", "int8", GREEN, (4, 8)),
        (even, "hybrid", None, BLUE, (-20, 4)),
    ]
    lines += [("unbalanced", "off", None, ORANGE, (10, -13))] * (tp > 1)
    for label, placement, quantization, colour, offset in lines:
        ratios = [account(config, p, tp, placement, quantization).c_ckpt for p in plans]
        axes.plot(range(len(plans)), ratios, "o-", color=colour, lw=2, ms=5, label=label)
        for x, ratio in enumerate(ratios):
            axes.annotate(f"{ratio:.2f}", (x, ratio), xytext=offset, ha="center", fontsize=8,
                          textcoords="offset points", color=colour)  # fmt: skip
    axes.axhline(1, color=MUTED, lw=0.8)
    axes.set_xticks(range(len(plans)), [str(p.w_max) for p in plans])
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.margins(x=0.12, y=0.12)
    if plans:
        axes.legend(frameon=False, loc="upper left")
