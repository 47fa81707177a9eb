"""Numbers of the DASC paper that the quality page prints beside its own, as published there."""

import csv
from functools import lru_cache
from importlib import resources
from typing import NamedTuple

TASKS = ("S1", "S2", "S3", "MK1", "MK2", "MK3", "MQ", "MV", "CWE", "FWE", "QA-H", "QA-S", "VT")
"""Columns of its tables 2, 6 and 7."""

MODELS = {"kda": "Kimi-Linear-48B", "gdn": "Qwen3-Next-80B"}

COMPRESSION = {
    "kda": "2.63 and 28.04 (at 512), 8.11 (at 16) in int8",
    "gdn": "1.10 and 2.48 (at 512)",
}
"""Complete checkpoints, section 5.3 and table 4."""

TABLE_1A = {
    "baseline": {"gdn": 1.000, "kda": 1.000},
    "zero-full-kv": {"gdn": 0.000, "kda": 0.000},
    "zero-linear": {"gdn": 0.990, "kda": 1.000},
    "zero-both": {"gdn": 0.000, "kda": 0.000},
}

TABLE_1B = {
    "gdn": {
        "H_e": (0.801, 0.699, 0.877),
        "state": (0.632, 0.541, 0.706),
        "readout": (0.537, 0.422, 0.630),
    },
    "kda": {
        "H_e": (0.856, 0.843, 0.878),
        "state": (0.533, 0.462, 0.602),
        "readout": (0.402, 0.329, 0.477),
    },
}
"""Median and quartiles of Spearman's rho of H_s."""

TABLE_4 = {
    "AIME": (0.6073, 0.6042, 0.6219),
    "HMMT": (0.3759, 0.3864, 0.3722),
    "IMO": (0.2787, 0.2681, 0.2781),
    "GPQA": (0.6187, 0.6133, 0.6130),
    "MMLU": (0.6750, 0.6732, 0.6748),
}
"""Kimi-Linear: dense, nr at W_max 16, the same in int8."""

TABLE_5 = (
    ("AIME 2026", 16, 30, 4.06, 1.13, 7.21, 0.0784),
    ("AIME 2026", 64, 30, 2.52, -0.85, 5.96, 0.294),
    ("AIME 2026", 128, 30, 9.65, 5.69, 13.81, 0.0015),
    ("HMMT 2026 Feb", 16, 33, 4.39, 1.82, 7.23, 0.0162),
    ("HMMT 2026 Feb", 64, 33, 2.8, 0.34, 5.51, 0.2028),
    ("HMMT 2026 Feb", 128, 33, 3.64, 0.45, 6.88, 0.1813),
    ("IMOAnswerBench", 16, 400, 0.19, -1.46, 1.9, 0.831),
    ("IMOAnswerBench", 64, 400, 1.5, -0.24, 3.26, 0.294),
    ("IMOAnswerBench", 128, 400, 1.88, 0.1, 3.71, 0.221),
    ("GPQA-Diamond", 16, 198, 3.84, 2.07, 5.57, 0.0015),
    ("GPQA-Diamond", 64, 198, 1.59, -0.01, 3.18, 0.221),
    ("GPQA-Diamond", 128, 198, 3.95, 2.05, 5.85, 0.0015),
    ("MMLU-Pro", 16, 12_032, 1.82, 1.58, 2.06, 0.0015),
    ("MMLU-Pro", 64, 12_032, 1.14, 0.9, 1.39, 0.0015),
    ("MMLU-Pro", 128, 12_032, 1.5, 1.25, 1.74, 0.0015),
)
"""Kimi-Linear, nr with horizons minus the mean of five random masks: benchmark, W_max, N, points,
95 % interval, p adjusted by Holm."""


class Line(NamedTuple):
    """A line of tables 6 and 7: mean scores of 30 instances a task, in the order of `TASKS`."""

    family: str
    policy: str
    w_max: int
    length: str
    scores: tuple[float, ...]
    average: float


@lru_cache
def ruler() -> tuple[Line, ...]:
    """Tables 6 (KDA) and 7 (GDN): 4k, 8k and 16k tokens; replay only."""
    file = resources.files("dasc_jax.evals") / "data" / "dasc_ruler.csv"
    rows = csv.DictReader(file.read_text(encoding="utf-8").splitlines())
    return tuple(
        Line(row["family"], row["policy"], int(row["w_max"]), row["length"],
             tuple(float(row[task]) for task in TASKS), float(row["Avg"]))
        for row in rows
    )  # fmt: skip


def line(family: str, policy: str, w_max: int, length: str = "4k") -> Line | None:
    """One of these lines, None where the paper has none."""
    wanted = (family, policy, w_max, length)
    return next((one for one in ruler() if one[:4] == wanted), None)


def largest_fall(family: str) -> str:
    """The least average of nr minus that of dense at its length, with W_max and length."""
    falls = [(round(nr.average - dense.average, 2), nr) for nr, dense in _with_dense(family)]
    least, nr = min(falls, key=lambda pair: pair[0])
    return f"{least:+.2f} ({nr.w_max}, {nr.length})"


def recovered(family: str, loss: float, part: float) -> str:
    """Of the tasks where nr loses more than `loss`, in how many wr wins back `part` or more.

    From the printed scores, which have two digits.
    """
    parts = []
    for nr, dense in _with_dense(family):
        wr = line(family, "wr", nr.w_max, nr.length)
        for full, less, again in zip(dense.scores, nr.scores, wr.scores if wr else (), strict=True):
            if round(full - less, 2) > loss:
                parts.append((again - less) / (full - less))
    return f"{sum(one >= part for one in parts)} of {len(parts)}"


def _with_dense(family: str) -> list[tuple[Line, Line]]:
    """The lines of nr, each with that of dense at its length."""
    dense = {one.length: one for one in ruler() if (one.family, one.policy) == (family, "dense")}
    found = [one for one in ruler() if (one.family, one.policy) == (family, "nr")]
    return [(one, dense[one.length]) for one in found]
