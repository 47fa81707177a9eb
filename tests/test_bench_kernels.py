import importlib
import importlib.util
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bench.clocks import per_call, timed
from pallas_kernels.bench.peers import MODULES, peers
from pallas_kernels.bench.program import OPS, Args, bench_op, main, summary
from pallas_kernels.bench.timing import Problem, Run, WrongResult, checked, relative_error

CASES = "tests.bench_cases"


def only(shape: str, **values) -> Args:
    return Args(ops=(CASES,), shapes=(shape,), peers=False, run_seconds=6.0, **values)


def by_impl(lines) -> dict[str, dict]:
    return {line["impl"]: line for line in lines}


def test_right_runs_are_timed_and_all_others_reported_whatever_they_do():
    lines = list(bench_op(CASES, only("last"), time.monotonic() + 200))
    found = by_impl(lines)
    assert len(lines) == len(found) == 7
    assert {name for name, line in found.items() if "ms" in line} == {"ours", "ours[pooled]", "xla"}
    for line in found.values():
        assert (line["op"], line["shape"]) == ("double", "last")
    assert found["ours"]["error"] == 0.0 and found["ours"]["temporaries"] == 0
    assert found["ours"]["of_floor"] == pytest.approx(
        found["ours"]["floor_ms"] / found["ours"]["ms"]
    )
    assert "wrong result" in found["wrong"]["failed"]
    assert "ZeroDivisionError" in found["raising"]["failed"]
    assert "exit status 9" in found["crashing"]["failed"]
    assert "no answer in 6 s" in found["hanging"]["failed"]


def test_data_that_cannot_be_made_fail_one_case_and_lines_are_appended_at_once(tmp_path: Path):
    out = tmp_path / "deep" / "lines.jsonl"
    args = Args((CASES,), ("small", "no data"), "", False, False, run_seconds=3.0, out=out)
    assert main(args) == 1
    assert main(Args((CASES,), ("no data",), "", False, False, out=out)) == 1
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    assert [x["impl"] for x in lines if x["shape"] == "no data"] == ["inputs", "inputs"]
    assert "too large" in lines[-1]["failed"]
    small = [x["impl"] for x in lines if x["shape"] == "small"]
    assert small == ["ours", "wrong", "raising", "crashing", "hanging", "xla"]
    assert all({"op", "shape", "device", "date"} <= set(x) for x in lines if "ms" in x)


def test_the_page_has_the_best_peer_and_the_last_of_repeated_lines(tmp_path: Path):
    def line(impl: str, ms: float, shape: str = "B=1") -> dict:
        figures = {
            "ms": ms,
            "floor_ms": 1.0,
            "of_floor": 1 / ms,
            "error": 1e-3,
            "temporaries": 2**21,
        }
        where = {"device": "GPU", "date": "2026-11-30", "command": "bench --ops step"}
        return {"op": "step", "shape": shape, "impl": impl} | figures | where

    lines = [line("ours", 9.0), line("ours", 2.0), line("fla", 4.0), line("fla[V=8]", 3.0)]
    lines += [line("xla", 8.0), line("ours[V=8]", 1.0), line("xla", 5.0, "B=2")]
    failed = {"op": "step", "shape": "B=1", "impl": "torch", "failed": "not installed: torch"}
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(x) + "\n" for x in [*lines, failed]))
    assert main(Args(page=path)) == 0
    text = path.with_suffix(".md").read_text()
    assert (
        "| B=1 | 1.0000 | 2.0000 | 50% | 1e-03 | 2.1 MB | 8.0000 | 3.0000 fla[V=8] | 1.50x |"
        in text
    )
    assert "B=2" not in text and "    bench --ops step\n" in text


def test_only_the_implementations_that_were_asked_for_run():
    lines = list(bench_op(CASES, only("last", impls="^(ours|xla)"), time.monotonic() + 100))
    assert [x["impl"] for x in lines] == ["ours", "ours[pooled]", "xla"]
    args = only("last", impls="^(ours|xla)", variants=False)
    lines = list(bench_op(CASES, args, time.monotonic() + 100))
    assert [x["impl"] for x in lines] == ["ours", "xla"]


def test_a_spent_budget_ends_cleanly_and_says_what_was_left_out(capsys):
    assert main(Args((CASES, "never"), ("small",), seconds=-1.0)) == 1
    assert f"not run: {CASES}, never" in capsys.readouterr().out
    lines = list(bench_op(CASES, only("small"), time.monotonic()))
    assert "stopped" in lines[-1]


def test_a_module_that_does_not_exist_is_one_failed_line():
    (line,) = bench_op("no.such.module", only("small"), time.monotonic() + 60)
    assert "No module named" in line["failed"]


def test_a_call_is_what_its_kernels_took_without_those_of_the_flush():
    flush = [("reduce", 5.0), ("reduce", 1.0)]
    launched = [*flush, ("a", 0.2), ("reduce", 0.1), *flush, ("a", 0.4), ("reduce", 0.1)]
    spent = per_call(launched, ["reduce", "reduce"], 2)
    assert spent.timer == "cupti" and spent.kernels == 2
    assert spent.median == pytest.approx(0.4) and spent.least == pytest.approx(0.3)
    assert spent.parts == {"a": pytest.approx(0.3), "reduce": pytest.approx(0.1)}


def test_calls_that_differ_in_their_kernels_give_a_mean():
    flush = [("flush", 5.0)]
    spent = per_call([*flush, ("a", 0.2), *flush, ("a", 0.2), ("b", 0.4)], ["flush"], 2)
    assert spent.timer == "cupti mean"
    assert spent.median == pytest.approx(0.4) and spent.kernels == 1.5


def test_a_donated_pool_is_threaded_through_every_call():
    step = jax.jit(lambda pool: (pool + 1, 2 * pool), donate_argnums=0)
    run = Run(step, (jnp.zeros(3),), carried=1)
    for count in range(4):
        out, run = run.step()
        np.testing.assert_array_equal(out[1], 2.0 * count)
    assert timed(run, 3).timer == "host clock"


def test_the_error_is_that_of_the_worst_output_and_no_bad_value_passes():
    ones = jnp.ones(4)
    expected = {"o": ones, "state": ones}
    assert relative_error({"o": ones, "state": 1.5 * ones}, expected) == pytest.approx(0.5)
    assert relative_error({"o": ones}, expected) == 0.0
    assert relative_error(ones.at[0].set(jnp.nan), ones) == np.inf
    assert relative_error(jnp.ones(5), ones) == np.inf
    assert relative_error(ones, 0 * ones) == np.inf
    assert relative_error(0 * ones, 0 * ones) == 0.0
    with pytest.raises(KeyError):
        relative_error({"other": ones}, expected)


def test_a_run_may_round_more_than_the_problem_allows_only_where_it_says_so():
    problem = Problem({}, jnp.ones(4), 1e-6, {})
    with pytest.raises(WrongResult):
        checked(Run(lambda: 1.001 * jnp.ones(4), ()), problem)
    error, _ = checked(Run(lambda: 1.001 * jnp.ones(4), (), tolerance=1e-2), problem)
    assert error == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("op", MODULES)
def test_peers_that_are_not_installed_say_so(op: str, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    names = [peer.name for peer in peers(op)]
    assert names and len(names) == len(set(names))
    assert all("not installed" in (peer.missing() or "") for peer in peers(op))


def test_cases_are_chosen_by_regular_expression():
    lines = bench_op(CASES, only("^double no", variants=False), time.monotonic() + 60)
    assert [line["shape"] for line in lines] == ["no data"]


@pytest.mark.parametrize("op", OPS)
def test_cases_are_cheap_to_walk_and_each_is_named_once(op: str):
    start = time.monotonic()
    cases = list(importlib.import_module(f"pallas_kernels.bench.{op}").cases())
    assert time.monotonic() - start < 5.0
    assert cases and len({(case.op, case.shape) for case in cases}) == len(cases)
    assert all(0.0 < case.floor_ms < 10.0 for case in cases)


def test_the_table_sets_our_best_tiling_beside_the_best_peer():
    def line(impl: str, ms: float) -> dict:
        return {
            "op": "double",
            "shape": "s",
            "impl": impl,
            "ms": ms,
            "floor_ms": 1,
            "of_floor": 1 / ms,
        }

    lines = [
        line("ours", 4.0),
        line("ours[x]", 2.0),
        line("xla", 9.0),
        line("a", 5.0),
        line("b", 3.0),
    ]
    (cells,) = zip(*(column.cells for column in summary(lines).columns), strict=True)
    assert cells == (
        "double", "s", "1.0000", "4.0000", "25%", "2.0000 ours[x]", "9.0000", "3.0000 b"
    )  # fmt: skip
