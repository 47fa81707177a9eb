"""Disjoint pools of words, numbers, UUIDs and names for training and for evaluation.

Which side an item is on is a property of the item alone, so that whatever was trained on
`split="train"` has never seen a word, number, UUID or name of `split="eval"`.
"""

import hashlib
import itertools
import random
import string
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Literal

Split = Literal["train", "eval"]

EVAL_ONE_IN = 5
"""One item in this many belongs to the evaluation."""

ONSETS = ("b", "br", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "st", "t", "tr", "v")
RIMES = ("a", "an", "ar", "el", "en", "i", "il", "in", "o", "om", "or", "os", "ul", "ur")


def split_of(item: str) -> Split:
    """The split an item belongs to, whatever its case: a stable hash, equal in every process."""
    digest = hashlib.blake2b(item.lower().encode(), digest_size=8).digest()
    return "eval" if int.from_bytes(digest) % EVAL_ONE_IN == 0 else "train"


class Pools:
    """What the tasks of one split may draw.

    Every method draws uniformly from its split's part of the kind, with the generator it is given.
    """

    def __init__(self, split: Split):
        if split not in ("train", "eval"):
            raise ValueError(f"split must be 'train' or 'eval', got {split!r}")
        self.split: Split = split

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The single English words (nouns, adjectives, verbs) of this split, sorted."""
        nouns, adjectives, verbs = _word_lists()
        return tuple(
            word for word in sorted({*nouns, *adjectives, *verbs}) if split_of(word) == self.split
        )

    @cached_property
    def _pair_parts(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        nouns, adjectives, _ = _word_lists()
        return tuple(sorted(set(adjectives))), tuple(sorted(set(nouns)))

    def key(self, rng: random.Random) -> str:
        """An adjective-noun pair; the pair as a whole is in one split, its parts may be in both."""
        adjectives, nouns = self._pair_parts
        return self._draw(lambda: f"{rng.choice(adjectives)}-{rng.choice(nouns)}")

    def number(self, rng: random.Random) -> str:
        """Seven digits."""
        return self._draw(lambda: str(rng.randrange(10**6, 10**7)))

    def variable_value(self, rng: random.Random) -> str:
        """Five digits."""
        return self._draw(lambda: str(rng.randrange(10**4, 10**5)))

    def uuid(self, rng: random.Random) -> str:
        """A version 4 UUID in its usual 36 characters."""
        return self._draw(lambda: str(uuid.UUID(int=rng.getrandbits(128), version=4)))

    def variable(self, rng: random.Random, letters: int) -> str:
        """A variable name of capital letters."""
        return self._draw(lambda: "".join(rng.choices(string.ascii_uppercase, k=letters)))

    def coded_word(self, rng: random.Random) -> str:
        """Six lower-case letters."""
        return self._draw(lambda: "".join(rng.choices(string.ascii_lowercase, k=6)))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The invented names (of people, places, rivers) of this split, sorted."""
        syllables = [onset + rest for onset in ONSETS for rest in RIMES]
        names = {(first + second).capitalize() for first in syllables for second in syllables}
        return tuple(name for name in sorted(names) if split_of(name) == self.split)

    def _draw(self, make: Callable[[], str]) -> str:
        while split_of(item := make()) != self.split:
            pass
        return item


def distinct(draw: Callable[[], str]) -> Iterator[str]:
    """Endless draws without repetition."""
    taken: set[str] = set()
    while True:
        item = draw()
        if item not in taken:
            taken.add(item)
            yield item


def distinct_choices(pool: Sequence[str], rng: random.Random) -> Iterator[str]:
    """The items of a pool in random order, at the cost of those that are taken."""
    return itertools.islice(distinct(lambda: rng.choice(pool)), len(pool))


def _word_lists() -> tuple[list[str], list[str], list[str]]:
    """Nouns, adjectives and verbs of `wonderwords`, the lists RULER draws from."""
    from wonderwords import Defaults, RandomWord

    source = RandomWord(nouns=Defaults.NOUNS, adjectives=Defaults.ADJECTIVES, verbs=Defaults.VERBS)
    nouns, adjectives, verbs = (
        source.filter(include_categories=[kind]) for kind in ("nouns", "adjectives", "verbs")
    )
    return nouns, adjectives, verbs
