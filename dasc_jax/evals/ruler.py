"""RULER's thirteen tasks, generated offline at any length with any tokenizer.

Task definitions, prompt templates, parameters and scores are those of Hsieh et al. 2024, "RULER:
What's the Real Context Size of Your Long-Context Language Models?". What differs: the essays are
other text, words and numbers come in a part for training and a part for evaluation, a prompt fills
its length instead of stopping at a multiple of a step, and no prompt ends with a space.
"""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from importlib import resources
from pathlib import Path
from random import Random

from dasc_jax.evals.haystack import Draft, Encoder, Essays, TokenCounter
from dasc_jax.evals.pools import Pools, Split
from dasc_jax.evals.qa_substitute import InventedWorld, Question
from dasc_jax.evals.ruler_counting import build_common_words, build_frequent_words, numbered
from dasc_jax.evals.ruler_niah import NIAH, build_niah
from dasc_jax.evals.ruler_qa import DataSet, build_qa, read_hotpotqa, read_squad
from dasc_jax.evals.ruler_tracking import build_tracking

TASKS = (*NIAH, "vt", "cwe", "fwe", "qa_1", "qa_2")
"""In RULER's order."""

SHORT_NAMES = (
    "S1",
    "S2",
    "S3",
    "MK1",
    "MK2",
    "MK3",
    "MV",
    "MQ",
    "VT",
    "CWE",
    "FWE",
    "QA-S",
    "QA-H",
)
SHORT = dict(zip(TASKS, SHORT_NAMES, strict=True))
"""The DASC paper's names of the tasks."""

NEW_TOKENS = dict.fromkeys(NIAH, 128) | {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}
"""Tokens an answer may have."""

SUBSTITUTE = "substitute"


@dataclasses.dataclass(frozen=True)
class Instance:
    """One prompt and what its answer must contain."""

    task: str
    length: int
    """Tokens asked for: prompt and room for the answer."""
    index: int
    prompt: str
    """The whole text to send; it ends with the first words of the answer."""
    references: tuple[str, ...]
    max_new_tokens: int


class Generator:
    """Builds instances. Equal arguments give equal instances, in every process.

    `split` chooses the pools of words, numbers, UUIDs and names (`evals.pools`). `essays` is the
    text of the essay haystacks; by default one in the public domain that comes with the package.
    Evaluation haystacks begin where the essays begin, as RULER's do; training haystacks begin at
    any sentence. `squad` and `hotpotqa` are paths of files in their published formats, for `qa_1`
    and `qa_2`; without them the questions are about invented people and towns (`qa_source`).
    """

    def __init__(
        self,
        tokenizer: Encoder,
        *,
        split: Split = "eval",
        seed: int = 0,
        essays: str | None = None,
        hotpotqa: str | Path | None = None,
        squad: str | Path | None = None,
    ):
        self.split: Split = split
        self.seed = seed
        self._pools = Pools(split)
        self._counter = TokenCounter(tokenizer)
        self._essay_text = essays
        self._readers = {"qa_1": (read_squad, squad), "qa_2": (read_hotpotqa, hotpotqa)}
        self._data: dict[str, DataSet] = {}

    @property
    def qa_source(self) -> dict[str, str]:
        """Where the questions of `qa_1` and `qa_2` come from: "substitute", or a path."""
        return {task: str(path or SUBSTITUTE) for task, (_, path) in self._readers.items()}

    def instance(
        self, task: str, length: int, index: int, *, depth: float | None = None
    ) -> Instance:
        """The instance with a number, at most `length` tokens long together with its answer.

        `depth` in [0, 1] places the needle in the haystack, for the tasks that ask for one needle;
        instances that differ only in depth have the same needle. The prompt leaves less than a
        tenth of `length` unused, or less than one filler sentence or document of its task takes.
        Raises ValueError for a task that does not fit into `length`, with the numbers.
        """
        if task not in SHORT:
            raise ValueError(f"unknown task {task!r}; there are {', '.join(TASKS)}")
        if depth is not None and task not in NIAH:
            raise ValueError(f"{task} has no needle to place at depth {depth}")
        limit = length - NEW_TOKENS[task]
        rng = Random(f"{self.seed}/{self.split}/{task}/{length}/{index}")
        draft = Draft(rng, self._pools, self._counter, length, limit)
        try:
            prompt, references = self._build(task, draft, index, depth)
        except ValueError as error:
            raise ValueError(f"{task} at {length} tokens: {error}") from error
        return Instance(task, length, index, prompt, references, NEW_TOKENS[task])

    def _build(
        self, task: str, draft: Draft, index: int, depth: float | None
    ) -> tuple[str, tuple[str, ...]]:
        if task in NIAH:
            start = 0
            if NIAH[task].haystack == "essay" and self.split == "train":
                start = self._essays.random_start(draft.rng)
            return build_niah(NIAH[task], draft, self._essays, start, depth)
        if task in self._readers:
            return build_qa(draft, self._question(task, draft, index))
        counting = {"cwe": build_common_words, "fwe": build_frequent_words}
        return (counting | {"vt": build_tracking})[task](draft)

    @cached_property
    def _essays(self) -> Essays:
        if self._essay_text is not None:
            return Essays(self._essay_text)
        file = resources.files("dasc_jax.evals").joinpath("data", "essays.txt")
        return Essays(file.read_text(encoding="utf-8"))

    def _question(self, task: str, draft: Draft, index: int) -> Question:
        read, path = self._readers[task]
        if path is None:
            world = InventedWorld(self._pools, draft.rng)
            return world.single_hop() if task == "qa_1" else world.two_hops()
        if task not in self._data:
            self._data[task] = read(path).of(self.split)
        return self._data[task].question(index, draft.rng)


def score(task: Instance | str, references: Sequence[str], text: str) -> float:
    """Part of the references that the text contains, in [0, 1], whatever their case.

    For `qa_1` and `qa_2`: 1 if it contains any of them. `task` is an instance or a task's name.
    """
    name = task.task if isinstance(task, Instance) else task
    found = [reference.lower() in text.lower() for reference in references]
    return float(any(found)) if name in ("qa_1", "qa_2") else sum(found) / len(found)


def expected_answer(instance: Instance) -> str:
    """A right continuation of the prompt, in the form its worked example has, if it has one."""
    if instance.task == "cwe":
        return f" {numbered(instance.references)}"
    if instance.task in ("qa_1", "qa_2"):
        return f" {instance.references[0]}"
    return f" {(' ' if instance.task == 'vt' else ', ').join(instance.references)}"


def write_jsonl(path: str | Path, instances: Iterable[Instance]) -> None:
    """Writes one instance a line."""
    with Path(path).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(dataclasses.asdict(one)) + "\n" for one in instances)


def read_jsonl(path: str | Path) -> list[Instance]:
    """Reads what `write_jsonl` wrote."""
    with Path(path).open(encoding="utf-8") as file:
        fields = [json.loads(line) for line in file]
    return [Instance(**{**one, "references": tuple(one["references"])}) for one in fields]
