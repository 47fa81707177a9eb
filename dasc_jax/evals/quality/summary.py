"""What the lines of the quality study come to: arms over all tasks, Random, where nr loses."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dasc_jax.evals.quality.cells import COLD, EXACT, ArmKey, Cell, Store, common_tasks, pooled
from dasc_jax.evals.stats import (
    Difference,
    Estimate,
    against_random,
    holm,
    mean_interval,
    paired_difference,
)

LOSS = 0.02
"""A fall below dense that is looked into."""


class ArmSummary(NamedTuple):
    """An arm over the instances of all its tasks, each task with equally many.

    `difference` is paired with dense; None for dense itself and cold runs. `p_holm` is adjusted
    over all arms of the model and length but the single random masks.
    """

    cells: dict[str, Cell]
    score: Estimate
    difference: Difference | None
    p_holm: float | None

    @property
    def first(self) -> Cell:
        """A line: what belongs to the arm and not to a task is equal in all."""
        return next(iter(self.cells.values()))

    @property
    def token_hit(self) -> float:
        """Mean over the tasks."""
        return float(np.mean([cell.token_hit for cell in self.cells.values()]))

    @property
    def loaded(self) -> float:
        """Least of the tasks."""
        return min(cell.loaded for cell in self.cells.values())

    @property
    def replayed(self) -> float:
        """Mean over the tasks of the tokens that wr replays a hit."""
        return float(np.mean([cell.replayed for cell in self.cells.values()]))

    @property
    def faults(self) -> list[str]:
        """Each reason not to count, with its task."""
        return [f"{task}: {fault}" for task, cell in self.cells.items() for fault in cell.faults]


class RandomSummary(NamedTuple):
    """Horizons against the mean of `seeds` masks that keep as many units of every layer.

    `difference` is paired by instance, over all tasks; `p_holm` is over all thresholds and lengths
    of the model. `spread` is the sample deviation of the masks' scores, NaN for a single mask.
    """

    length: int
    w_max: int
    seeds: int
    dasc: float
    random: float
    spread: float
    difference: Difference
    p_holm: float


class Loss(NamedTuple):
    """A task (or "mean" of all) where nr falls, and how much of that wr recovers (None: no wr)."""

    length: int
    w_max: int
    task: str
    dense: float
    nr: float
    wr: float | None

    @property
    def recovered(self) -> float | None:
        """Part of the loss: 1 is all of it; above 1, wr is better than dense."""
        return None if self.wr is None else (self.wr - self.nr) / (self.dense - self.nr)


class Drift(NamedTuple):
    """Divergence (KL, nats) over the turns that resumed lossily, under one policy and threshold.

    `early` and `late` are means over the first and last three of these turns, `worst` is the
    largest of any conversation, `agree` the mean share of equal next tokens.
    """

    w_max: int
    policy: str
    turns: int
    early: float
    late: float
    worst: float
    agree: float


class View(NamedTuple):
    """A store with what is computed from it: arms by model and length, Random by model."""

    store: Store
    arms: dict[tuple[str, int], list[ArmSummary]]
    masks: dict[str, list[RandomSummary]]

    def masks_at(self, model: str, length: int) -> list[RandomSummary]:
        """The comparisons with Random at one length."""
        return [one for one in self.masks[model] if one.length == length]


def view(store: Store) -> View:
    """Compute it all."""
    models = models_of(store)
    places = [(model, length) for model in models for length in lengths_of(store, model)]
    return View(
        store,
        {place: summaries(store, *place) for place in places if store.select(*place, EXACT)},
        {model: random_summaries(store, model) for model in models},
    )


def lengths_of(store: Store, model: str) -> list[int]:
    """Lengths that a model has lines of, ascending."""
    return sorted({cell.length for cell in store.cells if cell.model == model})


def models_of(store: Store) -> list[str]:
    """Models in the order of their first lines."""
    cells = [cell.model for cell in store.cells]
    return list(dict.fromkeys([*cells, *(note.model for note in store.notes)]))


def keys_of(store: Store, model: str, length: int, selector: str = "dasc") -> list[ArmKey]:
    """Arms that were replayed, dense first, then by quantization, policy and threshold."""
    found = {c.arm for c in store.cells if (c.model, c.length) == (model, length)}
    chosen = [key for key in found if key.selector == selector and key != COLD]
    return sorted(
        chosen, key=lambda k: (k != EXACT, k.quantization or "", k.policy, k.w_max, k.seed or 0)
    )


def summaries(store: Store, model: str, length: int) -> list[ArmSummary]:
    """The arms of one model and length, single random masks left out."""
    dense = store.select(model, length, EXACT)
    made = []
    for key in keys_of(store, model, length):
        cells = store.select(model, length, key)
        paired = None
        if key != EXACT and (tasks := common_tasks([cells, dense])):
            paired = paired_difference(*(pooled(a[t] for t in tasks) for a in (cells, dense)))
        made.append(ArmSummary(cells, mean_interval(pooled(cells.values())), paired, None))
    adjusted = iter(holm([arm.difference.p for arm in made if arm.difference]))
    return [arm._replace(p_holm=float(next(adjusted))) if arm.difference else arm for arm in made]


def random_summaries(store: Store, model: str) -> list[RandomSummary]:
    """nr with horizons against Random, at every length and threshold that has both."""
    made = []
    for length in lengths_of(store, model):
        masks = keys_of(store, model, length, "random")
        for w_max in sorted({key.w_max for key in masks}):
            arms = [store.select(model, length, k) for k in masks if k.w_max == w_max]
            dasc = store.select(model, length, ArmKey("nr", w_max))
            tasks = common_tasks([dasc, *arms])
            if not tasks:
                continue
            mine, *others = [pooled(arm[t] for t in tasks) for arm in (dasc, *arms)]
            means = [float(other.mean()) for other in others]
            spread = float(np.std(means, ddof=1)) if len(means) > 1 else float("nan")
            difference = against_random(mine, others)
            made.append(RandomSummary(length, w_max, len(arms), float(mine.mean()),
                                      float(np.mean(means)), spread, difference, 1.0))  # fmt: skip
    adjusted = holm([one.difference.p for one in made])
    return [one._replace(p_holm=float(p)) for one, p in zip(made, adjusted, strict=True)]


def losses(store: Store, model: str, least: float = LOSS) -> list[Loss]:
    """Where nr (float32) is more than `least` below dense, the mean of all tasks before each."""
    made = []
    for length in lengths_of(store, model):
        dense = store.select(model, length, EXACT)
        for key in keys_of(store, model, length):
            if key != ArmKey("nr", key.w_max):
                continue
            nr = store.select(model, length, key)
            wr = store.select(model, length, ArmKey("wr", key.w_max))
            tasks = common_tasks([dense, nr])
            refreshed = wr if wr and all(task in wr for task in tasks) else None
            for name, some in [("mean", tasks), *((task, [task]) for task in tasks)]:
                again = _mean(refreshed, some) if refreshed else None
                made.append(
                    Loss(length, key.w_max, name, _mean(dense, some), _mean(nr, some), again)
                )
    return [loss for loss in made if loss.dense - loss.nr > least]


def drifts(store: Store, model: str) -> list[Drift]:
    """The drift of a model by threshold and policy, in the order of its lines."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in store.noted("drift", model):
        if row["lineage"]:
            groups.setdefault((row["w_max"], row["policy"]), []).append(row)
    return [
        Drift(
            *key,
            turns=len(rows),
            early=_over(rows[:3], "kl_mean"),
            late=_over(rows[-3:], "kl_mean"),
            worst=max(row["kl_max"] for row in rows),
            agree=_over(rows, "agree"),
        )
        for key, rows in groups.items()
    ]


def _over(rows: Sequence[dict[str, Any]], name: str) -> float:
    return float(np.mean([row[name] for row in rows]))


def _mean(cells: dict[str, Cell], tasks: Sequence[str]) -> float:
    return float(np.mean([cells[task].score for task in tasks])) if tasks else float("nan")
