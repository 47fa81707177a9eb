"""The process that makes and times the cases of one op; started and read by `program`.

What it has to say goes to standard output, one JSON object a line behind `MARK`, so that nothing
else printed there is mistaken for it:

    {"case": 3, "op": ..., "shape": ..., "floor_ms": ...}    before the data of case 3 is made
    {"run": "ours"}                                          before a run is made, checked, timed
    {"impl": "ours", "ms": ..., ...}                         its line
    {"done": true}

A kernel can crash the process or leave the device unusable; the lines before are out by then.
"""

import argparse
import gc
import importlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.bench.clocks import Timing, timed
from pallas_kernels.bench.peers import peers
from pallas_kernels.bench.timing import Case, Problem, Run, WrongResult, checked

MARK = "@bench "
INPUTS = "inputs"
"""The name under which data fail that could not be made."""
BROKEN = 3
"""Exit status of a worker whose device answers no more."""


def lines(
    cases: Sequence[Case],
    first: int,
    skip: frozenset[str],
    variants: bool,
    with_peers: bool,
    impls: str = "",
) -> Iterator[dict[str, Any]]:
    """What to say about the cases from number `first` on, without the runs `skip` of that one.

    Of runs and peers, only those whose name the regular expression `impls` finds.
    """

    def wanted(name: str) -> bool:
        return (variants or "[" not in name) and re.search(impls, name) is not None

    for number, case in enumerate(cases[first:], first):
        yield {"case": number, "op": case.op, "shape": case.shape, "floor_ms": case.floor_ms}
        try:
            problem = case.make()
        except Exception as error:
            yield {"impl": INPUTS, "failed": _reason(error)}
            continue
        done = skip if number == first else frozenset()
        names = [name for name in problem.runs if wanted(name) and name not in done]
        for name in names:
            yield {"run": name}
            yield {"impl": name} | _measured(problem, problem.runs[name], case.floor_ms)
        for peer in peers(case.op) if with_peers else ():
            if peer.name in done or not wanted(peer.name):
                continue
            if missing := peer.missing():
                yield {"impl": peer.name, "failed": missing}
                continue
            yield {"run": peer.name}
            result = _measured(problem, partial(peer.make, problem), case.floor_ms)
            if result:
                yield {"impl": peer.name} | result
        del problem
        gc.collect()


def _measured(problem: Problem, make: Any, floor_ms: float) -> dict[str, Any]:
    """The figures of a run, or why there are none; empty if it does not take this problem."""
    try:
        run = make()
        if run is None:
            return {}
        run, temporaries = _compiled(run)
        error, run = checked(run, problem)
        return _figures(timed(run), floor_ms) | {"temporaries": temporaries, "error": error}
    except WrongResult as error:
        return {"failed": f"wrong result: {error}"}
    except Exception as error:
        return {"failed": _reason(error)}
    finally:
        run = None
        gc.collect()


def _figures(timing: Timing, floor_ms: float) -> dict[str, Any]:
    return {
        "ms": timing.median,
        "least_ms": timing.least,
        "of_floor": floor_ms / timing.median if timing.median else None,
        "wall_ms": timing.wall,
        "kernels": timing.kernels,
        "timer": timing.timer,
        "parts": timing.parts if len(timing.parts) > 1 else {},
    }


def _compiled(run: Run) -> tuple[Run, int | None]:
    """A jitted run compiled ahead, and the bytes that it needs beside arguments and results (None
    where nobody says)."""
    lower = getattr(run.call, "lower", None)
    if lower is None:
        return run, None
    compiled = lower(*run.args).compile()
    analysis = compiled.memory_analysis()
    return replace(run, call=compiled), analysis and analysis.temp_size_in_bytes


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:600]


def device_answers() -> bool:
    """Whether the device still computes: after an illegal instruction or address it does not."""
    try:
        return bool(jnp.sum(jnp.ones(8)) == 8.0)
    except Exception:
        return False


def main(argv: Sequence[str]) -> int:
    """Time the cases of `--module`; 0, or `BROKEN` when the device has to be opened anew."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--module", required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--skip", action="append", default=[])
    parser.add_argument("--shapes", action="append", default=[])
    parser.add_argument("--impls", default="")
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--peers", action="store_true")
    args = parser.parse_args(argv)
    cases = [
        case
        for case in importlib.import_module(args.module).cases()
        if not args.shapes or any(re.search(p, f"{case.op} {case.shape}") for p in args.shapes)
    ]
    where = {"device": jax.devices()[0].device_kind, "date": date.today().isoformat()}
    skip = frozenset(args.skip)
    for line in lines(cases, args.first, skip, args.variants, args.peers, args.impls):
        _say(line | where if "impl" in line else line)
        if "failed" in line and not device_answers():
            return BROKEN
    _say({"done": True})
    return 0


def _say(line: dict[str, Any]) -> None:
    print(MARK + json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
