"""Figures 2, 4, 5 and 6 of the paper: what a model's weights say about its retention, drawn.

All take static horizons, so a checkpoint's decay parameters or a published profile is enough.
Figure 4 is of heads (GDN), figures 5 and 6 are of key channels (KDA); figure 2 is of either.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import FuncFormatter

from dasc_jax.analysis.chart import (
    BLUE,
    INK,
    MUTED,
    ORANGE,
    blank,
    integer_map,
    layer_map,
    style,
)
from dasc_jax.config import ModelConfig
from dasc_jax.horizons import EPSILON, HorizonError

THRESHOLDS = (16, 64, 128, 512, 1024)
"""The W_max that the paper tests, in tokens: the bins of figures 4 and 6."""

CUTOFF = 16
"""W_max of figure 5, of the block that figure 6 picks, and of the share of mixed heads."""

POINTS = 1001
"""Points of figure 2's curve."""


@dataclasses.dataclass(frozen=True)
class Quantile:
    """A point of figure 2: the fraction of all units with a decay factor up to `alpha`."""

    fraction: float
    alpha: float
    horizon: float


@dataclasses.dataclass(frozen=True)
class HeadHorizon:
    """A cell of figure 4; `bin` is the largest tested W_max below the horizon, 0 for none."""

    layer: int
    head: int
    horizon: float
    bin: int


@dataclasses.dataclass(frozen=True)
class HeadFraction:
    """A cell of figure 5: the share of a head's channels with a horizon above CUTOFF."""

    layer: int
    head: int
    kept: float


@dataclasses.dataclass(frozen=True)
class ChannelHorizon:
    """A cell of figure 6; `bin` as in HeadHorizon."""

    layer: int
    head: int
    channel: int
    horizon: float
    bin: int


def profile_points(
    h: Sequence[Float64[np.ndarray, "H *K"]], eps: float = EPSILON
) -> list[Quantile]:
    """Figure 2's curve: quantiles of alpha = exp(g) = eps^(1/H) pooled over all units."""
    fractions = np.linspace(0.0, 1.0, POINTS)
    alphas = np.quantile(eps ** (1 / _pooled(h)), fractions)
    return [
        Quantile(float(f), float(x), float(np.log(eps) / np.log(x)))
        for f, x in zip(fractions, alphas, strict=True)
    ]


def profile_summary(h: Sequence[Float64[np.ndarray, "H *K"]], eps: float = EPSILON) -> str:
    """Median and quartiles of alpha, and for channels the share of heads mixed at CUTOFF."""
    low, middle, high = np.quantile(eps ** (1 / _pooled(h)), (0.25, 0.5, 0.75))
    text = f"median alpha {middle:.3f}, IQR [{low:.3f}, {high:.3f}]"
    if h[0].ndim == 2:
        kept = kept_fractions(h)
        mixed = np.mean((kept > 0) & (kept < 1))
        text += f"; {mixed:.1%} of heads have channels on both sides of {CUTOFF} tokens"
    return text


def head_horizons(
    config: ModelConfig, h: Sequence[Float64[np.ndarray, "H *K"]]
) -> list[HeadHorizon]:
    """The cells of figure 4, in model order. HorizonError for a model of key channels."""
    _require(h, 1, "figure 4 maps heads (GDN)")
    return [
        HeadHorizon(layer, head, float(value), _bin(value))
        for layer, row in zip(config.recurrent_layers, h, strict=True)
        for head, value in enumerate(row)
    ]


def head_fractions(
    config: ModelConfig, h: Sequence[Float64[np.ndarray, "H *K"]]
) -> list[HeadFraction]:
    """The cells of figure 5, in model order. HorizonError for a model of heads."""
    _require(h, 2, "figure 5 counts key channels (KDA)")
    return [
        HeadFraction(layer, head, float(value))
        for layer, row in zip(config.recurrent_layers, kept_fractions(h), strict=True)
        for head, value in enumerate(row)
    ]


def channel_horizons(
    config: ModelConfig, h: Sequence[Float64[np.ndarray, "H *K"]]
) -> list[ChannelHorizon]:
    """The cells of figure 6, of the block that `typical_block` picks.

    HorizonError for a model of heads.
    """
    _require(h, 2, "figure 6 maps key channels (KDA)")
    at = typical_block(h)
    return [
        ChannelHorizon(config.recurrent_layers[at], head, channel, float(value), _bin(value))
        for head, row in enumerate(h[at])
        for channel, value in enumerate(row)
    ]


def kept_fractions(h: Sequence[Float64[np.ndarray, "H K"]]) -> Float64[np.ndarray, "L H"]:
    """Share of every head's channels with a horizon above CUTOFF."""
    return np.array([(x > CUTOFF).mean(axis=1) for x in h])


def typical_block(h: Sequence[Float64[np.ndarray, "H K"]]) -> int:
    """The recurrent layer whose retained share at CUTOFF is closest to the median of all layers.

    Counted among the recurrent layers (appendix A.1). Of an even number of layers two are equally
    close; the one that retains more is taken, as the paper's block 21 is.
    """
    kept = kept_fractions(h).mean(axis=1)
    distance = np.abs(kept - np.median(kept))
    closest = np.flatnonzero(np.isclose(distance, distance.min(), rtol=0, atol=1e-9))
    return int(closest[np.argmax(kept[closest])])


def draw_profile(
    h: Sequence[Float64[np.ndarray, "H *K"]], title: str, eps: float = EPSILON
) -> Figure:
    """Figure 2: the distribution of alpha over all units, its quartiles marked."""
    figure = blank(6.4, 4.2)
    axes = figure.subplots()
    alpha = np.sort(eps ** (1 / _pooled(h)))
    axes.hist(alpha, np.linspace(0, 1, 41).tolist(), color=BLUE, alpha=0.35,
              weights=np.full(alpha.size, 1 / alpha.size))  # fmt: skip
    axes.plot(alpha, (np.arange(alpha.size) + 0.5) / alpha.size, color=BLUE, lw=2)
    axes.axvline(eps ** (1 / CUTOFF), color=ORANGE, lw=1.2, ls=(0, (4, 3)))
    axes.annotate(f"H = {CUTOFF}", (eps ** (1 / CUTOFF), 0.02), xytext=(4, 0), fontsize=8,
                  textcoords="offset points", color=ORANGE)  # fmt: skip
    for quartile in np.quantile(alpha, (0.25, 0.5, 0.75)):
        axes.axvline(quartile, color=MUTED, lw=0.8)
    style(axes, f"Figure 2, {title}: decay of a unit per token", "decay factor alpha",
          "share of units (bars), share below alpha (line)")  # fmt: skip
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.text(0.02, 0.97, profile_summary(h, eps).replace("; ", "\n"), va="top", fontsize=8,
              color=INK, transform=axes.transAxes)  # fmt: skip
    return figure


def draw_heads(config: ModelConfig, h: Sequence[Float64[np.ndarray, "H *K"]], title: str) -> Figure:
    """Figure 4: the horizon of every GDN head, binned at the tested W_max."""
    _require(h, 1, "figure 4 maps heads (GDN)")
    figure = blank(7.2, 6.4)
    axes = figure.subplots()
    image = layer_map(axes, config, np.array(h), cmap="viridis", norm=_bins())
    _bin_bar(axes, image)
    axes.set_title(f"Figure 4, {title}: horizon of each head, tokens", loc="left", color=INK)
    return figure


def draw_fractions(
    config: ModelConfig, h: Sequence[Float64[np.ndarray, "H *K"]], title: str
) -> Figure:
    """Figure 5: the share of global channels of every KDA head at CUTOFF."""
    _require(h, 2, "figure 5 counts key channels (KDA)")
    figure = blank(7.2, 5.2)
    axes = figure.subplots()
    image = layer_map(axes, config, kept_fractions(h), cmap="viridis", vmin=0, vmax=1)
    bar = figure.colorbar(image, ax=axes, pad=0.02)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    label = f"Figure 5, {title}: channels kept at W_max {CUTOFF}"
    axes.set_title(label, loc="left", color=INK)
    return figure


def draw_channels(
    config: ModelConfig, h: Sequence[Float64[np.ndarray, "H *K"]], title: str
) -> Figure:
    """Figure 6: the horizon of every channel of a typical KDA block, in architectural order."""
    _require(h, 2, "figure 6 maps key channels (KDA)")
    figure = blank(8.4, 4.6)
    axes, at = figure.subplots(), typical_block(h)
    image = integer_map(axes, h[at], "key channel", "head", cmap="viridis", norm=_bins())
    _bin_bar(axes, image)
    block, kept = config.recurrent_layers[at], kept_fractions(h).mean(axis=1)
    axes.set_title(
        f"Figure 6, {title}, block {block}: horizon of each channel, tokens\n"
        f"kept at W_max {CUTOFF}: {kept[at]:.3f}, the median layer {np.median(kept):.3f}",
        loc="left", color=INK, fontsize=10,
    )  # fmt: skip
    return figure


def _bins() -> BoundaryNorm:
    return BoundaryNorm((0, *THRESHOLDS), 256, extend="max")


def _bin_bar(axes: Axes, image: AxesImage) -> None:
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02)
    bar.ax.set_yticks(THRESHOLDS, [str(w) for w in THRESHOLDS])


def _bin(horizon: float) -> int:
    return max((w for w in THRESHOLDS if horizon > w), default=0)


def _pooled(h: Sequence[Float64[np.ndarray, "H *K"]]) -> Float64[np.ndarray, "U"]:
    return np.concatenate([x.ravel() for x in h])


def _require(h: Sequence[np.ndarray], dimensions: int, what: str) -> None:
    if h[0].ndim != dimensions:
        raise HorizonError(f"{what}; this model has horizons of shape {h[0].shape} a layer")
