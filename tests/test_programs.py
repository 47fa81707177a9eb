"""The programs do what their help says, and say what is wrong with a path or a number."""

import json
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from dasc_jax.cli import main
from dasc_jax.programs.runtime import settle
from dasc_jax.programs.serving import listen
from dasc_jax.tokenizer import tokenizer_files, write_byte_tokenizer
from dasc_jax.weights import save_native
from tests.tiny import tiny_model

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint directory of a small random model that reads bytes."""
    directory, tokenizer = tmp_path_factory.mktemp("tiny"), tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(tokenizer)
    model = tiny_model()
    save_native(directory, model.config, model.params, tokenizer_files(tokenizer))
    return directory


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
        (["--max-context", "5000"], "5000; the model was made for 4352"),
        (["--checkpoint-slots", "3", "--checkpoint-bytes", "9"], "give one"),
        (["--checkpoint-bytes", "1000"], "checkpoint_bytes is 1000"),
        (["--w-max", "-1"], "w_max=-1"),
        (["--prefill-tokens", "64"], "a refresh of 16 tokens needs at least 128"),
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
    assert "2048" in refusal(["generate", "--token-ids", "1", "2048"], capsys)


def test_generate_refuses_more_tokens_than_the_context_before_it_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = refusal(["generate", "--token-ids", "1", "2", "3", "--max-tokens", "4350"], capsys)
    assert "3 prompt tokens" in said and "4353" in said and "4352" in said


def test_generate_continues_text_and_its_token_ids_alike(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("The state\nThe state\n")
    options = ["--model", str(tiny), "--max-tokens", "3", "--dtype", "float32"]
    assert main(["generate", "--prompts", str(lines), "--json", *options]) == 0
    one, other = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert one == other and len(one["token_ids"]) == 3 and one["prompt"] == "The state"
    ids = [str(byte) for byte in b"The state"]
    assert main(["generate", "--token-ids", *ids, *options]) == 0
    assert capsys.readouterr().out.split() == [str(token) for token in one["token_ids"]]


def test_settle_leaves_a_configured_compilation_cache_alone() -> None:
    import jax

    before = jax.config.jax_compilation_cache_dir
    assert settle() == Path(before) and jax.config.jax_compilation_cache_dir == before


@pytest.mark.slow
def test_serve_answers_until_it_is_told_to_stop(tiny: Path) -> None:
    sizes = ["--max-running", "1", "--prefill-tokens", "128"]
    options = ["--model", str(tiny), "--served-name", "tiny", "--port", "0", *sizes]
    command = [sys.executable, "-u", str(ROOT / "scripts" / "serve.py"), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            said = ""
            for line in server.stdout:
                said += line
                if "ready:" in line:
                    break
            found = re.search(r"model 'tiny' at (http://\S+)", said)
            assert found and "minimum reusable prefix = 64 tokens" in said
            assert said.index("minimum reusable prefix") < said.index("compiling")
            body = {"model": "tiny", "prompt": "x" * 100, "max_tokens": 2}
            answers = [httpx.post(f"{found[1]}/completions", json=body).json() for _ in range(2)]
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
    assert cached == [0, 64]
