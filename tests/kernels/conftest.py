"""What tests of interpreted kernels share: the races that the interpreter's detector prints."""

import re
from collections.abc import Callable
from typing import NamedTuple

import pytest

ACCESS = re.compile(r"(read|write) of \w+\(memory_space_id=(\d).*\((\S+)\)$", re.MULTILINE)


class Race(NamedTuple):
    """Whether it is in shared memory; the functions that write and that read or write there."""

    shared: bool
    write: str
    other: str


@pytest.fixture
def races(capsys) -> Callable[[], set[Race]]:
    """Those found since it was asked last."""

    def found() -> set[Race]:
        reports = capsys.readouterr().out.split("RACE DETECTED")[1:]
        return {_race(ACCESS.findall(report)) for report in reports}

    return found


def _race(accesses: list[tuple[str, str, str]]) -> Race:
    """Of a kind, a memory space and a function each, two of them."""
    (kind, space, function), (_, _, other) = sorted(accesses, reverse=True)
    assert kind == "write"
    return Race(space == "1", function, other)


@pytest.fixture
def no_races(races):
    """Fails a test in which there are any."""
    yield
    assert not races()
