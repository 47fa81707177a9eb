"""RULER's eight needle-in-a-haystack tasks (Hsieh et al. 2024, section 3.1)."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from dasc_jax.evals.haystack import NOISE, Draft, Essays, measured
from dasc_jax.evals.pools import distinct

Kind = Literal["words", "numbers", "uuids"]

DEPTHS = tuple(round(100 * step / 39) / 100 for step in range(40))
"""Forty depths, as parts of the haystack, from which needles in essays draw theirs."""

SAMPLE = 8
"""Needles from which the tokens of all are estimated."""


@dataclass(frozen=True)
class Niah:
    """The parameters of one task, as RULER's configuration has them."""

    haystack: Literal["noise", "essay", "needles"]
    key: Kind = "words"
    value: Kind = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


NIAH = {
    "niah_single_1": Niah("noise"),
    "niah_single_2": Niah("essay"),
    "niah_single_3": Niah("essay", value="uuids"),
    "niah_multikey_1": Niah("essay", keys=4),
    "niah_multikey_2": Niah("needles"),
    "niah_multikey_3": Niah("needles", key="uuids", value="uuids"),
    "niah_multivalue": Niah("essay", values=4),
    "niah_multiquery": Niah("essay", keys=4, queries=4),
}


@dataclass(frozen=True)
class Needle:
    """A sentence to hide, and the part of the haystack that comes before it."""

    depth: float
    text: str


def build_niah(
    task: Niah, draft: Draft, essays: Essays, start: int, depth: float | None
) -> tuple[str, tuple[str, ...]]:
    """Prompt and references of one instance.

    `start` is the essays' word the haystack begins with. `depth` in [0, 1] places the needle that
    is asked for. Raises ValueError for a depth where several needles are asked for.
    """
    draw_key, draw_value = (_source(draft, kind) for kind in (task.key, task.value))
    draw_keys = distinct(draw_key)
    pairs = {next(draw_keys): [draw_value() for _ in range(task.values)] for _ in range(task.keys)}
    asked = draft.rng.sample(list(pairs), task.queries)
    needles = _place(task, draft, pairs, asked, depth)
    frame = partial(_prompt, task, asked)
    if task.haystack == "essay":
        prompt = _fill_essay(draft, essays, start, needles, frame)
    else:
        filler = (
            _noise()
            if task.haystack == "noise"
            else (f"\n{_sentence(task.value, key, draw_value())}" for key in draw_keys)
        )
        prompt = _fill_lines(task, draft, filler, needles[0], frame)
    return prompt, tuple(value for key in asked for value in pairs[key])


def _source(draft: Draft, kind: Kind) -> Callable[[], str]:
    pools = draft.pools
    draw = {"words": pools.key, "numbers": pools.number, "uuids": pools.uuid}[kind]
    return partial(draw, draft.rng)


def _sentence(kind: Kind, key: str, value: str) -> str:
    return f"One of the special magic {kind} for {key} is: {value}."


def _place(
    task: Niah, draft: Draft, pairs: dict[str, list[str]], asked: list[str], depth: float | None
) -> list[Needle]:
    """The needles in the order of their depths; of equal depths, those drawn first."""
    sentences = [(key, _sentence(task.value, key, v)) for key in pairs for v in pairs[key]]
    if task.haystack == "essay":
        depths = draft.rng.sample(DEPTHS, len(sentences))
    else:
        depths = [draft.rng.random()]
    if depth is not None:
        if task.queries * task.values > 1:
            raise ValueError("a depth can be chosen only where one needle is asked for")
        if not 0 <= depth <= 1:
            raise ValueError(f"depth must be in [0, 1], got {depth}")
        depths = [
            depth if key == asked[0] else drawn
            for drawn, (key, _) in zip(depths, sentences, strict=True)
        ]
    needles = [Needle(at, text) for at, (_, text) in zip(depths, sentences, strict=True)]
    return sorted(needles, key=lambda needle: needle.depth)


def _prompt(task: Niah, asked: list[str], context: str) -> str:
    kind = task.value
    query = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
    if task.queries * task.values == 1:
        some, all_are, verb, kind = "A", "is", "is", kind.removesuffix("s")
    else:
        some, all_are, verb = "Some", "are all", "are"
    return (
        f"{some} special magic {kind} {verb} hidden within the following text. Make sure to "
        f"memorize it. I will quiz you about the {kind} afterwards.\n{context}\n"
        f"What {all_are} the special magic {kind} for {query} mentioned in the provided text? "
        f"The special magic {kind} for {query} mentioned in the provided text {verb}"
    )


def _fill_essay(
    draft: Draft,
    essays: Essays,
    start: int,
    needles: list[Needle],
    frame: Callable[[str], str],
) -> str:
    words, totals = measured(
        essays.words_from(start), lambda word: draft.counter.piece(f" {word}"), draft.limit
    )

    def build(count: int) -> str:
        haystack = words[:count]
        ends = [0, *essays.sentence_ends(haystack)]
        parts: list[str] = []
        done = 0
        for needle in needles:
            end = ends[int((len(ends) - 1) * needle.depth)]
            parts += (*haystack[done:end], needle.text)
            done = end
        return frame(" ".join((*parts, *haystack[done:])))

    fixed = draft.counter(build(1)) - totals[1]
    return draft.fill(build, lambda count: fixed + totals[count], most=len(words), least=1)


def _noise() -> Iterator[str]:
    """Sentences of noise with what separates them from the one before."""
    while True:
        for index, sentence in enumerate(NOISE):
            yield f"{' ' if index else '\n'}{sentence}"


def _fill_lines(
    task: Niah, draft: Draft, filler: Iterator[str], needle: Needle, frame: Callable[[str], str]
) -> str:
    """A haystack of lines: the needle is one more of them."""
    if task.haystack == "noise":
        per_line, cost = len(NOISE), draft.counter.piece
    else:
        first = list(itertools.islice(filler, SAMPLE))
        rate = draft.counter.per_character("".join(first))
        filler = itertools.chain(first, filler)
        per_line, cost = 1, lambda line: round(len(line) * rate)
    units, totals = measured(filler, cost, draft.limit)

    def build(count: int) -> str:
        place = int(math.ceil(count / per_line) * needle.depth) * per_line
        lines = (*units[: min(place, count)], f"\n{needle.text}", *units[min(place, count) : count])
        return frame("".join(lines)[1:])

    fixed = draft.counter(build(1)) - totals[1]
    return draft.fill(build, lambda count: fixed + totals[count], most=len(units), least=1)
