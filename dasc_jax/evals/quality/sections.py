"""Sections of the quality page beside RULER: plans, Table 1, drift over turns."""

from collections.abc import Iterator, Sequence

from dasc_jax.evals.quality import markdown as md
from dasc_jax.evals.quality import paper
from dasc_jax.evals.quality.cells import Store
from dasc_jax.evals.quality.summary import drifts, models_of


def plans(store: Store) -> Iterator[str]:
    """What each threshold keeps, and what the random masks share with it."""
    rows = []
    for model in models_of(store):
        for row in store.noted("plan", model):
            kept = sum(row["retained"])
            shared = [part / kept for part in row["shared"]] if kept else []
            rows.append([
                model, str(row["w_max"]), f"{kept:,} of {sum(row['units']):,}",
                " ".join(map(str, row["retained"])), str(row["window"]),
                f"{min(shared):.0%} to {max(shared):.0%}" if shared else md.NONE,
            ])  # fmt: skip
    if not rows:
        return
    yield (
        "### What is kept\n\nUnits by recurrent layer, the tokens that wr replays at most, and how"
        " many of the kept units the random masks keep too.\n"
    )
    header = ["model", "W_max", "kept", "by layer", "window", "shared with masks"]
    yield md.table(header, rows, 2)


def table_1(store: Store, folder: str) -> Iterator[str]:
    """Tables 1a and 1b."""
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
    words = "H_e, state and readout are the empirical horizon, M_S and M_R of section 3.4."
    links = md.listed([f"[{model}]({folder}/{model})" for model in models])
    yield f"{words} Figures, answers and values of each layer: {links}.\n"


def _quartiles(values: Sequence[float]) -> str:
    return f"{md.number(values[0], 3)} {md.interval(values[1], values[2])}"


def drift(store: Store, folder: str) -> Iterator[str]:
    """Divergence over the turns of conversations."""
    rows = [
        [model, str(one.w_max), one.policy, str(one.turns), f"{one.early:.1e}", f"{one.late:.1e}",
         f"{one.worst:.1e}", md.percent(one.agree)]
        for model in models_of(store)
        for one in drifts(store, model)
    ]  # fmt: skip
    if not rows:
        return
    yield (
        "## Drift over the turns of a conversation\n\nEvery turn of 64 tokens resumes from the"
        " lossy checkpoint of the turn before; the Kullback-Leibler divergence, in nats, is of the"
        " next token's distribution from an exact run's. Means over conversations swing from turn"
        " to turn, so three turns are averaged. int8 keeps all units. With a window of 128 wr is"
        " exact up to turn 3, which it replays whole. The paper does not measure this.\n"
    )
    header = ["model", "W_max", "policy", "lossy turns", "KL of the first three",
              "of the last three", "largest of a conversation", "same token"]  # fmt: skip
    yield md.table(header, rows, 3)
    yield f"![Drift by turn]({folder}/drift.png)\n"
