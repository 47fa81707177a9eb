"""Table 1b of the paper: do horizons read from the weights rank units as prefixes do?

For every prefix and recurrent layer, Spearman's rank correlation over the layer's units of the
static horizon H_s with the empirical horizon H_e (Eq. 4), the state's magnitude and the final
readout's (Eq. 5). The table gives the median and the quartiles over all prefixes and layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float64
from matplotlib.figure import Figure
from rich.table import Table

from dasc_jax.analysis.chart import BLUE, MUTED, ORANGE, blank, style, text_table
from dasc_jax.analysis.observe import Observed
from dasc_jax.config import ModelConfig
from dasc_jax.evals.ruler import TASKS, Generator
from dasc_jax.horizons import EPSILON, horizons, readout_magnitude, spearman, state_magnitude
from dasc_jax.tokenizer import Tokenizer

PAIRS = {"H_e": "H_s, H_e", "state": "H_s, ||S||", "readout": "H_s, ||o||"}
"""What H_s is compared with, and the paper's name of the comparison."""


@dataclass(frozen=True)
class Prefix:
    """Token ids, and where they come from."""

    source: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Correlation:
    """Spearman's rho of one prefix, layer and pair; NaN where a side is constant."""

    prefix: int
    source: str
    tokens: int
    layer: int
    pair: str
    units: int
    rho: float


@dataclass(frozen=True)
class Summary:
    """A line of Table 1b: quartiles over `comparisons` prefix-layer pairs with a defined rho."""

    kind: str
    pair: str
    median: float
    q1: float
    q3: float
    comparisons: int


def prompt_prefixes(
    tokenizer: Tokenizer, generator: Generator, lengths: Sequence[int], each: int
) -> list[Prefix]:
    """`each` prefixes of every length: RULER prompts of its tasks in turn.

    Prompts are made longer than asked for, and the final tokens kept (as appendix A.2 does with
    conversations); one that is still shorter is taken as it is.
    """
    result = []
    for length in sorted(lengths, reverse=True):
        for index in range(each):
            task = TASKS[len(result) % len(TASKS)]
            made = generator.instance(task, length + length // 16 + 256, index)
            result.append(Prefix(task, tuple(tokenizer.encode(made.prompt)[-length:])))
    return result


def text_prefixes(
    tokenizer: Tokenizer, path: Path, lengths: Sequence[int], each: int, seed: int
) -> list[Prefix]:
    """`each` prefixes of every length, from places in a UTF-8 file that `seed` draws.

    Raises:
        OSError: it cannot be read. ValueError: it has fewer tokens than the longest prefix.
    """
    tokens = tokenizer.encode(path.read_text())
    if len(tokens) < max(lengths):
        raise ValueError(f"{path} has {len(tokens)} tokens; a prefix takes {max(lengths)}")
    random = np.random.default_rng(seed)
    result = []
    for length in sorted(lengths, reverse=True):
        for start in random.integers(0, len(tokens) - length + 1, each):
            result.append(Prefix(f"{path.name}@{start}", tuple(tokens[start : start + length])))
    return result


def correlate(
    config: ModelConfig,
    static: Sequence[Float64[np.ndarray, "H *K"]],
    seen: Observed,
    prefix: int = 0,
    source: str = "",
    eps: float = EPSILON,
) -> list[Correlation]:
    """The rows of one prefix: three for every recurrent layer.

    `static` are the horizons H_s, one array a recurrent layer. Raises HorizonError where an
    observed decay is degenerate.
    """
    kind, rows = config.delta.kind, []
    for at, layer in enumerate(config.recurrent_layers):
        measured = {
            "H_e": horizons(seen.log_decay[at], eps, layer),
            "state": state_magnitude(seen.temporal[at], kind),
            "readout": readout_magnitude(seen.temporal[at], seen.query[at], kind),
        }
        for pair, values in measured.items():
            rho = spearman(static[at], values)
            rows.append(Correlation(prefix, source, seen.tokens, layer, pair, values.size, rho))
    return rows


def summarise(kind: str, rows: Sequence[Correlation]) -> list[Summary]:
    """The lines of Table 1b; NaN throughout for a pair without a defined rho."""
    result = []
    for pair in PAIRS:
        rho = np.array([r.rho for r in rows if r.pair == pair])
        rho = rho[np.isfinite(rho)]
        q1, median, q3 = np.quantile(rho, (0.25, 0.5, 0.75)) if rho.size else [np.nan] * 3
        result.append(Summary(kind, pair, float(median), float(q1), float(q3), rho.size))
    return result


def table(lines: Sequence[Summary], title: str) -> Table:
    """Table 1b as a rich table."""
    name = f"Table 1b, {title}: Spearman's rho over the units of a layer"
    result = text_table(name, ("kind", "pair", "median", "IQR", "n prefix-layer pairs"), left=2)
    for line in lines:
        result.add_row(
            line.kind.upper(),
            PAIRS[line.pair],
            f"{line.median:.3f}",
            rf"\[{line.q1:.3f}, {line.q3:.3f}]",
            f"{line.comparisons:,}",
        )
    return result


def draw(rows: Sequence[Correlation], title: str) -> Figure:
    """Table 1b as a picture: every rho as a point, by layer, with the quartiles as a box."""
    figure = blank(8.4, 3.6)
    panels = figure.subplots(1, len(PAIRS), sharey=True)
    layers = sorted({r.layer for r in rows})
    for axes, (pair, label) in zip(panels, PAIRS.items(), strict=True):
        groups = [
            [r.rho for r in rows if r.pair == pair and r.layer == layer and np.isfinite(r.rho)]
            for layer in layers
        ]
        axes.boxplot(
            groups, tick_labels=[str(layer) for layer in layers], showfliers=False,
            medianprops={"color": ORANGE}, boxprops={"color": MUTED},
            whiskerprops={"color": MUTED}, capprops={"color": MUTED},
        )  # fmt: skip
        for at, group in enumerate(groups, 1):
            axes.plot([at] * len(group), group, ".", color=BLUE, alpha=0.45, ms=4)
        axes.axhline(0, color=MUTED, lw=0.8)
        style(axes, label, "layer", "Spearman's rho" if axes is panels[0] else "")
        axes.set_ylim(min([-0.05, *(r.rho - 0.05 for r in rows if np.isfinite(r.rho))]), 1.05)
    figure.suptitle(f"Table 1b, {title}: static horizons and what prefixes show", fontsize=11)
    return figure
