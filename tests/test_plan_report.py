"""`dasc plan`: the paper's numbers in its table, checkpoints of both formats, readable failures."""

import shutil

import numpy as np
import pytest

import dasc_jax.analysis.profile
from dasc_jax.analysis.balance import balances, draw_balance
from dasc_jax.analysis.figure import draw
from dasc_jax.analysis.profile import decay_params, load_profile
from dasc_jax.analysis.report import main, report, table
from dasc_jax.cli import PROGRAMS
from dasc_jax.config import ModelConfig
from dasc_jax.horizons import retention_horizons
from dasc_jax.layout import account
from dasc_jax.plan import load_plan, make_plan
from dasc_jax.published import published_profile
from dasc_jax.weights import load_params, save_native

FIXTURES = ("kimi_linear_a", "qwen3_next_a")


def run(capsys, *arguments):
    code = main(list(arguments))
    said = capsys.readouterr()
    return code, said.out, said.err


def cells(text, w_max):
    """The table row of a threshold, as a list of its cells."""
    rows = (line.split() for line in text.splitlines())
    return next(row for row in rows if len(row) == 11 and row[0] == str(w_max))


def test_table_of_the_published_kimi_profile_shows_the_numbers_of_the_paper(capsys):
    code, out, _ = run(capsys, "kimi-linear-48b", "--tp", "8")
    assert code == 0 and "694,681,600" in out and "81,920 units" in out
    assert "0.170 / 0.471 / 0.774" in out
    assert cells(out, 0)[6:9] == ["5,427,200", "1.00x", "127"]
    assert cells(out, 16)[1:] == [
        "16", "29,364", "35.84", "2.79x", "2.00x", "2,063,872", "2.63x", "335", "8.11x", "1,037",
    ]  # fmt: skip
    assert cells(out, 512)[2] == "144" and cells(out, 512)[6:9] == ["193,536", "28.04x", "3,588"]


def test_placement_and_budget_change_capacity_as_they_should(capsys):
    arguments = ("qwen3-next-80b", "--tp", "8", "--w-max", "512")
    _, even, _ = run(capsys, *arguments)
    _, off, _ = run(capsys, *arguments, "--placement", "off")
    _, tiny, _ = run(capsys, *arguments, "--budget", "1000")
    assert cells(even, 512)[8] == "316" and cells(off, 512)[8] == "267"
    assert cells(tiny, 512)[8] == "0"


def test_second_table_shows_every_rank_before_and_after_each_stage(capsys):
    _, out, _ = run(capsys, "kimi-linear-48b", "--tp", "8", "--w-max", "0", "512")
    lines = [line.split() for line in out[out.index("Before and after") :].splitlines()]
    off, order, storage, hybrid = lines[3:7]
    kept = ["184"] * 8
    assert off == ["512", "off", "258,048", "21.03x", "2,691", "0", *kept[:5], "258", *kept[6:]]
    assert order[:7] == ["1:", "head", "order", "242,176", "22.41x", "2,867", "0"]
    assert storage == ["2:", "storage", "193,536", "28.04x", "3,588", "126", *["194"] * 8]
    assert hybrid == ["1", "+", "2:", "hybrid", *storage[2:5], "95", *storage[6:]]
    assert "W_max" not in " ".join(sum(lines[3:], []))


def test_one_rank_has_nothing_to_balance_and_a_dense_plan_alone_is_shown(capsys):
    _, out, _ = run(capsys, "qwen3-next-80b", "--w-max", "512")
    assert "stage" not in out
    _, out, _ = run(capsys, "qwen3-next-80b", "--w-max", "0", "--tp", "2")
    assert out.count("hybrid") == 2 and out.count("1.00x") >= 4


@pytest.mark.parametrize("model", ["kimi-linear-48b", "checkpoint"])
def test_ranks_are_drawn_with_a_panel_for_every_lossy_threshold(
    model, golden_dir, tmp_path, capsys
):
    model = str(golden_dir / "qwen3_next_a") if model == "checkpoint" else model
    path = tmp_path / "ranks.png"
    code, out, err = run(capsys, model, "--tp", "2", "--ranks-figure", str(path))
    assert code == 0 and "ranks.png" in out, err
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 20_000


def test_bars_are_the_bytes_of_the_accounts():
    config, h = published_profile("qwen3-next-80b")
    rows = balances(config, [make_plan(h, w) for w in (0, 64, 512)], 8)
    panels = [axes for axes in draw_balance(rows, "qwen").axes if axes.patches]
    assert len(panels) == len(rows) == 2
    for axes, row in zip(panels, rows, strict=True):
        heights = [bar.get_height() for bar in axes.patches]
        assert heights == [n for _, acc in row.stages for n in acc.bytes_per_rank]


def test_stages_are_the_accounts_of_the_placements():
    config, h = published_profile("kimi-linear-48b")
    plan = make_plan(h, 128)
    (row,) = balances(config, [plan], 4)
    for placement in ("off", "storage", "hybrid"):
        assert getattr(row, placement) == account(config, plan, 4, placement)
    assert row.ordered.bytes_per_slot <= row.off.bytes_per_slot


@pytest.mark.parametrize("fixture", FIXTURES)
def test_only_decays_are_read_of_a_released_directory_and_they_equal_a_full_load(
    fixture, golden_dir, monkeypatch
):
    path = golden_dir / fixture
    config = ModelConfig.from_hf(path)
    read = []
    original = dasc_jax.analysis.profile.stream_params

    def recording(manifest, *rest):
        read.extend(piece.param for piece in manifest.pieces)
        return original(manifest, *rest)

    monkeypatch.setattr(dasc_jax.analysis.profile, "stream_params", recording)
    params = decay_params(path, config)
    assert sorted(read) == sorted(params) and len(read) == 2 * len(config.recurrent_layers)
    full = load_params(path, config, "float32")
    for name, value in params.items():
        np.testing.assert_array_equal(value, np.asarray(full[name]))


@pytest.mark.parametrize("fixture", FIXTURES)
def test_a_native_directory_gives_the_same_profile(fixture, golden_dir, tmp_path):
    released, native = golden_dir / fixture, tmp_path / "native"
    config = ModelConfig.from_hf(released)
    save_native(native, config, load_params(released, config, config.dtype))
    (_, want), (found, got) = load_profile(released), load_profile(native)
    assert found.delta == config.delta
    for x, y in zip(want, got, strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_fixture_runs_on_one_rank_and_its_plans_load_against_its_weights(
    golden_dir, tmp_path, capsys
):
    path = golden_dir / "kimi_linear_a"
    code, out, _ = run(capsys, str(path), "--save", str(tmp_path / "plans"))
    assert code == 0 and "written" in out
    config = ModelConfig.from_hf(path)
    h = retention_horizons(decay_params(path, config), config)
    for w in (0, 16, 64, 128, 512):
        assert load_plan(tmp_path / "plans" / f"w{w}.plan", h) == make_plan(h, w)


@pytest.mark.parametrize("name", ["kimi-linear-48b", "qwen3-next-80b"])
def test_figure_is_a_png_with_a_panel_for_each_view(name, tmp_path, capsys):
    path = tmp_path / "pictures" / "profile.png"
    code, out, _ = run(capsys, name, "--tp", "8", "--figure", str(path))
    assert code == 0 and "profile.png" in out
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 50_000


def test_figure_map_has_a_row_for_every_layer_and_leaves_attention_blank():
    config, h = published_profile("kimi-linear-48b")
    figure = draw(config, h, (16,), tp=8)
    (image,) = [axes.images[0] for axes in figure.axes if axes.images and axes.get_xlabel()]
    values = image.get_array()
    assert values.shape == (27, 32)
    blank = np.flatnonzero(np.ma.getmaskarray(np.ma.masked_invalid(values)).all(axis=1))
    assert tuple(blank) == config.attention_layers
    np.testing.assert_allclose(np.nanmean(values.filled(np.nan)), 29_364 / 81_920, atol=1e-6)


def test_figure_of_a_dense_plan_alone_is_drawn_too():
    config, h = published_profile("qwen3-next-80b")
    assert len(draw(config, h, (0,)).axes) == 5


def test_longer_gate_input_and_other_eps_reach_the_plans():
    config, h = load_profile("kimi-linear-48b", a=-2.0, eps=1e-2)
    (row,) = report(config, h, (16,), a=-2.0, eps=1e-2)
    assert (row.plan.a, row.plan.eps) == (-2.0, 1e-2)
    (usual,) = report(*published_profile("kimi-linear-48b"), (16,))
    assert row.plan.total != usual.plan.total


def test_a_plan_that_keeps_nothing_has_a_line_too():
    config, h = published_profile("kimi-linear-48b")
    rows = report(config, h, (10**6,))
    assert table(rows, 10**9, 1, "hybrid").row_count == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere"], "'nowhere' is neither a directory nor a published profile"),
        (["kimi-linear-48b", "--tp", "3"], "tp=3 does not divide 32"),
        (["kimi-linear-48b", "--w-max", "-1"], "w_max=-1"),
        (["kimi-linear-48b", "--eps", "2"], "eps=2.0"),
        (["kimi-linear-48b", "--ranks-figure", "ranks.png"], "it needs --tp 2 or more, not 1"),
    ],
)
def test_bad_requests_end_with_one_clear_line(arguments, complaint, capsys):
    code, out, err = run(capsys, *arguments)
    assert code == 1 and complaint in err and err.count("\n") == 1 and not out


def test_a_directory_without_weights_is_named(golden_dir, tmp_path, capsys):
    shutil.copy(golden_dir / "kimi_linear_a" / "config.json", tmp_path)
    code, _, err = run(capsys, str(tmp_path))
    assert code == 1 and "neither *.safetensors nor a native Orbax tree" in err


def test_dasc_plan_is_this_program_and_its_help_explains_every_option(capsys):
    assert PROGRAMS["plan"].module == "dasc_jax.analysis.report"
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for word in (
        "MODEL",
        "--w-max",
        "--tp",
        "--placement",
        "--budget",
        "--figure",
        "--ranks-figure",
        "tokens",
    ):
        assert word in text
