"""The program that times stores and loads over ranks: every case is right, and says what it was."""

import json

import pytest

from dasc_jax.programs import transfer
from dasc_jax.programs.transfer import Args, checkpoint_cases, exchange_cases
from tests.many_devices import needs_devices
from tests.sharded_checkpoints import config_of, plan_of

pytestmark = needs_devices
QUICK = Args(
    placements=("off", "storage"),
    quantizations=("int8",),
    checkpoints=2,
    blocks=(3,),
    steps=2,
    repeats=1,
)


@pytest.mark.slow
def test_every_placement_is_timed_in_every_form_that_can_move_its_units():
    lines = list(checkpoint_cases(config_of("kda"), plan_of("kda"), 2, QUICK))
    assert not [line["error"] for line in lines if "error" in line]
    assert [(line["placement"], line["form"]) for line in lines] == [
        ("off", None), ("storage", "all_to_all"), ("storage", "permute"),
    ]  # fmt: skip
    assert [line["chosen"] for line in lines] == [True, False, True]
    for line in lines:
        assert line["store_ms"] > 0 and line["load_ms"] > 0
        assert bool(line["moved"]) == bool(line["collectives"]) == bool(line["estimated_ms"])
        json.dumps(line)
        assert line["placement"] in transfer.shown(line)


def test_an_exchange_alone_is_timed_in_every_form():
    lines = list(exchange_cases(4, QUICK))
    assert [line["form"] for line in lines] == ["all_to_all", "permute"]
    assert [line["busiest_rank_bytes"] for line in lines] == [3 * 3 * 512] * 2
    assert all(line["ms"] >= line["least_ms"] > 0 for line in lines)


def test_a_load_of_something_else_is_reported_and_not_timed(monkeypatch):
    monkeypatch.setattr(transfer, "store", lambda shards, pool, *rest: pool)
    line = next(checkpoint_cases(config_of("kda"), plan_of("kda"), 2, QUICK))
    assert "does not give back" in line["error"] and "store_ms" not in line


@pytest.mark.slow
def test_the_program_writes_a_line_a_case(tmp_path):
    out = tmp_path / "lines.jsonl"
    options = ["--windows", "512", "--placements", "off", "--quantizations", "none", "--ranks", "2"]
    timing = ["--steps", "1", "--repeats", "1", "--blocks", "1", "--out", str(out)]
    assert transfer.main([*options, *timing]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["op"] for line in lines] == ["loop", "exchange", "exchange", "checkpoint"]
    assert all({"device", "date", "command", "ranks"} <= line.keys() for line in lines)
