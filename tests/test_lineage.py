"""Turn after turn from lossy states: the losses behind each are counted, and can be bounded."""

import json

import numpy as np
import pytest

from dasc_jax.analysis.lineage import main
from tests.by_hand import resumed
from tests.engines import GOLDEN, MODELS, distribution, engine, prompt, request, run

TURNS = 11
HISTORY = prompt(64 * TURNS + 1, seed=31)
LONG = {"w_max": 64, "prefill_tokens": 192, "max_context": 768}


def turn(number):
    """The prompt of a turn: 64 tokens more than the one before, and one to compute."""
    return HISTORY[: 64 * number + 1]


def converse(made, turns=TURNS, **options):
    return [
        run(made, request(f"turn{n}", turn(n), max_tokens=1, **options))[0]
        for n in range(1, turns + 1)
    ]


def assert_equals(result, expected, rtol=1e-5):
    tokens, logprobs = expected
    assert result.tokens == tokens
    assert np.abs(distribution(result) - logprobs).max() <= rtol * np.abs(logprobs).max()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", ["nr", "wr"])
def test_every_turn_from_the_last_lossy_checkpoint_adds_one_loss(name, policy):
    made = engine(name, **LONG)
    results = converse(made, state_policy=policy)
    assert [r.report.lineage for r in results] == list(range(TURNS))
    assert [r.cached_tokens for r in results] == [64 * n for n in range(TURNS)]
    for n in (2, 3, TURNS):
        depths = [64 * k for k in range(1, n)]
        by_hand = resumed(name, made.loop.plan, policy, turn(n), depths, count=1)
        assert_equals(results[n - 1], by_hand)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("bound", [0, 2])
def test_past_the_bound_a_hit_falls_back_to_the_deepest_admissible_checkpoint(name, bound):
    """A state may have `bound` losses behind it, the load itself included; none is left for 0."""
    made = engine(name, max_lineage=bound, **LONG)
    results = converse(made, 6)
    for n, result in enumerate(results, 1):
        losses = min(bound, n - 1)
        assert (result.report.lineage, result.cached_tokens) == (losses, 64 * losses)
        assert result.report.reason == ("no_kv" if n == 1 else "hit" if bound else "lineage")
        depths = [64 * k for k in range(1, losses + 1)]
        by_hand = resumed(name, made.loop.plan, "nr", turn(n), depths, count=1)
        assert_equals(result, by_hand)


@pytest.mark.parametrize("name", MODELS)
def test_int8_that_drops_no_unit_counts_as_a_loss(name):
    made = engine(name, **LONG | {"w_max": 0}, quantization="int8")
    assert made.loop.plan.exact
    results = converse(made, 4)
    assert [r.report.lineage for r in results] == [0, 1, 2, 3]
    assert all(r.report.units_zeroed == r.report.units_refreshed == 0 for r in results)
    dense = run(made, request("dense", turn(4), state_policy="dense"))[0]
    assert (dense.report.reason, dense.cached_tokens, dense.report.lineage) == (
        "plan_mismatch",
        0,
        0,
    )


@pytest.mark.parametrize("name", MODELS)
def test_an_exact_run_over_a_lossy_prefix_starts_the_count_anew(name):
    """A cold run of the same tokens stores exact states in place of the lossy ones."""
    made = engine(name, **LONG)
    converse(made, 4)
    run(made, request("dense", turn(4), max_tokens=1, state_policy="dense"))
    again = run(made, request("again", turn(4) + (9, 8), state_policy="nr"))[0]
    assert (again.cached_tokens, again.report.lineage) == (256, 1)
    assert_equals(again, resumed(name, made.loop.plan, "nr", turn(4) + (9, 8), [256]))


def test_the_report_prints_and_writes_the_drift_of_every_policy_and_turn(tmp_path, capsys):
    out = tmp_path / "lineage.jsonl"
    model = str(GOLDEN / "qwen3_next_a")
    arguments = ["--turns", "3", "--conversations", "2", "--w-max", "64", "--out", str(out)]
    assert main([model, "--dtype", "float32", *arguments]) == 0
    printed = capsys.readouterr().out
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["policy"], r["turn"]) for r in rows] == [
        (policy, n) for policy in ("nr", "wr", "int8") for n in (1, 2, 3)
    ]
    for row in rows:
        assert row["policy"] in printed
        assert (row["lineage"], row["depth"]) == (row["turn"] - 1, 64 * (row["turn"] - 1))
        assert row["kl_mean"] >= 0 and (row["kl_mean"] < 1e-9) == (row["turn"] == 1)


def test_the_report_names_what_it_cannot_read(tmp_path, capsys):
    assert main([str(tmp_path / "none")]) == 1
    assert "error:" in capsys.readouterr().err
