r"""What an answer is worth: letters, boxed results and short phrases against their references.

Simplified against the graders of the benchmarks' authors, nearly always towards fewer points:

- Mathematical equality compares values at a few points (`latex_math`) or else the text itself.
  MathArena has a computer algebra system, IMO-AnswerBench a language model to judge. Answers in
  words, conditions ("for some c > 0") and renamed variables count only where the text is the same.
- Token F1 compares words as they are; LoCoMo's own script takes their stems.
"""

import random
import re
import string
from collections import Counter
from collections.abc import Sequence

from dasc_jax.evals.latex_math import MathError, Value, evaluate, variables

POINTS = 3
"""Places at which two expressions with variables are compared."""
TOLERANCE = 1e-9
"""Relative difference up to which floats count as equal; fractions must be the same."""

LETTER_FORMS = (
    re.compile(r"\\boxed\{\s*(?:\\text\w*\{)?\s*\(?([A-J])\)?\s*\}"),
    re.compile(r"(?i:answer\s+is)\W{0,6}([A-J])\b"),
    re.compile(r"(?i:answer)\W{0,4}:\W{0,6}([A-J])\b"),
    re.compile(r"\(([A-J])\)"),
)
UNANSWERABLE = ("no information available", "not mentioned")
"""What LoCoMo accepts for a question about something that was never said."""


def final_part(text: str) -> str:
    """The text behind the model's thinking, where it marks that with `</think>`."""
    return text.rpartition("</think>")[2]


def choice_letter(text: str, choices: int) -> str | None:
    """The letter that an answer chooses among the first `choices` of A to J; None without one.

    Looks for a boxed letter, then "answer is X", "answer: X", "(X)"; the last of its kind counts.
    """
    allowed = "ABCDEFGHIJ"[:choices]
    for form in LETTER_FORMS:
        found = [letter for letter in form.findall(final_part(text)) if letter in allowed]
        if found:
            return found[-1]
    return None


def boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}`; None without one."""
    for match in reversed(list(re.finditer(r"\\f?boxed\s*\{", text))):
        depth, start = 1, match.end()
        for at in range(start, len(text)):
            depth += (text[at] == "{") - (text[at] == "}")
            if depth == 0:
                return text[start:at].strip()
    return None


def final_answer(text: str, integer: bool = False) -> str | None:
    """The boxed result; without one, where the answer is an `integer`, the last one in the text."""
    rest = final_part(text)
    found = boxed(rest)
    if found is None and integer:
        numbers = re.findall(
            r"(?<![\d.])-?\d+(?![\d.]*\d)", rest.replace("{,}", "").replace(",", "")
        )
        return numbers[-1] if numbers else None
    return found


def same_answer(reference: str, answer: str) -> bool:
    """Whether two mathematical answers are equal; lists and sets in any order, tuples in theirs."""
    return _same(_plain(reference), _plain(answer))


def _same(left: str, right: str) -> bool:
    left, right = _without_braces(left), _without_braces(right)
    if left.replace(" ", "") == right.replace(" ", ""):
        return True
    for separator in (",", "\\cup"):
        parts, others = _split(left, separator), _split(right, separator)
        if len(parts) > 1 or len(others) > 1:
            return _same_in_any_order(parts, others)
    if _bracketed(left) or _bracketed(right):
        return _same_tuple(left, right)
    if "=" in left or "=" in right:
        return _same(left.rpartition("=")[2].strip(), right.rpartition("=")[2].strip())
    return _same_value(left, right)


def _same_in_any_order(parts: Sequence[str], others: Sequence[str]) -> bool:
    remaining = list(others)
    for part in parts:
        match = next((other for other in remaining if _same(part, other)), None)
        if match is None:
            return False
        remaining.remove(match)
    return not remaining


def _without_braces(text: str) -> str:
    """The elements of a set that is written with braces."""
    whole = text.startswith("\\{") and text.endswith("\\}") and text.count("\\{") == 1
    return text[2:-2].strip() if whole else text


def _bracketed(text: str) -> bool:
    """Whether the text is one tuple or interval: brackets around more than one part."""
    return text[:1] in tuple("([") and len(_split(text[1:-1], ",")) > 1


def _same_tuple(left: str, right: str) -> bool:
    parts, others = _split(left[1:-1], ","), _split(right[1:-1], ",")
    fits = left[:1] + left[-1:] == right[:1] + right[-1:] and len(parts) == len(others)
    return fits and all(_same(a, b) for a, b in zip(parts, others, strict=True))


def _same_value(left: str, right: str) -> bool:
    names = sorted(variables(left) | variables(right))
    draw = random.Random(0)
    try:
        for _ in range(POINTS if names else 1):
            point = {name: draw.uniform(1.1, 4.0) for name in names}
            if not _close(evaluate(left, point), evaluate(right, point)):
                return False
    except MathError:
        return False
    return True


def _close(left: Value, right: Value) -> bool:
    if left == right or not (isinstance(left, float) or isinstance(right, float)):
        return left == right
    try:
        return abs(float(left) - float(right)) <= TOLERANCE * max(abs(float(left)), 1e-6)
    except OverflowError:
        return False


def _split(text: str, separator: str) -> list[str]:
    """The parts between separators that stand outside all brackets."""
    parts, depth, start = [], 0, 0
    for at, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and text.startswith(separator, at) and at >= start:
            parts.append(text[start:at].strip())
            start = at + len(separator)
    return [*parts, text[start:].strip()]


def _plain(text: str) -> str:
    """An answer without what only formats it."""
    text = text.strip().rstrip(".").strip()
    text = re.sub(
        r"\$|\\[()]|\\(?:left|right|displaystyle|!|,|;|:|quad|qquad)(?![A-Za-z])|~", " ", text
    )
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = re.sub(r"\{,\}", "", text)
    text = re.sub(r"\\(?:text|mathrm|mathbf|operatorname)\s*\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degree|°|\\?%", "", text)
    text = re.sub(r"\s+(?:and|or)\s+", ", ", text)
    if re.fullmatch(r"\s*-?\d{1,3}(,\d{3})+\s*", text):
        text = text.replace(",", "")
    text = re.sub(r"\s+", " ", text).strip().rstrip(".").strip()
    return text


def token_f1(reference: str, answer: str) -> float:
    """F1 of the words of two texts, as bags: lower case, without articles and punctuation."""
    expected, found = Counter(_words(reference)), Counter(_words(answer))
    common = (expected & found).total()
    if not common:
        return 0.0
    precision, recall = common / found.total(), common / expected.total()
    return 2 * precision * recall / (precision + recall)


def _words(text: str) -> list[str]:
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(?:a|an|the|and)\b", " ", text).split()


def locomo_score(reference: str, answer: str, category: int) -> float:
    """Token F1 as LoCoMo takes it, in [0, 1].

    Category 1 asks for several things: each part of the reference counts with the best part of the
    answer. Category 3 lists alternatives behind ";": the first counts. Category 5 asks for what was
    never said: right is to say so.
    """
    if category == 5:
        return float(any(phrase in answer.lower() for phrase in UNANSWERABLE))
    if category == 1:
        wanted, given = (text.split(",") for text in (reference, answer))
        return sum(max(token_f1(w, g) for g in given) for w in wanted) / len(wanted)
    return token_f1(reference.split(";")[0] if category == 3 else reference, answer)
