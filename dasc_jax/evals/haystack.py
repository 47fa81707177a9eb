"""Filling a prompt with filler up to a number of tokens, with few encodes of the whole text."""

import itertools
import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from dasc_jax.evals.pools import Pools

ENCODES = 3
"""Encodes of the whole text after which any prompt that fits is taken."""

CLOSE = 0.03
"""A prompt is full when it leaves less than this part of its tokens unused."""

NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
"""One paragraph of RULER's noise haystack."""


@runtime_checkable
class Encoder(Protocol):
    """What the tasks need of a tokenizer; the result has a length."""

    def encode(self, text: str, /) -> Any: ...


class TokenCounter:
    """Counts tokens of texts, and of pieces that it remembers."""

    def __init__(self, tokenizer: Encoder):
        self._encode = tokenizer.encode
        self._added = len(self._encode(""))
        self._pieces: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        """Tokens of a whole text, with what the tokenizer adds around it."""
        return len(self._encode(text))

    def piece(self, text: str) -> int:
        """Tokens that a piece adds to a text. Remembered: for pieces of a bounded vocabulary."""
        if (count := self._pieces.get(text)) is None:
            count = self._pieces[text] = len(self._encode(text)) - self._added
        return count

    def per_character(self, text: str) -> float:
        """Tokens per character, to estimate texts of the same kind."""
        return max(len(self._encode(text)) - self._added, 1) / len(text)


@dataclass(frozen=True)
class Draft:
    """What a task builds one instance with: its randomness, its pools, and the room it has."""

    rng: random.Random
    pools: Pools
    counter: TokenCounter
    length: int
    """Tokens of prompt and answer together."""
    limit: int
    """Tokens of the prompt."""

    def fill(
        self, build: Callable[[int], str], cost: Callable[[int], int], most: int, least: int = 0
    ) -> str:
        """The longest of build(least) .. build(most), texts of growing length, within the limit.

        cost(n) estimates the tokens of build(n) and must not fall with n; its error is corrected
        by what the built text has, so that mostly one or two encodes of it are enough. Raises
        ValueError where even build(least) does not fit.
        """
        low, high, best = least, most, None
        error = round(CLOSE / 2 * self.limit)  # the first estimate aims within what counts as full
        encodes = 0
        while True:
            guess = least - 1 + bisect_right(range(least, most + 1), self.limit - error, key=cost)
            if best is not None and (guess < low or encodes >= ENCODES):
                return best
            count = min(max(guess, low), high)
            text = build(count)
            tokens = self.counter(text)
            encodes += 1
            if tokens <= self.limit:
                best, low = text, count + 1
                if self.limit - tokens < CLOSE * self.limit:
                    return best
            elif count == least:
                raise ValueError(
                    f"{tokens} tokens are the shortest prompt of this task, "
                    f"{self.limit} are left of {self.length} beside the answer"
                )
            else:
                high = count - 1
            if low > high and best is not None:
                return best
            error = tokens - cost(count)


def measured[Unit](
    units: Iterable[Unit], cost: Callable[[Unit], int], room: int
) -> tuple[list[Unit], list[int]]:
    """The first units, one more than fit into `room` tokens by cost.

    Returns the units and the cost [len(units) + 1] of the first 0, 1, .. of them.
    """
    taken: list[Unit] = []
    totals = [0]
    for unit in units:
        taken.append(unit)
        totals.append(totals[-1] + cost(unit))
        if totals[-1] > room:
            break
    return taken, totals


class Essays:
    """Running text as words, repeated endlessly, with the ends of its sentences."""

    def __init__(self, text: str):
        self.words = text.split()
        if not self.words:
            raise ValueError("the essays have no words")
        self._endings = frozenset(
            word for word in set(self.words) if word.rstrip("\"')]”’")[-1:] in (".", "!", "?")
        )
        self._starts = [0, *self.sentence_ends(self.words)[:-1]]

    def words_from(self, start: int) -> Iterator[str]:
        """The words from one on; after the last comes the first."""
        return (self.words[index % len(self.words)] for index in itertools.count(start))

    def random_start(self, rng: random.Random) -> int:
        """Where a random sentence begins."""
        return rng.choice(self._starts)

    def sentence_ends(self, words: list[str]) -> list[int]:
        """Number of words up to the end of each sentence; a last one may lack its full stop."""
        ends = [index for index, word in enumerate(words, 1) if word in self._endings]
        return ends if ends and ends[-1] == len(words) else [*ends, len(words)]
