"""The program `dasc tables`: every part of a model in files, on a checkpoint and on a profile."""

import csv
import json

import pytest

from dasc_jax.analysis.tables import main
from dasc_jax.tokenizer import write_byte_tokenizer
from dasc_jax.weights.native import save_native
from tests.engines import MODELS
from tests.tiny import tiny_model

SMALL = ["--n", "1", "--depths", "0.2", "0.6", "--batch", "2", "--new-tokens", "3",
         "--length", "768", "--prefixes", "2", "--lengths", "512"]  # fmt: skip


def checkpoint(folder, name, tokenizer=True):
    model = tiny_model(name)
    save_native(folder, model.config, model.params)
    if tokenizer:
        write_byte_tokenizer(folder)
    return str(folder)


def lines(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        (MODELS[0], {"2", "5", "6"}),
        pytest.param(MODELS[1], {"2", "4"}, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_gets_both_tables_and_the_figures_of_its_kind(name, figures, tmp_path, capsys):
    out = tmp_path / "results"
    model = checkpoint(tmp_path / "tiny", name)
    assert main(["--model", model, "--out", str(out), *SMALL]) == 0
    names = {"table_1a", "table_1b", *(f"figure_{f}" for f in figures)}
    assert {p.stem for p in out.glob("*.png")} == names
    assert {p.stem for p in out.glob("*.csv")} == names | {"table_1b_pairs"}
    first, second = lines(out / "table_1a.csv"), lines(out / "table_1b.csv")
    assert len(first) == 4 * 3 and all(0 <= float(x["accuracy"]) <= 1 for x in first)
    assert [x["comparisons"] for x in second] == ["2"] * 3
    answers = [json.loads(x) for x in (out / "table_1a_answers.jsonl").read_text().splitlines()]
    assert len(answers) == 4 * 2 and {a["cached_tokens"] % 64 for a in answers} == {0}
    made = json.loads((out / "run.json").read_text())
    assert made["n"] == 1 and made["dtype"] == "float32" and "jax" in made["machine"]
    printed = capsys.readouterr().out
    for word in ("zero-linear", "H_s, H_e", "float32 on", "seed 0", "median alpha"):
        assert word in printed


def test_a_published_profile_has_figures_but_no_tables(tmp_path, capsys):
    out = tmp_path / "kimi"
    assert main(["--model", "kimi-linear-48b", "--out", str(out)]) == 0
    assert {p.stem for p in out.glob("*.png")} == {"figure_2", "figure_5", "figure_6"}
    assert main(["--model", "kimi-linear-48b", "--out", str(out), "--only", "1a"]) == 1
    assert "(KDA) has no part 1a; it has 2, 5, 6" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--n", "0"], "n is 0"),
        (["--lengths", "0"], "lengths is 0"),
        (["--depths", "1.5"], "depths are (1.5,)"),
        (["--only", "4"], "has no part 4"),
        (["--length", "9999999"], "Table 1a would take 9999999 tokens"),
        (["--only", "1b", "--lengths", "9999999"], "Table 1b would take 9999999 tokens"),
    ],
)
def test_bad_requests_end_with_one_clear_line_and_no_file(options, complaint, tmp_path, capsys):
    model, out = checkpoint(tmp_path / "tiny", MODELS[0]), tmp_path / "none"
    assert main(["--model", model, "--out", str(out), *options]) == 1
    err = capsys.readouterr().err
    assert complaint in err and err.count("\n") == 1 and not out.exists()


def test_a_checkpoint_without_tokenizer_keeps_its_figures(tmp_path, capsys):
    model, out = checkpoint(tmp_path / "tiny", MODELS[0], tokenizer=False), tmp_path / "some"
    assert main(["--model", model, "--out", str(out)]) == 1
    assert "no tokenizer" in capsys.readouterr().err and (out / "figure_5.png").exists()
