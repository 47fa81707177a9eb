"""The figures of a timed step of a model, and the tables they are shown in."""

from collections.abc import Iterator
from typing import NamedTuple

from rich.table import Table

from dasc_jax.programs.step_profile import Share


class StepTime(NamedTuple):
    """Milliseconds of a decode step at one batch size."""

    batch: int
    variant: str
    ms: float
    """Host clock over many steps in a row, launches overlapping."""
    synced_ms: float
    """The same, as an engine does: waiting for the tokens of a step, sending the next batch."""
    dispatch_ms: float
    """What the host needs to launch a step."""
    kernel_ms: float
    """Sum of its kernels; NaN without CUPTI."""
    kernels: float
    floor_ms: float
    temporaries: int
    """Bytes of device memory the step needs beside its arguments."""
    copied: int
    """Bytes of whole arrays it copies outside kernels: pools that are not updated in place."""
    parts: tuple[Share, ...]
    longest: tuple[tuple[str, float, float], ...]
    """The kernels that take most of a step: (name, milliseconds, how many)."""


class PrefillTime(NamedTuple):
    """Milliseconds of a prefill of so many requests of so many tokens each; see `StepTime`."""

    requests: int
    tokens: int
    variant: str
    ms: float
    synced_ms: float
    dispatch_ms: float
    kernel_ms: float
    kernels: float
    floor_ms: float
    temporaries: int
    copied: int
    parts: tuple[Share, ...]
    longest: tuple[tuple[str, float, float], ...]


class Failure(NamedTuple):
    """A batch size (of prompts: REQUESTSxTOKENS) and variant not timed, and why."""

    batch: int | str
    variant: str
    error: str


def tables(took: StepTime | PrefillTime) -> Iterator[Table]:
    """The figures of a step, and where the kernels' time goes."""
    size = took.batch if isinstance(took, StepTime) else f"{took.requests}x{took.tokens}"
    names = ("batch", "ms a step", "waiting", "launching", "kernels", "number", "floor")
    table = Table(*names, "temporaries", "copied", title=took.variant)
    figures = (took.ms, took.synced_ms, took.dispatch_ms, took.kernel_ms)
    table.add_row(
        str(size),
        *(f"{ms:.3f}" for ms in figures),
        f"{took.kernels:.0f}",
        f"{took.floor_ms:.3f}",
        f"{took.temporaries / 1e6:.1f} MB",
        f"{took.copied / 1e6:.1f} MB",
    )
    yield table
    if took.parts:
        table = Table("part", "ms", "share", "kernels")
        for share in took.parts:
            portion = f"{share.ms / took.kernel_ms:.0%}"
            table.add_row(share.part, f"{share.ms:.3f}", portion, f"{share.kernels:.0f}")
        yield table
        table = Table("kernel", "ms", "number")
        for name, ms, number in took.longest:
            table.add_row(name[:90], f"{ms:.3f}", f"{number:.0f}")
        yield table
