"""What figures and tables share: colours, axes, the map of a model's layers, columns, files."""

import csv
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator
from rich import box
from rich.table import Table

from dasc_jax.config import ModelConfig

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
BLUE, ORANGE, GREEN = "#2364aa", "#d1602b", "#3a7d44"
ATTENTION = "#cbd2d9"
"""Of the layers that have no recurrent state."""


def blank(width: float, height: float, title: str = "") -> Figure:
    """An empty figure on the Agg canvas, which needs no display; sizes in inches."""
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, color=INK, fontsize=12)
    return figure


def style(axes: Axes, title: str, x: str, y: str, grid: bool = True) -> None:
    """Title, labels and the look of one panel."""
    axes.set_title(title, loc="left", color=INK)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.tick_params(colors=INK)
    if not grid:
        return
    axes.grid(color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def layer_map(
    axes: Axes, config: ModelConfig, values: Float64[np.ndarray, "L H"], **colours: Any
) -> AxesImage:
    """A row for every layer of the model, attention layers in grey; `values` of the recurrent."""
    rows = np.full((config.num_layers, values.shape[1]), np.nan)
    rows[list(config.recurrent_layers)] = values
    axes.set_facecolor(ATTENTION)
    return integer_map(axes, rows, "head", "layer (grey: attention)", **colours)


def integer_map(
    axes: Axes, values: Float64[np.ndarray, "rows columns"], x: str, y: str, **colours: Any
) -> AxesImage:
    """One cell for every value, with whole numbers along both axes."""
    image = axes.imshow(values, aspect="auto", interpolation="nearest", **colours)
    style(axes, "", x, y, grid=False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    return image


def text_table(title: str, columns: Sequence[str], left: int = 1) -> Table:
    """An empty table for the terminal, its first `left` columns aligned left, the others right."""
    result = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for at, name in enumerate(columns):
        result.add_column(name, justify="left" if at < left else "right")
    return result


def write_figure(path: Path, figure: Figure) -> None:
    """Write a PNG file, its folder included. OSError where that cannot be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def write_csv(path: Path, rows: Sequence[Any]) -> None:
    """Write dataclass instances of one kind, a line each below their field names.

    Raises:
        ValueError: no row. OSError: the file cannot be written.
    """
    if not rows:
        raise ValueError(f"no row for {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(field.name for field in dataclasses.fields(rows[0]))
        writer.writerows(map(_cells, map(dataclasses.astuple, rows)))


def _cells(values: tuple[Any, ...]) -> list[Any]:
    return [f"{value:.10g}" if isinstance(value, float) else value for value in values]
