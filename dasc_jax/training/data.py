"""Training rows: natural text, dense recall, and RULER's tasks from the training pools.

A row is one document, padded on the right. Its answers carry weight; the rest of the text is
learned with a small weight, for most of it is noise or essays that cannot be guessed. Everything is
a function of (seed, step), so a resumed run sees what an unbroken one would have seen.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32
from tokenizers import Tokenizer

from dasc_jax.evals.pools import Pools
from dasc_jax.evals.ruler import TASKS, Generator, expected_answer
from dasc_jax.training.bpe import END_OF_TEXT, END_OF_TURN, START_OF_TURN

PLAIN_TEXT = "text"
RECALL = "recall"

MIXTURE = {PLAIN_TEXT: 8.0, RECALL: 24.0} | dict.fromkeys(TASKS, 5.0)
MIXTURE |= {"niah_multikey_2": 7.0, "niah_multikey_3": 8.0, "vt": 8.0, "cwe": 10.0, "fwe": 8.0}
"""Relative number of rows of each kind."""

KINDS = tuple(MIXTURE)

CHAT_ROWS = 0.2
"""Part of the rows that are asked as a chat message instead of as plain text."""


class Batch(NamedTuple):
    """Rows of one length. `answer` is the weight of each token as a target, 0 outside answers;
    `kind` the row's place in `KINDS`."""

    tokens: Int32[np.ndarray, "B T"]
    lengths: Int32[np.ndarray, "B"]
    answer: Float32[np.ndarray, "B T"]
    kind: Int32[np.ndarray, "B"]


@dataclass(frozen=True)
class Phase:
    """Until this part of all steps, row lengths are drawn from `lengths` (tokens)."""

    until: float
    lengths: tuple[int, ...]


SCHEDULE = (
    Phase(0.35, (512,)),
    Phase(0.55, (512, 1024)),
    Phase(0.70, (1024, 2048)),
    Phase(1.00, (1024, 2048, 4096, 4096)),
)
"""Short rows first: retrieval is learned once, on cheap steps, then stretched."""


def row_length(seed: int, step: int, steps: int) -> int:
    """Tokens of the rows of a step."""
    phase = next(phase for phase in SCHEDULE if step < phase.until * steps or phase.until == 1)
    return Random(f"{seed}/{step}/length").choice(phase.lengths)


@dataclass(frozen=True)
class Corpus:
    """What rows are made of: a tokenizer and the training essays."""

    tokenizer_file: str
    essays: str


class Rows:
    """Makes rows; one a process, for it remembers the pieces it has measured."""

    def __init__(self, corpus: Corpus, seed: int):
        self._tokenizer = Tokenizer.from_file(corpus.tokenizer_file)
        self._ruler = Generator(self._tokenizer, split="train", seed=seed, essays=corpus.essays)
        self._pools = Pools("train")
        self._essay_tokens = np.array(self._encode(corpus.essays), np.int32)
        self._sentences = [s for s in corpus.essays.replace("\n", " ").split(". ") if s]

    def batch(self, seed: int, step: int, rows: int, length: int) -> Batch:
        """`rows` rows of `length` tokens."""
        rng = Random(f"{seed}/{step}/rows")
        out = Batch(
            np.full((rows, length), END_OF_TEXT, np.int32),
            np.zeros(rows, np.int32),
            np.zeros((rows, length), np.float32),
            np.zeros(rows, np.int32),
        )
        for row in range(rows):
            out.kind[row], parts = self._row(rng, length)
            at = 0
            count = sum(len(ids) for ids, answer in parts if answer)
            for ids, answer in parts:
                ids = ids[: length - at]
                out.tokens[row, at : at + len(ids)] = ids
                # Long answers count more than short ones, though less than in proportion.
                out.answer[row, at : at + len(ids)] = count**-0.5 if answer else 0.0
                at += len(ids)
            out.lengths[row] = at
        return out

    def _row(self, rng: Random, length: int) -> tuple[int, list[tuple[list[int], bool]]]:
        """Kind, and token runs in order, each with whether it is an answer."""
        while True:
            kind = rng.choices(KINDS, list(MIXTURE.values()))[0]
            number = KINDS.index(kind)
            if kind == PLAIN_TEXT:
                return number, [(self._plain(rng, length), False)]
            if kind == RECALL:
                return number, self._recall(rng, length)
            asked = length if rng.random() < 0.5 else rng.randrange(length // 2, length)
            try:
                instance = self._ruler.instance(kind, asked, rng.getrandbits(48))
            except ValueError:  # the task's shortest prompt is longer than this row
                continue
            return number, self._asked(rng, instance.prompt, expected_answer(instance))

    def _asked(self, rng: Random, prompt: str, answer: str) -> list[tuple[list[int], bool]]:
        ids, reply = self._encode(prompt), self._encode(answer)
        if rng.random() >= CHAT_ROWS:
            return [(ids, False), ([*reply, END_OF_TEXT], True)]
        user, assistant = self._encode("user\n"), self._encode("assistant\n")
        ask = [START_OF_TURN, *user, *ids, END_OF_TURN, *self._encode("\n")]
        return [([*ask, START_OF_TURN, *assistant], False), ([*reply, END_OF_TURN], True)]

    def _plain(self, rng: Random, length: int) -> list[int]:
        start = rng.randrange(max(len(self._essay_tokens) - length, 1))
        return self._essay_tokens[start : start + length].tolist()

    def _recall(self, rng: Random, length: int) -> list[tuple[list[int], bool]]:
        """A list of facts among sentences, then every key asked for in another order."""
        kind, key, value = rng.choice(self._pairs(rng))
        filler = rng.choice((0.0, 0.5, 2.0))
        facts: dict[str, str] = {}
        runs: list[list[int]] = []
        room = length // 2 if filler < 1 else 3 * length // 4
        while sum(map(len, runs)) < room:
            name = key(rng)
            if name in facts:
                continue
            facts[name] = value(rng)
            text = f"One of the special magic {kind} for {name} is: {facts[name]}.\n"
            for _ in range(rng.randrange(1 + int(2 * filler))):
                text += f"{rng.choice(self._sentences)}.\n"
            runs.append(self._encode(text))
        parts = [([token for run in runs for token in run], False)]
        for name in rng.sample(list(facts), len(facts)):
            question = f"\nThe special magic {kind.removesuffix('s')} for {name} mentioned is"
            parts += [(self._encode(question), False), (self._encode(f" {facts[name]}."), True)]
        return parts

    def _pairs(
        self, rng: Random
    ) -> list[tuple[str, Callable[[Random], str], Callable[[Random], str]]]:
        p = self._pools
        words, names = p.words, p.names
        return [
            ("numbers", p.key, p.number),
            ("numbers", lambda rng: rng.choice(words), p.variable_value),
            ("words", lambda rng: rng.choice(names), lambda rng: rng.choice(words)),
            ("uuids", p.uuid, p.uuid),
            ("uuids", p.key, p.uuid),
        ]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


@cache
def _rows(corpus: Corpus, seed: int) -> Rows:
    return Rows(corpus, seed)


@dataclass(frozen=True)
class Plan:
    """Everything that decides the batches of a run."""

    corpus: Corpus
    seed: int
    steps: int
    tokens: int
    """Most tokens of a batch."""
    rows: int
    """Most rows of a batch."""

    def shape(self, step: int) -> tuple[int, int]:
        """Rows and row length of a step's batch."""
        length = row_length(self.seed, step, self.steps)
        return min(self.rows, self.tokens // length), length


def make_batch(plan: Plan, step: int) -> Batch:
    """The batch of one step."""
    return _rows(plan.corpus, plan.seed).batch(plan.seed, step, *plan.shape(step))
