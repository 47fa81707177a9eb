"""RULER's aggregation tasks: common and frequent words extraction (Hsieh et al. 2024)."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from dasc_jax.evals.haystack import Draft, measured
from dasc_jax.evals.pools import distinct, distinct_choices

COMMON_WORDS = 10
FULL_LENGTH = 4096
"""Tokens from which RULER repeats words more often."""

ALPHA = 2.0
"""Exponent of the zeta distribution that frequencies of coded words follow."""

ZETA = math.pi**2 / 6
FREQUENT_WORDS = 3
LEAST_WORDS = 53
"""Coded words (dots included) from which on the third appears more often than the fourth."""

DOTS = "..."
"""The most frequent coded word: noise that does not count."""


@dataclass(frozen=True)
class Repeats:
    """How often each common and each other word of a list appears."""

    common: int
    other: int

    def listed(self, rng: Random, common: Sequence[str], others: Sequence[str]) -> str:
        """The numbered list of all words, shuffled."""
        words = [*common] * self.common + [*others] * self.other
        rng.shuffle(words)
        return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def build_common_words(draft: Draft) -> tuple[str, tuple[str, ...]]:
    """Prompt and references (the ten common words) of one instance.

    Raises ValueError where the split's pool has too few words to fill the length.
    """
    example_repeats, example_words, repeats = _setting(draft)
    example = _example(draft, example_repeats, example_words)
    count = draft.counter
    words = distinct_choices(draft.pools.words, draft.rng)
    common = list(itertools.islice(words, COMMON_WORDS))
    others, totals = measured(
        words,
        lambda word: repeats.other * (count.piece(f" {word}") + count.piece(" 1.")),
        draft.limit,
    )
    if totals[-1] <= draft.limit:
        raise ValueError(f"the {len(draft.pools.words)} words of this split cannot fill it")
    numbers = _number_costs(draft, COMMON_WORDS * repeats.common + len(others) * repeats.other)
    fixed = count(f"{example}\n{_question('')}")
    fixed += repeats.common * sum(count.piece(f" {word}") for word in common)

    def build(other: int) -> str:
        return f"{example}\n{_question(repeats.listed(draft.rng, common, others[:other]))}"

    def cost(other: int) -> int:
        words = totals[other] - other * repeats.other * count.piece(" 1.")
        return fixed + words + numbers[COMMON_WORDS * repeats.common + other * repeats.other]

    return draft.fill(build, cost, most=len(others), least=1), tuple(common)


def _setting(draft: Draft) -> tuple[Repeats, int, Repeats]:
    """Repeats and number of words of the worked example, and repeats of the task.

    RULER's from 4096 tokens on, if it fits with a tenth to spare at the tokens that this tokenizer
    takes for an average word; else RULER's for shorter contexts.
    """
    full = Repeats(10, 3), 40, Repeats(30, 3)
    entries = COMMON_WORDS * 10 + (40 - COMMON_WORDS) * 3 + (COMMON_WORDS + 1) * 30
    count = draft.counter
    sample = draft.pools.words[:: len(draft.pools.words) // 100]
    word = sum(count.piece(f" {word}") for word in sample) / len(sample)
    fits = 1.1 * entries * (word + count.piece(" 100.")) <= draft.limit
    if draft.length >= FULL_LENGTH and fits:
        return full
    return Repeats(3, 1), 20, Repeats(6, 1)


def _example(draft: Draft, repeats: Repeats, words: int) -> str:
    chosen = draft.rng.sample(draft.pools.words, words)
    common, others = chosen[:COMMON_WORDS], chosen[COMMON_WORDS:]
    return f"{_question(repeats.listed(draft.rng, common, others))} {numbered(common)}"


def numbered(words: Sequence[str]) -> str:
    """The answer as the worked example gives it."""
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def _number_costs(draft: Draft, entries: int) -> list[int]:
    """Tokens of the numbers of the first 0, 1, .. entries of a list."""
    costs = (draft.counter.piece(f" {number}.") for number in range(1, entries + 1))
    return [0, *itertools.accumulate(costs)]


def _question(context: str) -> str:
    return (
        "Below is a numbered list of words. In these words, some appear more often than others. "
        f"Memorize the ones that appear most often.\n{context}\nQuestion: What are the "
        f"{COMMON_WORDS} most common words in the above list? Answer: The top {COMMON_WORDS} words "
        "that appear most often in the list are:"
    )


def build_frequent_words(draft: Draft) -> tuple[str, tuple[str, ...]]:
    """Prompt and references (the three most frequent coded words) of one instance.

    Rank k of a text of n words appears floor(n k^-alpha / zeta(alpha)) times, the dots being rank
    1. Raises ValueError where the length is too short to tell the third word from the fourth.
    """
    rng, pools, count = draft.rng, draft.pools, draft.counter
    size = max(draft.length // 50, FREQUENT_WORDS + 2)
    draws = distinct(lambda: pools.coded_word(rng))
    vocabulary = [DOTS, *itertools.islice(draws, size - 1)]
    costs = [count.piece(f" {DOTS}"), *_coded_costs(draft, vocabulary[1:])]

    def build(words: int) -> str:
        repeated = zip(vocabulary, _frequencies(words, size), strict=True)
        text = [word for word, times in repeated for _ in range(times)]
        rng.shuffle(text)
        return _coded_question(" ".join(text))

    def cost(words: int) -> int:
        return fixed + sum(a * b for a, b in zip(costs, _frequencies(words, size), strict=True))

    fixed = count(_coded_question(""))
    prompt = draft.fill(build, cost, most=max(2 * draft.limit, LEAST_WORDS), least=LEAST_WORDS)
    return prompt, tuple(vocabulary[1 : 1 + FREQUENT_WORDS])


def _frequencies(words: int, size: int) -> list[int]:
    return [int(words * rank**-ALPHA / ZETA) for rank in range(1, size + 1)]


def _coded_costs(draft: Draft, words: list[str]) -> list[int]:
    """Tokens of each word; the rare ones count as much as the first do on average."""
    first = [draft.counter(f" {word}") - draft.counter("") for word in words[:8]]
    return first + [round(sum(first) / len(first))] * (len(words) - len(first))


def _coded_question(context: str) -> str:
    return (
        "Read the following coded text and track the frequency of each coded word. Find the three "
        f"most frequently appeared coded words. {context}\nQuestion: Do not provide any "
        "explanation. Please ignore the dots '....'. What are the three most frequently appeared "
        "words in the above coded text? Answer: According to the coded text above, the three most "
        "frequently appeared words are:"
    )
