"""What the quality study measured: a line a model, task, length and arm, in a file to resume from.

Every line holds its instances' scores, so that whatever the page prints can be computed from the
file alone: means over tasks, Holm's adjustment over arms, another reference.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float64

from dasc_jax.evals.ruler import TASKS

Mode = Literal["cold", "dense", "nr", "wr"]
Selector = Literal["dasc", "random"]


class ArmKey(NamedTuple):
    """An arm as lines name it. Policy "cold" reuses nothing; `w_max` 0 keeps every unit."""

    policy: Mode
    w_max: int = 0
    quantization: str | None = None
    selector: Selector = "dasc"
    seed: int | None = None


COLD, EXACT = ArmKey("cold"), ArmKey("dense")


class Run(NamedTuple):
    """What produced a line: device and versions in words, date, command."""

    device: str
    date: str
    command: str


@dataclass(frozen=True)
class Cell:
    """One task at one length under one arm, over `n` instances of `rounds` equal passes.

    `scores` are the instances' means over the rounds, `low` and `high` the 95 % interval of their
    mean. `difference` is paired with the dense arm; `p` is the centred bootstrap's, `p_sign` the
    sign-flip test's, `p_holm` is `p` adjusted over the tasks that were measured together.
    `token_hit` is Eq. 9's, `loaded` the part of requests that resumed from a checkpoint,
    `replayed` the tokens that wr recomputed a loaded request. `strict` says whether appendix C.3
    lets the line count, `faults` why not. `compression` is that of a complete checkpoint,
    `temporal_compression` without convolution windows, both from the bytes of allocated pools. What
    does not apply is None: for cold runs everything of caches, for dense its own difference.
    """

    model: str
    weights: str
    family: Literal["kda", "gdn"]
    dtype: str
    task: str
    length: int
    policy: Mode
    w_max: int
    quantization: str | None
    selector: Selector
    seed: int | None
    generator_seed: int
    n: int
    rounds: int
    score: float
    low: float | None
    high: float | None
    difference: float | None
    difference_low: float | None
    difference_high: float | None
    p: float | None
    p_sign: float | None
    p_holm: float | None
    token_hit: float
    loaded: float
    replayed: float
    strict: bool | None
    faults: tuple[str, ...]
    compression: float | None
    temporal_compression: float | None
    slot_bytes: int | None
    dense_bytes: int | None
    scores: tuple[float, ...]
    device: str
    date: str
    command: str

    @property
    def arm(self) -> ArmKey:
        """The arm."""
        return ArmKey(self.policy, self.w_max, self.quantization, self.selector, self.seed)


class Note(NamedTuple):
    """A line of another kind: "table_1a", "table_1b", "drift" or "plan", with its own fields."""

    kind: str
    model: str
    values: dict[str, Any]
    run: Run | None = None


class Store:
    """The lines of a study's file; new ones are appended and flushed at once.

    A last line that a killed run left unfinished is cut off.

    Raises:
        ValueError: a line that is none of this study's, with its number.
    """

    def __init__(self, path: Path):
        self.path = path
        self.cells: list[Cell] = []
        self.notes: list[Note] = []
        for made in _read(path):
            (self.cells if isinstance(made, Cell) else self.notes).append(made)  # type: ignore[arg-type]

    def add(self, made: Iterable[Cell | Note]) -> None:
        """Append lines."""
        made = list(made)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(_line(one) for one in made))
        for one in made:
            (self.cells if isinstance(one, Cell) else self.notes).append(one)  # type: ignore[arg-type]

    def select(self, model: str, length: int, arm: ArmKey) -> dict[str, Cell]:
        """The lines of an arm by task, in RULER's order."""
        found = {c.task: c for c in self.cells
                 if (c.model, c.length, c.arm) == (model, length, arm)}  # fmt: skip
        return {task: found[task] for task in TASKS if task in found}

    def noted(self, kind: str, model: str) -> list[dict[str, Any]]:
        """The other lines of one kind and model."""
        return [note.values for note in self.notes if (note.kind, note.model) == (kind, model)]

    def require(self, model: str, length: int, rounds: int | None, **same: object) -> None:
        """Refuse to mix: all lines of a model and length were made from one setting.

        Raises:
            ValueError: a line differs in one of `same`, or in its rounds, unless it is cold or
                `rounds` is None.
        """
        for cell in self.cells:
            if (cell.model, cell.length) != (model, length):
                continue
            free = rounds is None or cell.policy == "cold"
            wanted = same if free else {**same, "rounds": rounds}
            for name, value in wanted.items():
                if getattr(cell, name) != value:
                    raise ValueError(
                        f"{self.path} has lines of {model} at {length} tokens with {name}"
                        f" {getattr(cell, name)}, now it is {value}: choose another file"
                    )


def pooled(cells: Iterable[Cell]) -> Float64[np.ndarray, "N"]:
    """The scores of all instances of several tasks, one after the other."""
    return np.array([score for cell in cells for score in cell.scores], np.float64)


def common_tasks(arms: Sequence[dict[str, Cell]]) -> list[str]:
    """The tasks that every one of these arms has, in RULER's order."""
    return [task for task in TASKS if all(task in arm for arm in arms)]


def _line(made: Cell | Note) -> str:
    if isinstance(made, Cell):
        fields = {"kind": "ruler", **asdict(made)}
    else:
        fields = {"kind": made.kind, "model": made.model, "values": made.values}
        fields |= made.run._asdict() if made.run else {}
    return json.dumps(fields, allow_nan=False) + "\n"


def _read(path: Path) -> Iterator[Cell | Note]:
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8")
    whole, _, torn = text.rpartition("\n")
    if torn:
        path.write_text(f"{whole}\n" if whole else "", encoding="utf-8")
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            yield _made(json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}:{number} is no line of a quality study: {error}") from error


def _made(fields: dict[str, Any]) -> Cell | Note:
    kind = fields.pop("kind")
    if kind != "ruler":
        run = Run(*(fields[name] for name in Run._fields)) if "device" in fields else None
        return Note(kind, fields["model"], fields["values"], run)
    for name in ("faults", "scores"):
        fields[name] = tuple(fields[name])
    return Cell(**fields)
