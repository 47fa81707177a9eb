"""What the programs that time a step share: options of XLA, the profile, lines and tables."""

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from dasc_jax.engine.step import COMPILER_OPTIONS
from dasc_jax.programs.runtime import FAILED, machine
from dasc_jax.programs.step_profile import (
    large_copies,
    library_calls,
    longest,
    origins,
    shares,
)
from dasc_jax.programs.step_report import Failure, PrefillTime, StepTime, tables
from pallas_kernels.bench.clocks import kernel_times

PROFILED = 5
"""Steps under CUPTI."""

type Say = Callable[[str], None]
"""Called with a line on how far the program is."""


def options(variant: str) -> dict[str, str | int | bool]:
    """XLA's options of a variant, the engine's own among them.

    Raises:
        ValueError: something that is no NAME=VALUE.
    """
    chosen: dict[str, str | int | bool] = dict(COMPILER_OPTIONS)
    for option in variant.split(";") if variant != "engine" else ():
        name, equals, value = option.strip().partition("=")
        if not equals:
            raise ValueError(f"{option!r} is no NAME=VALUE")
        words = {"true": True, "false": False}
        chosen[name] = int(value) if value.lstrip("-").isdigit() else words.get(value, value)
    return chosen


def compile_step(lowered: Any, size: str, variant: str, say: Say) -> Any:
    """A lowered step, compiled with the options of a variant."""
    begun = time.perf_counter()
    compiled = lowered.compile(options(variant))
    say(f"{size}, {variant}: compiled in {time.perf_counter() - begun:.1f} s")
    return compiled


def profile(compiled: Any, run: Callable[[], Any]) -> dict[str, Any]:
    """What a compiled step launches, copies and needs: the fields of `StepTime` of these names."""
    launched = kernel_times(lambda: [run() for _ in range(PROFILED)][-1])
    text, memory = compiled.as_text() or "", compiled.memory_analysis()
    return {
        "kernel_ms": sum(ms for _, ms in launched) / PROFILED if launched else math.nan,
        "kernels": len(launched) / PROFILED,
        "temporaries": memory.temp_size_in_bytes if memory else 0,
        "copied": sum(large_copies(text).values()),
        "parts": tuple(shares(launched, PROFILED, origins(text), library_calls(text))),
        "longest": longest(launched, PROFILED),
    }


def failure(batch: int | str, variant: str, error: Exception) -> Failure:
    """What `error` says, not all of it."""
    return Failure(batch, variant, f"{type(error).__name__}: {error}"[:2000])


def clock() -> Say:
    """Prints lines behind the seconds since now."""
    begun = time.perf_counter()

    def say(line: str) -> None:
        print(f"{time.perf_counter() - begun:6.1f} s  {line}", flush=True)

    return say


def follow(
    results: Iterable[StepTime | PrefillTime | Failure],
    where: Mapping[str, str],
    out: Path | None,
    say: Say,
) -> int:
    """Write every result as a JSON line and show it as tables; returns the exit code.

    `where` is what all lines say beside the machine and the date.
    """
    console, code = Console(width=130), 0
    for took in results:
        line = took._asdict() | dict(where)
        line |= {"machine": machine(), "date": date.today().isoformat()}
        if not isinstance(took, Failure):
            line["parts"] = [share._asdict() for share in took.parts]
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")
        if isinstance(took, Failure):
            say(f"batch {took.batch}, {took.variant} failed: {took.error}")
            code = FAILED
        else:
            for table in tables(took):
                console.print(table)
    return code


REFUSED = (jax.errors.JaxRuntimeError, FloatingPointError)
"""What a step that cannot be timed raises: the device lacks memory or an option, no numbers."""
