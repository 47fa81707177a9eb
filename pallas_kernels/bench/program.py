"""Times the kernels of this library and their peers, and says how near they come to the floor.

    python scripts/bench_kernels.py --ops delta_decode --out results/kernels.jsonl

Every op runs in a process of its own, which is started again behind a run that crashes it, hangs or
breaks the device. Only results that agree with the reference are timed.
"""

import json
import os
import queue
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import tyro
from rich.console import Console
from rich.table import Table

from pallas_kernels.bench.page import page, read
from pallas_kernels.bench.worker import BROKEN, INPUTS, MARK

OPS = (
    "delta_decode",
    "ragged_pack",
    "grouped_matmul",
    "paged_attention",
    "gdn_prefill",
    "kda_prefill",
)
"""Modules of `pallas_kernels.bench` with cases."""

START_SECONDS = 120.0
"""Until a worker says its first word: imports and the device's start."""


@dataclass(frozen=True)
class Args:
    """What is timed, for how long, and where the lines go."""

    ops: tuple[str, ...] = OPS
    """Modules of cases, in this order."""
    shapes: tuple[str, ...] = ()
    """Only cases whose "op shape" matches one of these regular expressions, as "B=(1|32)$" does."""
    impls: str = ""
    """Only implementations in whose name this regular expression is found, as "^(ours|fla)" is."""
    variants: bool = True
    """Sweep the tilings; otherwise only the default one of each kernel and of each peer."""
    peers: bool = True
    """Time what other libraries offer too, where it is installed."""
    seconds: float = 480.0
    """Budget of the whole run, shared by the ops; what it did not reach is listed."""
    run_seconds: float = 60.0
    """Longest a single run may take, its compilation included, before it counts as hanging."""
    out: Path | None = None
    """A file that gets one JSON line a run, at once; lines are appended."""
    page: Path | None = None
    """Time nothing: write the page (.md) of this file of lines beside it."""


@dataclass
class Progress:
    """How far the workers of an op have come: where the next one starts."""

    case: dict[str, Any] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    running: str | None = None
    first: int = 0

    def take(self, line: dict[str, Any]) -> dict[str, Any] | None:
        """Note what a worker said; the whole line if it is a result."""
        if "case" in line:
            self.done = self.done if line["case"] == self.first else set()
            self.first, self.case, self.running = line["case"], line, None
        elif "run" in line:
            self.running = line["run"]
        elif "impl" in line:
            self.done.add(line["impl"])
            self.running = None
            if line["impl"] == INPUTS:
                self.first, self.done = self.first + 1, set()
            return self.place() | line
        return None

    def place(self) -> dict[str, Any]:
        """The case that is on."""
        return {name: self.case.get(name) for name in ("op", "shape", "floor_ms")}

    def crashed(self, reason: str) -> dict[str, Any]:
        """The line of what was running when the worker ended, and a start behind it."""
        name = self.running or INPUTS
        line = self.take({"impl": name, "failed": reason})
        assert line is not None
        return line


class Ending(NamedTuple):
    """How a worker ended: all done, or to be started again, with the reason if it crashed."""

    finished: bool
    reason: str = ""


def bench_op(module: str, args: Args, deadline: float) -> Iterator[dict[str, Any]]:
    """The lines of an op, worker after worker until every case was tried or time is up.

    `deadline` is of `time.monotonic`. The last line has "stopped" if something was left out.
    """
    progress = Progress()
    while True:
        ending = yield from _work(_command(module, args, progress), progress, args, deadline)
        if ending.finished:
            return
        if time.monotonic() > deadline:
            yield {"op": module} | progress.place() | {"stopped": "time is up"}
            return
        if not progress.case:
            yield {"op": module, "shape": "", "impl": "worker", "failed": ending.reason}
            return
        if ending.reason:
            yield progress.crashed(ending.reason)


def _command(module: str, args: Args, progress: Progress) -> list[str]:
    name = module if "." in module else f"pallas_kernels.bench.{module}"
    command = [sys.executable, "-m", "pallas_kernels.bench.worker", f"--module={name}"]
    command += [f"--first={progress.first}"]
    command += [f"--skip={name}" for name in sorted(progress.done)]
    command += [f"--shapes={text}" for text in args.shapes]
    command += [f"--impls={args.impls}"]
    return command + ["--variants"] * args.variants + ["--peers"] * args.peers


def _work(
    command: Sequence[str], progress: Progress, args: Args, deadline: float
) -> Generator[dict[str, Any], None, Ending]:
    """Run one worker; pass on its results."""
    # Torch peers need room on the device beside JAX.
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as worker,
    ):
        assert worker.stdout is not None
        try:
            said, patience = _reader(worker.stdout), START_SECONDS
            while True:
                left = min(patience, deadline - time.monotonic())
                try:
                    line = said.get(timeout=max(left, 0.01))
                except queue.Empty:
                    return Ending(False, f"no answer in {patience:.0f} s")
                if line is None:
                    break
                if "done" in line:
                    return Ending(True)
                patience = args.run_seconds
                if result := progress.take(line):
                    yield result
            if worker.wait() == BROKEN:
                return Ending(False)
            errors.seek(0)
            return Ending(False, f"exit status {worker.returncode}: {errors.read()[-500:]}")
        finally:
            worker.kill()


def _reader(pipe: Iterable[str]) -> queue.Queue[dict[str, Any] | None]:
    """What a worker says, read by a thread so that waiting for it can end; None behind the last."""
    said: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def read() -> None:
        for text in pipe:
            if text.startswith(MARK):
                said.put(json.loads(text.removeprefix(MARK)))
        said.put(None)

    threading.Thread(target=read, daemon=True).start()
    return said


def described(line: dict[str, Any]) -> str:
    """A line as text."""
    where = f"{line['op']:<16} {line.get('shape') or '':<28} {line.get('impl') or '':<28}"
    if reason := line.get("failed") or line.get("stopped"):
        return f"{where} {' '.join(reason.split())[:160]}"
    return (
        f"{where} {line['ms']:9.4f} ms  {line['of_floor'] or 0:6.1%} of the floor"
        f"  error {line['error']:.1e}  {line['timer']}"
    )


def summary(results: Sequence[dict[str, Any]]) -> Table:
    """For every op and shape: the floor, our kernel, its best tiling, XLA, the best peer."""
    table = Table("op", "shape", "floor", "ours", "of floor", "best tiling", "xla", "best peer")
    places: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in results:
        if "ms" in line:
            places.setdefault((line["op"], line["shape"]), []).append(line)
    for (op, shape), lines in places.items():
        own = [x for x in lines if x["impl"] == "ours"]
        tilings = [x for x in lines if x["impl"].startswith("ours")]
        xla = [x for x in lines if x["impl"] == "xla"]
        others = [x for x in lines if x not in tilings and x not in xla]
        share = f"{own[0]['of_floor']:.0%}" if own and own[0]["of_floor"] else ""
        table.add_row(
            op,
            shape,
            f"{lines[0]['floor_ms']:.4f}",
            _best(own, False),
            share,
            _best(tilings),
            _best(xla, False),
            _best(others),
        )
    return table


def _best(lines: Sequence[dict[str, Any]], named: bool = True) -> str:
    if not lines:
        return ""
    best = min(lines, key=lambda line: line["ms"])
    return f"{best['ms']:.4f}" + (f" {best['impl']}" if named else "")


def main(args: Args, command: str = "") -> int:
    """Time everything asked for; 1 if a run failed or was not reached, else 0.

    `command` goes into the lines of `args.out`.
    """
    if args.page is not None:
        args.page.with_suffix(".md").write_text(page(read(args.page), str(args.page)))
        return 0
    deadline = time.monotonic() + args.seconds
    results: list[dict[str, Any]] = []
    left_out: list[str] = []
    for number, op in enumerate(args.ops):
        left = deadline - time.monotonic()
        if left <= 0:
            left_out.append(op)
            continue
        share = left / (len(args.ops) - number)
        for line in bench_op(op, args, time.monotonic() + share):
            results.append(line)
            print(described(line), flush=True)
            if args.out is not None and "impl" in line:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                with args.out.open("a") as file:
                    file.write(json.dumps(line | {"command": command}) + "\n")
    console = Console(width=180, markup=False)
    console.print(summary(results))
    left_out += [f"{x['op']} from {x.get('shape')} on" for x in results if "stopped" in x]
    failed = [x for x in results if "failed" in x and "not installed" not in x["failed"]]
    console.print(f"{len(failed)} runs failed; not run: {', '.join(left_out) or 'nothing'}")
    for line in failed:
        console.print(described(line), soft_wrap=True)
    return 1 if failed or left_out else 0


def run(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    words = sys.argv[1:] if argv is None else argv
    return main(tyro.cli(Args, args=argv), shlex.join(["scripts/bench_kernels.py", *words]))
