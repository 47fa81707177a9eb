"""The page of the quality study: tables in the paper's form beside the paper's own numbers."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dasc_jax.analysis.chart import write_figure
from dasc_jax.evals.quality import markdown as md
from dasc_jax.evals.quality import paper
from dasc_jax.evals.quality.cells import COLD, EXACT, Cell, Store
from dasc_jax.evals.quality.figures import draw_drift, draw_sweep
from dasc_jax.evals.quality.findings import findings, largest_falls
from dasc_jax.evals.quality.preface import differences, gaps, origin
from dasc_jax.evals.quality.sections import drift, plans, table_1
from dasc_jax.evals.quality.summary import (
    LOSS,
    ArmSummary,
    View,
    keys_of,
    lengths_of,
    losses,
    models_of,
    view,
)
from dasc_jax.evals.ruler import SHORT

FULL = {short: task for task, short in SHORT.items()}


def write_page(store: Store, lines: Path) -> Path:
    """Write the page beside its file of lines, and its figures into a folder of that name."""
    seen, folder = view(store), lines.with_suffix("")
    if seen.arms:
        write_figure(folder / "sweep.png", draw_sweep(seen))
    if drifted := [model for model in models_of(store) if store.noted("drift", model)]:
        write_figure(folder / "drift.png", draw_drift(store, drifted))
    page = lines.with_suffix(".md")
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text_of(seen, lines), encoding="utf-8")
    return page


def text_of(seen: View, lines: Path) -> str:
    """The page of `lines`, most important first."""
    folder = lines.with_suffix("").name
    parts = [
        "# Quality of compressed checkpoints on the demo models\n",
        "What a prefix cache costs in answers when its checkpoints keep only units that remember"
        " more than W_max tokens (nr: the others start from zero; wr: they are recomputed from"
        f" the last tokens; dense: nothing is dropped). Computed from `{lines.name}` by"
        " `scripts/reproduce_quality.py`, page included; differences are means over instances with"
        " 95 % intervals in brackets.\n",
        *findings(seen),
        gaps(seen.store),
        differences(seen.store),
        *_sweep(seen, folder),
        *_random(seen),
        *plans(seen.store),
        *_int8(seen),
        *table_1(seen.store, folder),
        *drift(seen.store, folder),
        *_cold(seen.store),
        origin(seen.store, lines),
    ]
    return "\n".join(part for part in parts if part)


def _sweep(seen: View, folder: str) -> Iterator[str]:
    yield "## Replay from the cache\n"
    if not seen.arms:
        yield "Not measured.\n"
        return
    yield f"![Mean of the tasks by W_max]({folder}/sweep.png)\n"
    for model in dict.fromkeys(model for model, _ in seen.arms):
        lengths = [length for name, length in seen.arms if name == model]
        for length in lengths:
            yield f"### {model}, {length:,} tokens: arms against dense\n"
            yield _statistics(seen.arms[model, length])
        yield from _losses(seen.store, model)
        yield f"### {model}: tasks\n"
        yield (
            "The paper's tables 2, 6 and 7; its rows, in italics, are of the released model at 4k"
            " tokens. Arms in int8 are above.\n"
        )
        rows = _score_rows(seen.store, model, lengths)
        yield md.table(["arm", "length", *paper.TASKS, "Avg"], rows, 2)


def _score_rows(store: Store, model: str, lengths: list[int]) -> Iterator[list[str]]:
    keys = {key: None for length in lengths for key in keys_of(store, model, length)}
    for key in (key for key in keys if not key.quantization):
        found = [(length, store.select(model, length, key)) for length in lengths]
        for length, cells in found:
            if cells:
                yield [md.arm(key), f"{length:,}", *_scores(cells)]
        family = next(cells for _, cells in found if cells)
        theirs = paper.line(next(iter(family.values())).family, key.policy, key.w_max)
        if theirs:
            values = [f"*{md.number(v)}*" for v in (*theirs.scores, theirs.average)]
            yield [f"*{md.arm(key)}*", "*paper, 4k*", *values]


def _scores(cells: dict[str, Cell]) -> list[str]:
    """By the paper's columns, and their mean over the tasks that were run."""
    values = [cells[FULL[t]].score if FULL[t] in cells else None for t in paper.TASKS]
    average = float(np.mean([value for value in values if value is not None]))
    return [*map(md.number, values), md.number(average, 3)]


def _statistics(arms: list[ArmSummary]) -> str:
    header = "arm|mean [95 %]|minus dense [95 %]|p|p sign|p Holm|paper, 4k|replayed a hit|bytes"
    header += "|smaller|temporal alone"
    rows = []
    for arm in arms:
        first, paired = arm.first, arm.difference
        rows.append([
            md.arm(first.arm), md.mean(arm.score), md.difference(paired),
            md.probability(paired and paired.p), md.probability(paired and paired.p_sign),
            md.probability(arm.p_holm), _paper_difference(first), md.number(arm.replayed, 1),
            f"{first.slot_bytes or 0:,}", f"{md.number(first.compression)}x",
            f"{md.number(first.temporal_compression)}x",
        ])  # fmt: skip
    faults = [f"- not strict, {md.arm(arm.first.arm)}: {x}" for arm in arms for x in arm.faults]
    return md.table(header.split("|"), rows) + "".join(f"\n{line}" for line in faults)


def _paper_difference(cell: Cell) -> str:
    lines = [paper.line(cell.family, *at) for at in ((cell.policy, cell.w_max), ("dense", 0))]
    if cell.quantization or cell.arm == EXACT or lines[0] is None or lines[1] is None:
        return md.NONE
    return md.number(lines[0].average - lines[1].average, 2, True)


def _losses(store: Store, model: str) -> Iterator[str]:
    rows = [
        [f"{x.length:,}", str(x.w_max), SHORT.get(x.task, x.task), md.number(x.dense, 3),
         md.number(x.nr, 3), md.number(x.nr - x.dense, 3, True), md.number(x.wr, 3),
         md.NONE if x.recovered is None else f"{x.recovered:.0%}"]
        for x in losses(store, model)
    ]  # fmt: skip
    yield f"### {model}: where nr falls by more than {LOSS}\n"
    header = ["length", "W_max", "task", "dense", "nr", "loss", "wr", "recovered"]
    yield md.table(header, rows, 3) if rows else "Nowhere.\n"


def _random(seen: View) -> Iterator[str]:
    yield (
        "## Horizons against random masks\n\nnr with the horizons' units minus the mean of masks"
        " that keep as many units of every layer; paired by instance over all tasks, conditional on"
        " these masks; Holm over the lines of a model. Last the tasks on which the masks lose most"
        f" to dense. {_table_5()}\n"
    )
    rows = [
        [model, f"{x.length:,}", str(x.w_max), str(x.seeds), md.number(x.dasc, 3),
         f"{md.number(x.random, 3)} ± {md.number(x.spread, 3)}", md.difference(x.difference),
         md.probability(x.difference.p), md.probability(x.difference.p_sign),
         md.probability(x.p_holm), largest_falls(seen, model, x)]
        for model, masks in seen.masks.items()
        for x in masks
    ]  # fmt: skip
    header = ["model", "length", "W_max", "masks", "horizons", "random", "difference [95 %]", "p",
              "p sign", "p Holm", "masks lose most on"]  # fmt: skip
    yield md.table(header, rows) if rows else "Not measured.\n"


def _table_5() -> str:
    points = [line[3] for line in paper.TABLE_5]
    clear = sum(line[6] < 0.05 for line in paper.TABLE_5)
    return (
        f"The paper has this for end tasks only (table 5, Kimi-Linear): {min(points):+.2f} to"
        f" {max(points):+.2f} points of accuracy in {len(points)} comparisons, {clear} of them with"
        " a Holm-adjusted p below 0.05."
    )


def _int8(seen: View) -> Iterator[str]:
    yield "## Rows in int8\n\nThe mean over all tasks, W_max 16 as in the paper's table 4.\n"
    rows = []
    keys = (EXACT, *(EXACT._replace(policy="nr", w_max=w, quantization=q)
                     for w, q in ((16, None), (16, "int8"), (0, "int8"))))  # fmt: skip
    for (model, length), arms in seen.arms.items():
        of = {arm.first.arm: md.number(arm.score.mean, 4) for arm in arms}
        rows.append([model, f"RULER, {length:,}", *(of.get(key, md.NONE) for key in keys)])
    rows += [["*Kimi-Linear-48B*", f"*{task}*", *(f"*{v:.4f}*" for v in values), md.NONE]
             for task, values in paper.TABLE_4.items()]  # fmt: skip
    yield md.table(["model", "task", "dense", "nr 16", "nr 16 int8", "int8 alone"], rows, 2)


def _cold(store: Store) -> Iterator[str]:
    yield "## RULER without reuse\n\nGreedy, cold; the paper has no cold runs.\n"
    rows = []
    for model in models_of(store):
        for length in lengths_of(store, model):
            cells = store.select(model, length, COLD)
            if cells:
                n = next(iter(cells.values())).n
                rows.append([model, f"{length:,}", str(n), *_scores(cells)])
    header = ["model", "length", "n a task", *paper.TASKS, "Avg"]
    yield md.table(header, rows) if rows else "Not measured.\n"
