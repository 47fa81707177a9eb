"""The page of the quality study: tables in the paper's form beside the paper's own numbers."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from dasc_jax.analysis.chart import write_figure
from dasc_jax.evals import quality_markdown as md
from dasc_jax.evals import quality_paper as paper
from dasc_jax.evals.quality_cells import COLD, EXACT, ArmKey, Cell, Store, common_tasks
from dasc_jax.evals.quality_figures import draw_drift, draw_sweep
from dasc_jax.evals.quality_preface import differences
from dasc_jax.evals.quality_summary import (
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
    page.write_text(text_of(seen, lines.name, folder.name), encoding="utf-8")
    return page


def text_of(seen: View, lines: str, folder: str) -> str:
    """The page; `lines` and `folder` are names beside it."""
    parts = [
        "# Quality of compressed checkpoints on the demo models\n",
        f"Every number comes from `{lines}` and was computed by `scripts/reproduce_quality.py`,"
        f" which also wrote this page.\n",
        differences(seen.store),
        *_short(seen),
        *_cold(seen.store),
        *_sweep(seen, folder),
        *_random(seen),
        *_int8(seen),
        *_table_1(seen.store, folder),
        *_drift(seen.store, folder),
    ]
    return "\n".join(parts)


def _short(seen: View) -> Iterator[str]:
    yield "## In short\n"
    for (model, length), arms in seen.arms.items():
        yield f"- **{model}, {length:,} tokens.** {_found(seen, model, length, arms)}"
    yield ""


def _found(seen: View, model: str, length: int, arms: Sequence[ArmSummary]) -> str:
    of = {arm.first.arm: arm for arm in arms}
    said = [f"Dense {md.mean(of[EXACT].score)}."]
    mild = of.get(ArmKey("nr", 16))
    if mild and mild.difference:
        said.append(
            f"nr at 16 minus dense: {md.difference(mild.difference)}, p"
            f" {md.probability(mild.difference.p)}, a checkpoint"
            f" {md.number(mild.first.compression)} times smaller."
        )
    fallen = [x for x in losses(seen.store, model) if (x.length, x.task) == (length, "mean")]
    swept = [key for key in of if key == ArmKey("nr", key.w_max)]
    if swept and not fallen:
        said.append(f"The mean of nr is nowhere more than {LOSS} below dense.")
    for loss in fallen:
        back = "wr was not measured" if loss.wr is None else f"wr has {md.number(loss.wr, 3)}"
        part = "" if loss.recovered is None else f", {loss.recovered:.0%} of the loss recovered"
        said.append(f"At {loss.w_max} nr falls to {md.number(loss.nr, 3)}; {back}{part}.")
    if masks := seen.masks_at(model, length):
        above = sum(one.difference.mean > 0 for one in masks)
        clear = sum(one.difference.mean > 0 and one.p_holm < 0.05 for one in masks)
        said.append(
            f"Horizons beat the mean of random masks at {above} of {len(masks)} thresholds, at"
            f" {clear} with a Holm-adjusted p below 0.05."
        )
    broken = [md.arm(key) for key, arm in of.items() if arm.faults]
    said.append(f"Not strict: {md.listed(broken)};" if broken else "Every replay was strict;")
    # What every arm loaded is at least what is left when no two arms missed the same request.
    common = max(0.0, 1.0 - sum(1.0 - arm.loaded for arm in arms))
    said.append(f"all arms loaded at least {md.percent(common)} of the same requests.")
    return " ".join(said)


def _cold(store: Store) -> Iterator[str]:
    yield "## RULER without reuse\n\nGreedy, cold; the paper has no cold runs.\n"
    rows = []
    for model in models_of(store):
        for length in lengths_of(store, model):
            cells = store.select(model, length, COLD)
            if cells:
                n = next(iter(cells.values())).n
                rows.append([model, f"{length:,}", str(n), *_scores(cells)])
    yield md.table(["model", "length", "n a task", *paper.TASKS, "Avg"], rows)
    yield from _hits_equal_cold(store)


def _hits_equal_cold(store: Store) -> Iterator[str]:
    pairs = []
    for model in models_of(store):
        for length in lengths_of(store, model):
            cold, dense = (store.select(model, length, key) for key in (COLD, EXACT))
            pairs += [(cold[task], dense[task]) for task in common_tasks([cold, dense])]
    moved = sum(a != b for c, d in pairs for a, b in zip(c.scores, d.scores, strict=True))
    total = sum(cold.n for cold, _ in pairs)
    if pairs:
        resumed = "when resumed from a dense checkpoint"
        yield f"Of {total} instances {moved} score differently {resumed}.\n"


def _sweep(seen: View, folder: str) -> Iterator[str]:
    yield (
        "## Replay from the cache\n\nThe paper's tables 2, 6 and 7. Its rows, in italics, are of"
        " the released models at 4k tokens.\n"
    )
    for model in dict.fromkeys(model for model, _ in seen.arms):
        lengths = [length for name, length in seen.arms if name == model]
        yield f"### {model}: scores\n"
        rows = _score_rows(seen.store, model, lengths)
        yield md.table(["arm", "length", *paper.TASKS, "Avg"], rows, 2)
        for length in lengths:
            yield f"### {model}, {length:,} tokens: arms against dense\n"
            yield _statistics(seen.arms[model, length])
        yield from _losses(seen.store, model)
    yield f"![Mean of the tasks by W_max]({folder}/sweep.png)\n" if seen.arms else "Not measured.\n"


def _score_rows(store: Store, model: str, lengths: list[int]) -> Iterator[list[str]]:
    keys = {key: None for length in lengths for key in keys_of(store, model, length)}
    for key in keys:
        found = [(length, store.select(model, length, key)) for length in lengths]
        for length, cells in found:
            if cells:
                yield [md.arm(key), f"{length:,}", *_scores(cells)]
        family = next(cells for _, cells in found if cells)
        theirs = paper.line(next(iter(family.values())).family, key.policy, key.w_max)
        if theirs and not key.quantization:
            values = [f"*{md.number(v)}*" for v in (*theirs.scores, theirs.average)]
            yield [f"*{md.arm(key)}*", "*paper, 4k*", *values]


def _scores(cells: dict[str, Cell]) -> list[str]:
    """By the paper's columns, and their mean over the tasks that were run."""
    values = [cells[FULL[t]].score if FULL[t] in cells else None for t in paper.TASKS]
    average = float(np.mean([value for value in values if value is not None]))
    return [*map(md.number, values), md.number(average, 3)]


def _statistics(arms: list[ArmSummary]) -> str:
    header = "arm|mean [95 %]|minus dense [95 %]|p|p sign|p Holm|paper, 4k|hit|loaded"
    header += "|replayed a hit|bytes|smaller|temporal|strict"
    rows = []
    for arm in arms:
        first, paired = arm.first, arm.difference
        rows.append([
            md.arm(first.arm), md.mean(arm.score), md.difference(paired),
            md.probability(paired and paired.p), md.probability(paired and paired.p_sign),
            md.probability(arm.p_holm), _paper_difference(first), md.percent(arm.token_hit),
            md.percent(arm.loaded), md.number(arm.replayed, 1), f"{first.slot_bytes or 0:,}",
            f"{md.number(first.compression)}x", f"{md.number(first.temporal_compression)}x",
            "no" if arm.faults else "yes",
        ])  # fmt: skip
    faults = [f"- {md.arm(arm.first.arm)}: {fault}" for arm in arms for fault in arm.faults]
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
        " these masks; Holm over the lines of a model. The paper has this for end tasks only"
        " (tables 3 and 5).\n"
    )
    rows = [
        [model, f"{x.length:,}", str(x.w_max), str(x.seeds), md.number(x.dasc, 3),
         f"{md.number(x.random, 3)} ± {md.number(x.spread, 3)}", md.difference(x.difference),
         md.probability(x.difference.p), md.probability(x.difference.p_sign),
         md.probability(x.p_holm)]
        for model, masks in seen.masks.items()
        for x in masks
    ]  # fmt: skip
    header = ["model", "length", "W_max", "masks", "horizons", "random", "difference [95 %]", "p",
              "p sign", "p Holm"]  # fmt: skip
    yield md.table(header, rows) if rows else "Not measured.\n"
    yield "The paper's table 5 (Kimi-Linear-48B, percentage points of accuracy):\n"
    theirs = [[task, str(w), f"{n:,}", f"{d:+.2f}", f"[{low:+.2f}, {high:+.2f}]", f"{p:.4f}"]
              for task, w, n, d, low, high, p in paper.TABLE_5]  # fmt: skip
    yield md.table(["benchmark", "W_max", "N", "difference", "95 %", "p Holm"], theirs)


def _int8(seen: View) -> Iterator[str]:
    yield "## Rows in int8\n\nThe mean over all tasks, W_max 16 as in the paper's table 4.\n"
    rows = []
    keys = (EXACT, ArmKey("nr", 16), ArmKey("nr", 16, "int8"), ArmKey("nr", 0, "int8"))
    for (model, length), arms in seen.arms.items():
        of = {arm.first.arm: md.number(arm.score.mean, 4) for arm in arms}
        rows.append([model, f"RULER, {length:,}", *(of.get(key, md.NONE) for key in keys)])
    rows += [["*Kimi-Linear-48B*", f"*{task}*", *(f"*{v:.4f}*" for v in values), md.NONE]
             for task, values in paper.TABLE_4.items()]  # fmt: skip
    yield md.table(["model", "task", "dense", "nr 16", "nr 16 int8", "int8 alone"], rows, 2)


def _table_1(store: Store, folder: str) -> Iterator[str]:
    models = [model for model in models_of(store) if store.noted("table_1b", model)]
    if not models:
        return
    yield "## Table 1a: what of a cached prefix is needed for a single needle\n"
    rows = [
        [model, row["intervention"], f"{float(row['accuracy']):.3f}",
         md.interval(float(row["low"]), float(row["high"])), row["n"],
         f"{paper.TABLE_1A[row['intervention']][store.noted('table_1b', model)[0]['kind']]:.3f}"]
        for model in models
        for row in store.noted("table_1a", model)
        if row["depth"] == "all"
    ]  # fmt: skip
    yield md.table(["model", "cleared", "accuracy", "95 %", "n", "paper"], rows, 2)
    yield "## Table 1b: Spearman's rho of horizons with what prefixes show\n"
    rows = []
    for model in models:
        for row in store.noted("table_1b", model):
            values = [float(row[name]) for name in ("median", "q1", "q3")]
            theirs = paper.TABLE_1B[row["kind"]][row["pair"]]
            rows.append([model, f"H_s, {row['pair']}", *map(_quartiles, (values, theirs)),
                         row["comparisons"]])  # fmt: skip
    header = ["model", "pair", "median [IQR]", "paper", "n prefix-layer pairs"]
    yield md.table(header, rows, 2)
    yield f"Figures and values of each layer: the folders of `{folder}/`.\n"


def _quartiles(values: Sequence[float]) -> str:
    return f"{md.number(values[0], 3)} {md.interval(values[1], values[2])}"


def _drift(store: Store, folder: str) -> Iterator[str]:
    rows = []
    for model in models_of(store):
        noted = store.noted("drift", model)
        last = max((row["turn"] for row in noted), default=0)
        rows += [
            [model, str(row["w_max"]), row["policy"], str(row["turn"]), str(row["lineage"]),
             f"{row['kl_mean']:.1e}", f"{row['kl_max']:.1e}", md.percent(row["agree"])]
            for row in noted if row["turn"] in (2, last)
        ]  # fmt: skip
    if not rows:
        return
    yield (
        "## Drift over the turns of a conversation\n\nEvery turn of 64 tokens resumes from the"
        " lossy checkpoint of the turn before; the Kullback-Leibler divergence is of the next"
        " token's distribution from an exact run's. The paper does not measure this.\n"
    )
    header = ["model", "W_max", "policy", "turn", "losses", "KL mean", "KL max", "same token"]
    yield md.table(header, rows, 3)
    yield f"![Drift by turn]({folder}/drift.png)\n"
