"""The quality study's lines, summaries and page, on scores that are known."""

from dataclasses import replace

import numpy as np
import pytest

from dasc_jax.evals.quality import paper
from dasc_jax.evals.quality.cells import COLD, EXACT, ArmKey, Cell, Note, Run, Store, pooled
from dasc_jax.evals.quality.measure import adjusted, arms_of, key_of
from dasc_jax.evals.quality.merge import merge
from dasc_jax.evals.quality.page import write_page
from dasc_jax.evals.quality.plans import plan_rows
from dasc_jax.evals.quality.summary import drifts, losses, random_summaries, summaries
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


def test_the_page_answers_first_and_shows_the_papers_rows(store):
    page = write_page(store, store.path)
    text = page.read_text()
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings[:3] == [
        "## In short", "## What is missing of the study", "## What differs from the paper",
    ]  # fmt: skip
    for words in ("4 instances a task and length instead of 30", "a CPU", "--n 4", "paper, 4k",
                  "mini lacks Table 1", "nr 16", "0.500", "yes, 1 of 1",
                  "yes, at 1 of 1 W_max"):  # fmt: skip
        assert words in text, words
    assert (page.with_suffix("") / "sweep.png").stat().st_size > 1000
    assert "nan" not in text and "None" not in text


def test_lengths_of_fewer_rounds_and_of_cold_runs_alone_are_named(store):
    dense = [cell(EXACT, "cwe", [0.5] * 4), cell(COLD, "cwe", [0.5] * 4)]
    store.add(replace(one, length=2048, rounds=1) for one in dense)
    store.add([replace(dense[1], length=4096, rounds=1)])
    text = write_page(store, store.path).read_text()
    assert "1 replay round instead of 3 at 2,048 tokens (greedy)" in text
    assert "mini has cold runs alone at 4,096 tokens" in text
    assert "mini lacks at 2,048 tokens: all int8 arms, all random masks, all wr arms" in text
    assert "| mini | 4,096 | 4 |" in text and "4,096 tokens: arms" not in text


def test_random_masks_that_score_better_are_said_with_what_they_share(store):
    store.cells = [
        replace(c, scores=(1.0,) * 4, score=1.0) if c.arm in MASKS else c for c in store.cells
    ]
    plan = {"w_max": 16, "window": 16, "units": [4, 4], "retained": [3, 0], "shared": [1, 3]}
    store.add([Note("plan", "mini", plan)])
    text = write_page(store, store.path).read_text()
    assert "no, at 0 of 1 W_max (not at 16)" in text
    assert "At 16 3 of 8 units are kept, none in 1 of 2 layers, and the masks share 1 to 3" in text
    assert "| mini | 16 | 3 of 8 | 3 0 | 16 | 33% to 100% |" in text


def test_merging_adds_what_is_new_once_and_takes_the_figures_along(store, tmp_path):
    other = Store(tmp_path / "there" / "part.jsonl")
    other.add([*store.cells[:3], replace(store.cells[0], length=2048)])
    other.add([Note("table_1b", "mini", {"pair": "H_e"}, Run("a GPU", "2026-11-30", "it"))])
    figures = other.path.with_suffix("") / "mini"
    figures.mkdir(parents=True)
    (figures / "table_1b.csv").write_text("x")
    assert [merge(store, other.path) for _ in range(2)] == [2, 0]
    again = Store(store.path)
    assert again.cells == store.cells and again.notes == other.notes
    assert (store.path.with_suffix("") / "mini" / "table_1b.csv").read_text() == "x"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [({"n": 5}, "with n 4, now it is 5"), ({"scores": (0.0,) * 4}, "other scores"),
     ({"rounds": 1}, "with rounds 3, now it is 1")],
)  # fmt: skip
def test_lines_that_contradict_the_file_are_not_merged(store, tmp_path, change, complaint):
    other = Store(tmp_path / "part.jsonl")
    other.add([replace(cell(NR, "cwe", SCORES[NR][1]), **change)])
    before = store.path.read_text()
    with pytest.raises(ValueError, match=complaint):
        merge(store, other.path)
    assert store.path.read_text() == before


def test_a_table_of_another_run_is_not_merged(store, tmp_path):
    other = Store(tmp_path / "part.jsonl")
    store.add([Note("table_1b", "mini", {"pair": "H_e", "median": "0.8"})])
    other.add([Note("table_1b", "mini", {"pair": "H_e", "median": "0.7"})])
    with pytest.raises(ValueError, match="another table_1b of mini"):
        merge(store, other.path)


def test_drift_is_averaged_over_the_turns_that_resumed_lossily(store):
    store.add(Note("drift", "mini", {"w_max": 16, "policy": "nr", "lineage": turn - 1, "turn": turn,
                                     "kl_mean": float(turn), "kl_max": 9.0, "agree": 0.5})
              for turn in range(1, 6))  # fmt: skip
    (found,) = drifts(store, "mini")
    assert (found.turns, found.early, found.late, found.worst) == (4, 3.0, 4.0, 9.0)


def test_what_a_plan_shares_with_its_random_masks_is_counted_over_all_layers():
    horizons = [np.array([100.0, 1.0, 50.0, 2.0]), np.array([90.0, 80.0, 70.0, 60.0])]
    row = plan_rows(horizons, 16, (1, 2, 3))
    assert row["retained"] == [2, 4] and row["units"] == [4, 4] and row["window"] == 4
    assert len(row["shared"]) == 3 and all(4 <= shared <= 6 for shared in row["shared"])


def test_the_papers_falls_are_those_of_its_text():
    assert paper.largest_fall("kda") == "-0.07 (1024, 16k)"
    assert paper.recovered("kda", 0.5, 1.0) == "0 of 0"
    # MK3 at 16k and W_max 512 and 1024: dense 1.00, nr 0.89 and 0.87, wr 0.90 and 0.83.
    assert paper.recovered("gdn", 0.1, 0.5) == "0 of 2"


def test_the_page_of_an_empty_file_has_no_number_and_does_not_fail(tmp_path):
    page = write_page(Store(tmp_path / "none.jsonl"), tmp_path / "none.jsonl")
    assert "Not measured." in page.read_text() and not (tmp_path / "none").exists()
