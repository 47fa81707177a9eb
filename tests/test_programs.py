"""The programs do what their help says, and say what is wrong with a path or a number."""

import json
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest

from dasc_jax.cli import main
from dasc_jax.config import ModelConfig
from dasc_jax.horizons import retention_horizons
from dasc_jax.model import Model, forward, load_model
from dasc_jax.plan import make_plan
from dasc_jax.programs.arms import Answer, Arm, kl_divergence, outcome
from dasc_jax.programs.conversations import Conversations, Workload
from dasc_jax.programs.runtime import EMBEDDED, settle
from dasc_jax.programs.serving import listen

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def demo() -> Model:
    """The checkpoint that comes with the repository."""
    return load_model(EMBEDDED, "float32")


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a program says on stderr as it refuses its arguments, with exit status 1."""
    assert main(arguments) == 1
    said = capsys.readouterr()
    assert "error: " in said.err and "Traceback" not in said.err
    return said.err


@pytest.mark.parametrize("name", ["serve", "generate", "plan", "convert", "demo"])
def test_each_script_answers_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "scripts" / f"{name}.py"), run_name="__main__")
    assert stop.value.code in (0, None)
    assert "usage" in capsys.readouterr().out


@pytest.mark.parametrize("program", [["serve"], ["generate", "text"], ["demo"]])
def test_a_path_that_is_no_checkpoint_is_named(
    program: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "nowhere" in refusal([*program, "--model", str(tmp_path / "nowhere")], capsys)
    assert "config.json" in refusal([*program, "--model", str(tmp_path)], capsys)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--interval", "100"], "checkpoint_interval is 100"),
        (["--max-context", "5000"], "5000; the model was made for 4096"),
        (["--checkpoint-slots", "3", "--checkpoint-bytes", "9"], "give one"),
        (["--checkpoint-bytes", "1000"], "checkpoint_bytes is 1000"),
        (["--w-max", "-1"], "w_max=-1"),
        (["--prefill-tokens", "64"], "a refresh of 16 tokens needs 83"),
        (["--mem-fraction", "1.5"], "mem-fraction is 1.5"),
        (["--port", "99999"], "127.0.0.1:99999"),
    ],
)
def test_serve_refuses_bad_sizes_with_the_numbers(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(["serve", "--port", "0", *options], capsys)


def test_serve_refuses_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"127.0.0.1:{port}" in refusal(["serve", "--port", port], capsys)


def test_generate_needs_exactly_one_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate"]) == 2
    assert main(["generate", "text", "--token-ids", "1"]) == 2
    assert capsys.readouterr().err.count("give one of") == 2


def test_generate_refuses_a_token_outside_the_vocabulary(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "259" in refusal(["generate", "--token-ids", "1", "259"], capsys)


def test_generate_refuses_more_tokens_than_the_context_before_it_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = refusal(["generate", "abc", "--max-tokens", "4094"], capsys)
    assert "3 prompt tokens" in said and "4097" in said and "4096" in said


def test_generate_continues_text_and_its_token_ids_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("The state\nThe state\n")
    options = ["--max-tokens", "3", "--dtype", "float32"]
    assert main(["generate", "--prompts", str(lines), "--json", *options]) == 0
    one, other = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert one == other and len(one["token_ids"]) == 3 and one["prompt"] == "The state"
    ids = [str(byte) for byte in b"The state"]
    assert main(["generate", "--token-ids", *ids, *options]) == 0
    assert capsys.readouterr().out.split() == [str(token) for token in one["token_ids"]]


def test_the_embedded_checkpoint_is_what_its_script_makes(demo: Model) -> None:
    made = runpy.run_path(str(ROOT / "scripts" / "make_demo_checkpoint.py"))["demo_model"]()
    assert ModelConfig.from_hf(EMBEDDED) == made.config
    assert made.params.keys() == demo.params.keys()
    for name, value in made.params.items():
        np.testing.assert_array_equal(
            np.asarray(value, np.float32), np.asarray(demo.params[name]), err_msg=name
        )
    size = sum(file.stat().st_size for file in EMBEDDED.rglob("*") if file.is_file())
    assert size < 5_000_000


def test_the_embedded_checkpoint_has_work_for_every_threshold(demo: Model) -> None:
    horizons = retention_horizons(demo)
    pooled = np.concatenate([h.ravel() for h in horizons])
    assert pooled.min() < 2 and pooled.max() > 2000
    kept = [make_plan(horizons, w).total / pooled.size for w in (16, 64, 128)]
    assert 0.30 < kept[0] < 0.45 and kept[0] > kept[1] > kept[2] > 0


def test_the_embedded_checkpoint_predicts_neither_one_token_nor_all_alike(demo: Model) -> None:
    tokens = np.random.default_rng(0).integers(0, 256, (1, 64))
    logits = np.asarray(forward(demo, tokens)[0][0], np.float64)
    p = np.exp(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))
    entropy = -(p * np.log(p)).sum(axis=-1)
    assert 2.0 < entropy.mean() < 5.0


def test_conversations_share_the_system_prompt_and_grow_by_their_replies(demo: Model) -> None:
    talk = Conversations(Workload(2, 2, 100, 20), demo.tokenizer)
    first, second = talk.ask(0), talk.ask(1)
    shared = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    assert shared > 100
    talk.answer(0, [1, 2, 3])
    assert talk.ask(0)[: len(first) + 3] == (*first, 1, 2, 3)


def test_an_outcome_counts_tokens_to_the_first_difference_and_kl_while_contexts_agree() -> None:
    sure, even = {"a": 0.0, "b": -50.0}, {"a": np.log(0.5), "b": np.log(0.5)}
    cold = [Answer((1, 2, 3), (even, even, even), 100, 0, 0, 1.0)]
    same = outcome(Arm("dense"), cold, cold, 10, 1)
    assert (same.equal, same.kl, same.hit_rate, same.hits) == (1.0, 0.0, 0.0, 0)
    other = [Answer((1, 9, 3), (even, even, sure), 100, 64, 16, 0.5)]
    lossy = outcome(Arm("wr", 16), other, cold, 10, 1)
    assert lossy.equal == pytest.approx(1 / 3) and lossy.kl == 0.0
    assert (lossy.hit_rate, lossy.replayed) == (0.64, 16)


def test_kl_is_that_of_the_normalised_distributions() -> None:
    p, q = {"a": np.log(0.75), "b": np.log(0.25)}, {"a": np.log(0.5), "b": np.log(0.5)}
    expected = 0.75 * np.log(1.5) + 0.25 * np.log(0.5)
    assert kl_divergence(p, q) == pytest.approx(expected)
    assert kl_divergence({k: v + 1 for k, v in p.items()}, q) == pytest.approx(expected)
    with pytest.raises(ValueError, match="same tokens"):
        kl_divergence(p, {"a": 0.0})


def test_settle_leaves_a_configured_compilation_cache_alone() -> None:
    import jax

    before = jax.config.jax_compilation_cache_dir
    assert settle() == Path(before) and jax.config.jax_compilation_cache_dir == before


@pytest.mark.slow
def test_serve_answers_until_it_is_told_to_stop() -> None:
    options = ["--port", "0", "--max-running", "1", "--prefill-tokens", "128"]
    command = [sys.executable, "-u", str(ROOT / "scripts" / "serve.py"), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            said = ""
            for line in server.stdout:
                said += line
                if "ready:" in line:
                    break
            found = re.search(r"model 'demo' at (http://\S+)", said)
            assert found and "minimum reusable prefix = 64 tokens" in said
            assert said.index("minimum reusable prefix") < said.index("compiling")
            body = {"model": "demo", "prompt": "x" * 100, "max_tokens": 2}
            answers = [httpx.post(f"{found[1]}/completions", json=body).json() for _ in range(2)]
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
    assert cached == [0, 64]


@pytest.mark.slow
def test_a_tiny_demo_compares_every_policy(tmp_path: Path) -> None:
    sizes = ["--conversations", "2", "--turns", "2", "--system-tokens", "130"]
    options = ["--w-max", "16", "--no-int8", "--reply-tokens", "3", "--out", str(tmp_path)]
    command = [sys.executable, str(ROOT / "scripts" / "demo.py"), *sizes, *options]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=280)
    assert ran.returncode == 0
    assert "2 conversations of 2 turns" in ran.stdout
    assert f"written: {tmp_path / 'demo.jsonl'}" in ran.stdout
    rows = [json.loads(line) for line in (tmp_path / "demo.jsonl").read_text().splitlines()]
    by_name = {row["name"]: row for row in rows}
    assert list(by_name) == ["cold", "dense", "nr", "wr"]
    assert by_name["cold"]["hits"] == 0 and by_name["dense"]["hits"] > 0
    assert by_name["dense"]["equal"] == 1.0
    assert by_name["wr"]["replayed"] == 16 and by_name["nr"]["replayed"] == 0
    assert by_name["nr"]["checkpoint_bytes"] < by_name["dense"]["checkpoint_bytes"]
    assert all(np.isfinite(row["kl"]) for row in rows)
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
