"""The `dasc` command lists its programs, refuses other names, and hands on arguments and status."""

import sys
import types

import pytest

from dasc_jax.cli import PROGRAMS, main


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Stand in for the module of `dasc plan`, recording the arguments that reach it."""
    seen = types.SimpleNamespace(arguments=None, status=None)
    module = types.ModuleType("stand_in")

    def run(arguments: list[str]) -> int | None:
        seen.arguments = arguments
        return seen.status

    monkeypatch.setattr(module, "main", run, raising=False)
    monkeypatch.setitem(sys.modules, PROGRAMS["plan"].module, module)
    return seen


def test_help_lists_every_program_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    for name, program in PROGRAMS.items():
        assert f"{name} " in listed and program.summary in listed


@pytest.mark.parametrize(("arguments", "complaint"), [([], "no program"), (["serv"], "'serv'")])
def test_a_missing_or_unknown_program_exits_2_and_says_so(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert complaint in said.err and "serve" in said.err and not said.out


@pytest.mark.parametrize(("status", "expected"), [(None, 0), (0, 0), (3, 3)])
def test_arguments_and_exit_status_pass_through(
    status: int | None, expected: int, program: types.SimpleNamespace
) -> None:
    program.status = status
    assert main(["plan", "--w-max", "16"]) == expected
    assert program.arguments == ["--w-max", "16"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_answers_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code in (0, None)
    assert "usage" in capsys.readouterr().out.lower()
