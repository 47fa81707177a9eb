"""The page of a file of benchmark lines: per op and shape, ours, the floor and the best peer."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]

OWN = ("ours", "xla")


def read(path: Path) -> list[Line]:
    """The lines of a file of `program`; of a run that was repeated, the last."""
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    return list({(x["op"], x["shape"], x["impl"]): x for x in lines}.values())


def page(lines: Sequence[Line], source: str) -> str:
    """Markdown: where the figures come from, then a table an op.

    A peer's figure is its fastest form at that shape. `speed` is its time over ours.
    """
    timed = [line for line in lines if "ms" in line]
    devices = sorted({f"{line['device']}, {line['date']}" for line in timed})
    commands = sorted({line["command"] for line in timed if "command" in line})
    parts = [
        "# Kernels on the GPU",
        f"Every number comes from `{source}`, whose lines these commands wrote on "
        f"{'; '.join(devices)}; `scripts/bench_kernels.py --page {source}` makes this page of it.",
        "\n".join(f"    {command}" for command in commands),
        "Medians of single calls in milliseconds of device time (CUPTI: kernels only, so a peer's "
        "launches cost it nothing), each behind a flush of the cache, peers on the same data in the"
        " same process. *floor*: bytes at 4.3 TB/s or operations at 790 TFLOP/s, whichever takes "
        "longer. *speed*: the best peer's time over ours. *error*: ours against the reference, "
        "relative root mean square. *temporaries*: what ours needs beside arguments and results.",
    ]
    for op in dict.fromkeys(line["op"] for line in timed if line["impl"] == "ours"):
        parts += [f"## {op}", _table([line for line in timed if line["op"] == op])]
    return "\n\n".join(parts) + "\n"


def _table(lines: Sequence[Line]) -> str:
    rows = ["| shape | floor | ours | of floor | error | temporaries | xla | best peer | speed |"]
    rows.append("| :-- | --: | --: | --: | --: | --: | --: | :-- | --: |")
    for shape in dict.fromkeys(line["shape"] for line in lines):
        here = [line for line in lines if line["shape"] == shape]
        ours = next((line for line in here if line["impl"] == "ours"), None)
        if ours is None:
            continue
        peers = [x for x in here if not x["impl"].startswith(OWN)]
        best = min(peers, key=lambda line: line["ms"], default=None)
        cells = [
            shape,
            f"{ours['floor_ms']:.4f}",
            f"{ours['ms']:.4f}",
            f"{ours['of_floor']:.0%}",
            f"{ours['error']:.0e}",
            _megabytes(ours.get("temporaries")),
            _ms(x for x in here if x["impl"] == "xla"),
            f"{best['ms']:.4f} {best['impl']}" if best else "",
            f"{best['ms'] / ours['ms']:.2f}x" if best else "",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _megabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e6:.1f} MB"


def _ms(lines: Iterable[Line]) -> str:
    return next((f"{line['ms']:.4f}" for line in lines), "")
