"""The first table of the quality page: the paper's questions, answered for each model."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dasc_jax.evals.quality import markdown as md
from dasc_jax.evals.quality import paper
from dasc_jax.evals.quality.cells import COLD, EXACT, ArmKey, Store, common_tasks
from dasc_jax.evals.quality.summary import (
    LOSS,
    ArmSummary,
    Loss,
    RandomSummary,
    View,
    drifts,
    losses,
    models_of,
)
from dasc_jax.evals.ruler import SHORT

NEAR = 0.01
"""A distance from dense that counts as none (section 5.2)."""

RHO = 0.7
"""A correlation that makes horizons a signal for selection."""

MOST = 2 / 3
"""The part of a loss that a refresh should win back."""


class Place(NamedTuple):
    """A model at one length, with the arms that were replayed there."""

    seen: View
    model: str
    length: int
    arms: dict[ArmKey, ArmSummary]

    @property
    def masks(self) -> list[RandomSummary]:
        """Horizons against Random here."""
        return self.seen.masks_at(self.model, self.length)

    @property
    def losses(self) -> list[Loss]:
        """The tasks where nr falls here."""
        found = losses(self.seen.store, self.model)
        return [x for x in found if x.length == self.length and x.task != "mean"]


def findings(seen: View) -> Iterator[str]:
    """The section "In short"."""
    yield "## In short\n"
    models = list(dict.fromkeys([model for model, _ in seen.arms] or models_of(seen.store)))
    if not models:
        yield "Nothing was measured.\n"
        return
    rows = [[ask, theirs, *(_by_length(seen, m, answer) for m in models)]
            for ask, theirs, answer in _questions()]  # fmt: skip
    rows += [[ask, theirs, *(answer(seen.store, m) for m in models)]
             for ask, theirs, answer in _once()]  # fmt: skip
    yield md.table(["question", "paper (KDA; GDN)", *models], rows, 2 + len(models))
    notes = [f"- {text}" for place in _places(seen) for text in _remarks(place)]
    if notes:
        yield "\n".join(["Behind these answers:\n", *notes, ""])


def _places(seen: View) -> list[Place]:
    return [
        Place(seen, model, length, {arm.first.arm: arm for arm in arms})
        for (model, length), arms in seen.arms.items()
    ]


def _by_length(seen: View, model: str, answer: Callable[[Place], str]) -> str:
    said = [(p.length, answer(p)) for p in _places(seen) if p.model == model]
    return "<br>".join(f"{length:,}: {text}" for length, text in said) or md.NONE


def _questions() -> list[tuple[str, str, Callable[[Place], str]]]:
    """What is asked of every length: the question, the paper's answer, ours."""
    falls = "; ".join(paper.largest_fall(family) for family in paper.MODELS)
    back = "; ".join(paper.recovered(family, LOSS, MOST) for family in paper.MODELS)
    return [
        ("Is nr at 16 within 0.01 of dense, mean of the tasks?", "yes; yes", _mild),
        ("How far does nr fall, mean of the tasks?", falls, _worst),
        (f"Where nr falls by more than {LOSS} on a task, does wr win back two thirds?",
         back, _recovered),
        ("Are the horizons better than random masks of the same counts, nr?",
         "all 15 end-task comparisons, 7 by Holm's p; mixed", _better),
        ("Does int8 cost more than its arm in float32, mean of the tasks?",
         "-0.014 to +0.018 on end tasks; not asked", _int8),
        ("How many times smaller is a checkpoint, nr at 16 and at the largest W_max?",
         "; ".join(paper.COMPRESSION.values()), _smaller),
        ("Is a hit on a dense checkpoint a cold run?", "not asked", _cold),
        ("Did all replays keep the rules of appendix C.3?", "not said", _strict),
    ]  # fmt: skip


def _once() -> list[tuple[str, str, Callable[[Store, str], str]]]:
    """What is asked of a model."""
    a, b = paper.TABLE_1A, paper.TABLE_1B
    cleared = [f"{a[name][kind]:.3f}" for kind in ("kda", "gdn")
               for name in ("zero-linear", "zero-full-kv")]  # fmt: skip
    return [
        ("Needle found with all recurrent states cleared; with all KV cleared (Table 1a)?",
         "{} and {}; {} and {}".format(*cleared), _needle),
        ("Do horizons rank as observed decay does, rho of H_s and H_e at least 0.7 (Table 1b)?",
         f"{b['kda']['H_e'][0]}; {b['gdn']['H_e'][0]}", _rho),
        ("Does drift grow over lossy hits in a row (KL at W_max 16, first three to last three)?",
         "not asked", _grows),
    ]  # fmt: skip


def _mild(place: Place) -> str:
    arm = place.arms.get(ArmKey("nr", 16))
    if not arm or not arm.difference:
        return md.NONE
    near = "yes" if abs(arm.difference.mean) <= NEAR else "**no**"
    return f"{near}, {md.difference(arm.difference)}"


def _swept(place: Place, quantization: str | None = None) -> list[ArmSummary]:
    return [arm for key, arm in place.arms.items()
            if key == ArmKey("nr", key.w_max, quantization) and key.w_max]  # fmt: skip


def _worst(place: Place) -> str:
    falls = [(arm.difference.mean, arm) for arm in _swept(place) if arm.difference]
    if not falls:
        return md.NONE
    _, arm = min(falls, key=lambda pair: pair[0])
    return f"{md.difference(arm.difference)} at {arm.first.w_max}"


def whole(place: Place, w_max: int) -> bool:
    """Whether a refresh reaches the start of the prompts: what it then recovers is a cold run."""
    arm = place.arms.get(ArmKey("wr", w_max))
    return arm is not None and arm.replayed < w_max - 0.5


def _recovered(place: Place) -> str:
    found = place.losses
    if not found:
        return "nr falls nowhere"
    known = [(x, x.recovered) for x in found if x.recovered is not None]
    if not known:
        return f"{len(found)} falls; wr not measured"
    poor = [f"{SHORT[x.task]} at {x.w_max}: {part:.0%}" for x, part in known if part < MOST]
    said = f"{'no' if poor else 'yes'}, {len(known) - len(poor)} of {len(known)}"
    said += f" (not {md.listed(poor)})" if poor else ""
    trivial = sum(whole(place, x.w_max) for x, _ in known)
    return said + (f"; in {trivial} wr replays the whole prefix" if trivial else "")


def _better(place: Place) -> str:
    masks = place.masks
    if not masks:
        return md.NONE
    above = [one for one in masks if one.difference.mean > 0]
    clear = sum(one.p_holm < 0.05 for one in above)
    below = [str(one.w_max) for one in masks if one.difference.mean <= 0]
    tail = f" (not at {md.listed(below)})" if below else ""
    said = f"{'no' if below else 'yes'}, at {len(above)} of {len(masks)} W_max{tail}"
    return f"{said}, {clear} by Holm's p"


def _int8(place: Place) -> str:
    moved = [
        arm.score.mean - plain.score.mean
        for key, arm in place.arms.items()
        if key.quantization and (plain := place.arms.get(_unquantized(key)))
    ]
    return f"{min(moved):+.4f} to {max(moved):+.4f}" if moved else md.NONE


def _unquantized(key: ArmKey) -> ArmKey:
    return key._replace(quantization=None) if key.w_max else EXACT


def _smaller(place: Place) -> str:
    said = []
    for quantization in (None, "int8"):
        arms = sorted(_swept(place, quantization), key=lambda arm: arm.first.w_max)
        if arms:
            ends = f"{md.number(arms[0].first.compression)} and"
            ends += f" {md.number(arms[-1].first.compression)} (at {arms[-1].first.w_max})"
            said.append(f"{ends}{f' in {quantization}' if quantization else ''}")
    return ", ".join(said) or md.NONE


def _cold(place: Place) -> str:
    cold, dense = (place.seen.store.select(place.model, place.length, k) for k in (COLD, EXACT))
    pairs = [(cold[task].scores, dense[task].scores) for task in common_tasks([cold, dense])]
    if not pairs:
        return md.NONE
    moved = sum(a != b for c, d in pairs for a, b in zip(c, d, strict=True))
    return f"{moved} of {sum(len(c) for c, _ in pairs)} instances score differently"


def _strict(place: Place) -> str:
    broken = [md.arm(key) for key, arm in place.arms.items() if arm.faults]
    hits = min(arm.token_hit for arm in place.arms.values())
    loaded = min(arm.loaded for arm in place.arms.values())
    said = f"**not {md.listed(broken)}**" if broken else "yes"
    return f"{said}; at least {md.percent(hits)} of tokens hit, {md.percent(loaded)} loaded"


def _needle(store: Store, model: str) -> str:
    found = {row["intervention"]: float(row["accuracy"])
             for row in store.noted("table_1a", model) if row["depth"] == "all"}  # fmt: skip
    return f"{found['zero-linear']:.3f} and {found['zero-full-kv']:.3f}" if found else md.NONE


def _rho(store: Store, model: str) -> str:
    rows = [row for row in store.noted("table_1b", model) if row["pair"] == "H_e"]
    if not rows:
        return md.NONE
    rho = float(rows[0]["median"])
    return f"{'yes' if rho >= RHO else '**no**'}, {rho:.3f}"


def _grows(store: Store, model: str) -> str:
    said = [f"{one.policy} {one.early:.1e} to {one.late:.1e}"
            for one in drifts(store, model) if one.w_max == 16]  # fmt: skip
    return "; ".join(said) or md.NONE


def _remarks(place: Place) -> Iterator[str]:
    """What an answer needs beside it."""
    here = f"{place.model}, {place.length:,} tokens:"
    for loss in place.losses:
        if loss.recovered is not None and loss.recovered < MOST:
            yield f"{here} {_poor(place, loss)}"
    equal = [one for one in place.masks if one.difference.mean <= 0]
    if equal:
        yield f"{here} {_no_better(place, equal)}"


def _poor(place: Place, loss: Loss) -> str:
    pick = [place.seen.store.select(place.model, place.length, key)[loss.task].scores
            for key in (EXACT, ArmKey("nr", loss.w_max), ArmKey("wr", loss.w_max))]  # fmt: skip
    dense, nr, wr = (np.array(scores) for scores in pick)
    lost = "{} of {} instances score less than dense under nr, {} under wr"
    counts = lost.format(int(np.sum(nr < dense)), len(dense), int(np.sum(wr < dense)))
    return f"{SHORT[loss.task]} at {loss.w_max} falls by {loss.dense - loss.nr:.3f}: {counts}."


def _no_better(place: Place, equal: Sequence[RandomSummary]) -> str:
    gains = [f"{-one.difference.mean * one.difference.n:.1f} at {one.w_max}" for one in equal]
    said = f"random masks score better by {md.listed(gains)} of {equal[0].difference.n} instances"
    unclear = all(one.difference.p_sign > 0.05 for one in equal)
    said += ", which the sign-flip test does not tell from none." if unclear else "."
    plans = {row["w_max"]: row for row in place.seen.store.noted("plan", place.model)}
    for one in equal:
        if row := plans.get(one.w_max):
            kept, units, shared = row["retained"], row["units"], row["shared"]
            said += (
                f" At {one.w_max} {sum(kept)} of {sum(units)} units are kept, none in"
                f" {kept.count(0)} of {len(kept)} layers, and the masks share {min(shared)} to"
                f" {max(shared)} of them."
            )
    return said


def largest_falls(seen: View, model: str, one: RandomSummary, count: int = 3) -> str:
    """The tasks on which the mean of the random masks loses most to dense."""
    where = (model, one.length, one.w_max, "random")
    cells = [c for c in seen.store.cells if (c.model, c.length, c.w_max, c.selector) == where]
    dense = seen.store.select(model, one.length, EXACT)
    falls = {
        task: float(np.mean([c.score for c in cells if c.task == task])) - cell.score
        for task, cell in dense.items()
        if any(c.task == task for c in cells)
    }
    worst = sorted(falls.items(), key=lambda item: item[1])[:count]
    said = [f"{SHORT[task]} {md.number(fall, 3, True)}" for task, fall in worst if fall < -0.0005]
    return ", ".join(said) or "none"
