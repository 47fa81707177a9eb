import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dasc_jax.programs.prefill_step import Args, Size, bench, prompts, size_of
from dasc_jax.programs.step_program import follow
from dasc_jax.programs.step_report import Failure, PrefillTime
from dasc_jax.programs.step_size import prefill_floor_ms, prefill_flop
from dasc_jax.published import published_config
from tests.engines import MODELS, golden_model


def test_prompts_run_end_to_end_and_leave_a_line_a_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = replace(golden_model(MODELS[0]).config, dtype="bfloat16")
    args = Args(prompts=("2x64",), variants=("engine", "xla_no_such_option=1"), steps=2)
    lines: list[str] = []
    took, refused = results = list(bench(config, args, lines.append))
    assert isinstance(took, PrefillTime), took
    assert (took.requests, took.tokens) == (2, 64)
    assert 0 < took.dispatch_ms <= took.ms and took.synced_ms > 0
    assert took.temporaries > 0 and took.copied == 0 and math.isnan(took.kernel_ms)
    assert isinstance(refused, Failure) and refused.batch == "2x64"
    assert sum("compiled" in line for line in lines) == 1

    out = tmp_path / "new" / "lines.jsonl"
    assert follow(results, {"command": "this"}, out, lines.append) == 1
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert written[0]["tokens"] == 64 and "xla_no_such_option" in written[1]["error"]
    assert all({"command", "machine", "date"} <= line.keys() for line in written)
    assert "2x64" in capsys.readouterr().out


def test_a_prefill_is_of_whole_prompts_in_the_engines_bucket():
    batch = prompts(golden_model(MODELS[0]).config, Size(3, 128))
    assert batch.tokens.shape == (384,) and len(batch.rows) == 3
    assert batch.rows.tolist() == [127, 255, 383]
    assert batch.table.cu_seqlens[:4].tolist() == [0, 128, 256, 384]
    assert batch.fresh.all() and batch.boundary_end[:3].tolist() == [128, 256, 384]
    assert len(np.unique(batch.write_pages)) == 6 and 0 not in batch.write_pages


@pytest.mark.parametrize("text", ["8192", "1x", "0x64", "1x100", "ax64"])
def test_a_size_that_names_no_prompts_is_refused(text: str):
    with pytest.raises(ValueError, match=r"REQUESTSxTOKENS|grid of 64"):
        size_of(text)


def test_a_prefill_computes_the_active_weights_once_a_token():
    config = published_config("kimi-linear-48b")
    short, long = (prefill_flop(config, 1, tokens) for tokens in (64, 8192))
    # 2.7 B active parameters without embedding and head; attention over 192 + 128 columns.
    attention = 7 * 32 * 2 * 320 * 8192 * 8193 / 2
    assert long - attention == pytest.approx(8192 * 2 * 2.7e9, rel=0.03)
    assert prefill_flop(config, 3, 64) == pytest.approx(3 * short)
    assert prefill_floor_ms(config, 1, 8192) == pytest.approx(62, abs=3)
    # A short prompt takes as long as reading most experts does.
    assert prefill_floor_ms(config, 1, 1024) == pytest.approx(98e9 / 4.3e9, rel=0.03)
