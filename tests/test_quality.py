"""The quality study's lines, summaries and page, on scores that are known."""

from dataclasses import replace

import numpy as np
import pytest

from dasc_jax.evals.quality import paper
from dasc_jax.evals.quality.cells import COLD, EXACT, ArmKey, Cell, Note, Store, pooled
from dasc_jax.evals.quality.measure import adjusted, arms_of, key_of
from dasc_jax.evals.quality.page import write_page
from dasc_jax.evals.quality.summary import losses, random_summaries, summaries
from dasc_jax.evals.stats import against_random, holm, mean_interval, paired_difference

TASKS = ("niah_single_1", "cwe")
NR, WR = ArmKey("nr", 16), ArmKey("wr", 16)
MASKS = [ArmKey("nr", 16, None, "random", seed) for seed in (1, 2)]
SCORES = {
    COLD: ([1, 1, 1, 1], [0.5, 0.4, 0.6, 0.5]),
    EXACT: ([1, 1, 1, 1], [0.5, 0.4, 0.6, 0.5]),
    NR: ([1, 1, 1, 1], [0.4, 0.4, 0.4, 0.4]),
    WR: ([1, 1, 1, 1], [0.4, 0.4, 0.6, 0.5]),
    MASKS[0]: ([1, 0, 1, 1], [0.3, 0.3, 0.4, 0.2]),
    MASKS[1]: ([1, 1, 1, 0], [0.2, 0.3, 0.4, 0.4]),
}


def cell(arm: ArmKey, task: str, scores) -> Cell:
    dense = SCORES[EXACT][TASKS.index(task)]
    mean = mean_interval(np.array(scores))
    paired = None if arm in (COLD, EXACT) else paired_difference(np.array(scores), np.array(dense))
    return Cell(
        model="mini", weights="abc", family="kda", dtype="float32", task=task, length=1088,
        **arm._asdict(), generator_seed=0, n=len(scores), rounds=3, score=mean.mean, low=mean.low,
        high=mean.high, difference=paired and paired.mean, difference_low=paired and paired.low,
        difference_high=paired and paired.high, p=paired and paired.p,
        p_sign=paired and paired.p_sign, p_holm=None, token_hit=0.95, loaded=1.0, replayed=0.0,
        strict=True, faults=(), compression=2.0, temporal_compression=2.5, slot_bytes=100,
        dense_bytes=200, scores=tuple(map(float, scores)), device="a CPU", date="2026-11-30",
        command="scripts/reproduce_quality.py --n 4",
    )  # fmt: skip


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path / "quality.jsonl")
    for arm, both in SCORES.items():
        made.add(cell(arm, task, scores) for task, scores in zip(TASKS, both, strict=True))
    return made


def test_a_file_gives_back_what_was_added_to_it(store):
    store.add([Note("drift", "mini", {"turn": 2})])
    again = Store(store.path)
    assert again.cells == store.cells and again.notes == store.notes
    assert again.noted("drift", "mini") == [{"turn": 2}]


@pytest.mark.parametrize("torn", ['{"kind": "ruler", "mod', "{"])
def test_a_line_that_a_killed_run_left_unfinished_is_cut_off(store, torn):
    whole = store.path.read_text()
    store.path.write_text(whole + torn)
    assert Store(store.path).cells == store.cells
    assert store.path.read_text() == whole


def test_a_file_of_something_else_is_refused_with_the_line(store):
    store.path.write_text(store.path.read_text() + '{"turn": 1}\n')
    with pytest.raises(ValueError, match=r"quality.jsonl:13 is no line of a quality study"):
        Store(store.path)


@pytest.mark.parametrize(
    ("rounds", "same"), [(3, {"n": 5}), (3, {"weights": "abd"}), (2, {"n": 4})]
)
def test_lines_of_another_setting_are_not_mixed_in(store, rounds, same):
    store.require("mini", 1088, 3, n=4, weights="abc")
    store.require("mini", 2048, rounds, **same)
    with pytest.raises(ValueError, match="choose another file"):
        store.require("mini", 1088, rounds, **same)


def test_an_arm_is_summarised_over_the_instances_of_all_its_tasks(store):
    dense, nr, wr = summaries(store, "mini", 1088)
    assert [arm.first.arm for arm in (dense, nr, wr)] == [EXACT, NR, WR]
    assert dense.difference is None and dense.score.mean == pytest.approx(0.75)
    both = [pooled(store.select("mini", 1088, key).values()) for key in (NR, EXACT)]
    assert nr.difference == paired_difference(*both)
    p = [arm.difference.p for arm in (nr, wr)]
    assert [nr.p_holm, wr.p_holm] == pytest.approx(holm(p))


def test_tasks_that_dense_lacks_do_not_enter_a_difference(store):
    store.add([replace(cell(NR, "cwe", [0.0] * 4), task="vt")])
    nr = summaries(store, "mini", 1088)[1]
    assert set(nr.cells) == {*TASKS, "vt"} and nr.difference.n == 8


def test_random_masks_are_averaged_by_instance_before_they_are_compared(store):
    (found,) = random_summaries(store, "mini")
    masks = [pooled(store.select("mini", 1088, key).values()) for key in MASKS]
    mine = pooled(store.select("mini", 1088, NR).values())
    assert found.difference == against_random(mine, masks) and found.seeds == 2
    assert found.p_holm == found.difference.p
    assert found.dasc - found.random == pytest.approx(found.difference.mean)


def test_losses_name_the_task_and_what_wr_recovers_of_it(store):
    found = {loss.task: loss for loss in losses(store, "mini")}
    assert set(found) == {"mean", "cwe"}
    assert found["cwe"].recovered == pytest.approx((0.475 - 0.4) / (0.5 - 0.4))
    assert losses(store, "mini", least=0.2) == []


def test_p_is_adjusted_over_the_tasks_of_an_arm_and_dense_has_none():
    cells = [cell(NR, task, SCORES[NR][at]) for at, task in enumerate(TASKS)]
    assert [c.p_holm for c in adjusted(cells)] == pytest.approx(holm([c.p for c in cells]))
    assert adjusted([cell(EXACT, "cwe", [1.0, 0.0])])[0].p_holm is None


def test_arms_are_the_grid_once_each_with_dense_first():
    thresholds, seeds = (0, 16, 64), (1, 2, 3)
    keys = [key_of(arm) for arm in arms_of(thresholds, ("float32", "int8"), seeds)]
    assert keys[0] == EXACT and len(set(keys)) == len(keys)
    assert len(keys) == 1 + 2 * 2 + 3 + 2 * 3 + 2
    assert {k.w_max for k in keys if k.quantization and k.policy == "nr"} == set(thresholds)
    assert [key_of(arm) for arm in arms_of((0,), ("float32",), seeds)] == [EXACT]


def test_the_papers_tables_are_whole_and_their_averages_are_those_of_their_rows():
    lines = paper.ruler()
    assert len(lines) == len({one[:4] for one in lines}) == 2 * 11 * 3
    assert all(len(one.scores) == 13 for one in lines)
    # Its averages come from unrounded scores, or from more digits than it prints.
    assert all(abs(np.mean(one.scores) - one.average) < 0.0101 for one in lines)
    assert paper.line("kda", "nr", 1024, "16k").average == 0.88
    assert paper.line("kda", "nr", 0) is None


def test_the_page_says_first_what_differs_and_shows_the_papers_rows(store):
    page = write_page(store, store.path)
    text = page.read_text()
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings[:3] == [
        "## What differs from the paper", "## This is a reduced run",
        "## Where the numbers come from",
    ]  # fmt: skip
    for words in ("4 instances a task and length instead of 30", "a CPU", "--n 4", "paper, 4k",
                  "mini lacks Table 1", "nr 16", "0.500"):  # fmt: skip
        assert words in text, words
    assert (page.with_suffix("") / "sweep.png").stat().st_size > 1000
    assert "nan" not in text and "None" not in text


def test_the_page_of_an_empty_file_has_no_number_and_does_not_fail(tmp_path):
    page = write_page(Store(tmp_path / "none.jsonl"), tmp_path / "none.jsonl")
    assert "Not measured." in page.read_text() and not (tmp_path / "none").exists()
