"""The quality study on a tiny model: every arm a line, resumed where it stopped, one page."""

import json

import pytest

from dasc_jax.evals.quality.program import main
from dasc_jax.tokenizer import write_byte_tokenizer
from dasc_jax.weights.native import save_native
from tests.engines import MODELS
from tests.tiny import tiny_model

SMALL = ["--tasks", "MK1", "VT", "--lengths", "1408", "--n", "2", "--w-max", "0", "64",
         "--rounds", "2", "--seeds", "1", "2", "--max-running", "4", "--prefill-tokens", "256",
         "--prefill-requests", "4"]  # fmt: skip
RULER = ["--parts", "cold", "sweep", "random"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("models") / "tiny", tiny_model(MODELS[0])
    save_native(folder, model.config, model.params)
    write_byte_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="module")
def made(checkpoint, tmp_path_factory):
    """The lines of one whole run, and their file."""
    out = tmp_path_factory.mktemp("study") / "quality.jsonl"
    command = ["--models", checkpoint, "--out", str(out), *SMALL, *RULER]
    assert main(command) == 0
    return [json.loads(line) for line in out.read_text().splitlines()], out, command


def arm(line):
    names = ("policy", "w_max", "quantization", "selector", "seed")
    return tuple(line[name] for name in names)


def test_every_task_and_arm_is_a_line_with_real_bytes_and_its_own_hit(made):
    lines, _, _ = made
    arms = {arm(line) for line in lines}
    assert len(lines) == 2 * len(arms) == 2 * 9
    assert {line["task"] for line in lines} == {"niah_multikey_1", "vt"}
    for line in lines:
        assert line["n"] == len(line["scores"]) == 2 and 0 <= line["score"] <= 1
        assert line["command"].startswith("scripts/reproduce_quality.py --models")
        if line["policy"] == "cold":
            assert line["loaded"] == 0 and line["strict"] is None
            continue
        assert line["strict"] and line["loaded"] == 1 and line["token_hit"] > 0.9
        assert line["compression"] == line["dense_bytes"] / line["slot_bytes"]
        assert (line["replayed"] > 0) == (line["policy"] == "wr")
        assert (line["difference"] is None) == (line["policy"] == "dense")
        assert (line["p_holm"] is None) == (line["policy"] == "dense")


def test_a_study_that_is_whole_measures_nothing_again(made, capsys):
    _, out, command = made
    before = out.read_text()
    assert main(command) == 0
    assert out.read_text() == before and "compiling" not in capsys.readouterr().err


def test_a_spent_budget_stops_before_the_next_arm_and_still_writes_the_page(made, tmp_path, capsys):
    lines, _, command = made
    out = tmp_path / "part.jsonl"
    out.write_text("".join(json.dumps(line) + "\n" for line in lines[:6]))
    again = [*command, "--out", str(out), "--device-budget", "0"]
    assert main(again) == 0
    assert "goes on from here" in capsys.readouterr().out
    assert len(out.read_text().splitlines()) == 6 and out.with_suffix(".md").exists()


@pytest.mark.slow
def test_a_study_that_was_stopped_ends_with_the_lines_of_one_that_was_not(made, tmp_path):
    lines, _, command = made
    out = tmp_path / "part.jsonl"
    out.write_text("".join(json.dumps(line) + "\n" for line in lines[:7]) + '{"kind": "ru')
    assert main([*command, "--out", str(out)]) == 0
    drop = ("command", "p_holm")  # adjusted over what was measured together
    found = [{k: v for k, v in json.loads(line).items() if k not in drop}
             for line in out.read_text().splitlines()]  # fmt: skip
    wanted = [{k: v for k, v in line.items() if k not in drop} for line in lines]
    assert sorted(found, key=str) == sorted(wanted, key=str)


@pytest.mark.slow
def test_tables_and_drift_become_lines_and_sections_of_the_page(checkpoint, tmp_path):
    out = tmp_path / "quality.jsonl"
    options = ["--parts", "tables", "drift", "--needles", "1", "--prefixes", "1",
               "--prefix-lengths", "512", "--turns", "3", "--conversations", "2",
               "--drift-w-max", "16"]  # fmt: skip
    assert main(["--models", checkpoint, "--out", str(out), *SMALL, *options]) == 0
    kinds = [json.loads(line)["kind"] for line in out.read_text().splitlines()]
    assert kinds.count("table_1a") == 4 * 6 and kinds.count("table_1b") == 3
    assert kinds.count("drift") == 3 * 3
    page = out.with_suffix(".md").read_text()
    for words in ("zero-linear", "H_s, H_e", "## Drift", "drift.png"):
        assert words in page
    assert (tmp_path / "quality" / "drift.png").exists()
    assert (tmp_path / "quality" / "tiny" / "table_1a.png").exists()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--n", "0"], "n is 0"),
        (["--tasks", "S9"], "unknown tasks S9"),
        (["--w-max", "-1"], "w-max is -1"),
        (["--n", "3"], "with n 2, now it is 3"),
        (["--rounds", "1"], "with rounds 2, now it is 1"),
    ],
)
def test_what_cannot_run_or_be_mixed_is_refused_in_one_line(made, options, complaint, capsys):
    _, out, command = made
    before = out.read_text()
    assert main([*command, *options]) == 1
    assert complaint in capsys.readouterr().err and out.read_text() == before
