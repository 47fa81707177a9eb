"""Long documents and questions about them with known answers: the workload of the demo.

Both kinds of document come from RULER's generators with the evaluation's words and names, so that
a trained mini knows the form and has never seen the facts.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dasc_jax.evals.haystack import Encoder, TokenCounter
from dasc_jax.evals.qa_substitute import PERSON, TOWN, Relation
from dasc_jax.evals.ruler import NEW_TOKENS, Generator
from dasc_jax.types import PAGE

NEEDLE = re.compile(r"One of the special magic numbers for (\S+) is: (\d+)\.")
ANSWER_BEGINS = "\nWhat is the special magic number"

INSIDE_A_NUMBER = range(4, 7)
"""Tokens from the last boundary to a document's end that put the boundary inside its last number:
seven digits and a full stop, a token each."""

FACTS = 4
"""Questions about a document of facts; a document of needles has as many."""


@dataclass(frozen=True)
class Question:
    """`prompt` is the document with the question behind it, `tokens` its length; `short` stands
    for the question in a table."""

    short: str
    prompt: str
    tokens: int
    answer: str


@dataclass(frozen=True)
class Document:
    """`text` is what the prompts of all its questions begin with."""

    text: str
    questions: tuple[Question, ...]


def make_documents(
    tokenizer: Encoder, needles: int, facts: int, length: int, seed: int = 0
) -> tuple[Document, ...]:
    """So many documents of each kind, each of about `length` tokens with a question behind it.

    Raises:
        ValueError: no document, or a length in which none fits.
    """
    if needles < 0 or facts < 0 or not needles + facts:
        raise ValueError(f"{needles} documents of needles and {facts} of facts: none to ask about")
    generator, counter = Generator(tokenizer, seed=seed), TokenCounter(tokenizer)
    return (
        *(needle_document(generator, counter, length, index) for index in range(needles)),
        *(fact_document(generator, counter, length, index) for index in range(facts)),
    )


def needle_document(
    generator: Generator, counter: TokenCounter, length: int, index: int
) -> Document:
    """Four numbers hidden in an essay. The last page boundary, where the state is checkpointed,
    lies within the last of them: the half before it is known to the state and the KV alone.

    Raises:
        ValueError: none of the lengths up to 8 pages more puts the boundary there.
    """
    for tokens in range(length, length + 8 * PAGE):
        prompt = _prompt(generator, "niah_multikey_1", tokens, index, depth=1.0)
        text, begins, asking = prompt.rpartition(ANSWER_BEGINS)
        if counter(text) % PAGE in INSIDE_A_NUMBER:
            break
    else:
        raise ValueError(f"no essay of about {length} tokens ends just behind a page")
    pairs = NEEDLE.findall(text)
    asked = pairs[-1][0]
    asks = [
        (f"number for {key}", text + begins + asking.replace(asked, key), value)
        for key, value in pairs
    ]
    return Document(text, tuple(Question(s, p, counter(p), answer) for s, p, answer in asks))


def fact_document(generator: Generator, counter: TokenCounter, length: int, index: int) -> Document:
    """Many short documents about invented people and towns, and four of their facts, far apart.

    Raises:
        ValueError: a length that holds no fact.
    """
    prompt = _prompt(generator, "qa_1", length, index)
    head, begins, _ = prompt.rpartition("Question:")
    told = _told(head)
    text = head + begins
    chosen = [told[step * (len(told) - 1) // (FACTS - 1)] for step in range(FACTS)]
    asks = [(asked, f"{text} {asked} Answer:", value) for asked, value in chosen]
    return Document(text, tuple(Question(s, p, counter(p), answer) for s, p, answer in asks))


def _prompt(generator: Generator, task: str, tokens: int, index: int, **options: float) -> str:
    return generator.instance(task, tokens + NEW_TOKENS[task], index, **options).prompt


def _told(text: str) -> Sequence[tuple[str, str]]:
    """(question, answer) for every fact of a text, in its order."""
    found: list[tuple[int, str, str]] = []
    for relation in (*PERSON, *TOWN):
        for match in _pattern(relation).finditer(text):
            subject, value = match.groups()
            found.append((match.start(), relation.question.format(subject=subject), value))
    return [(asked, value) for _, asked, value in sorted(found)]


def _pattern(relation: Relation) -> re.Pattern[str]:
    name = r"(\w+(?: \w+)?)"
    return re.compile(relation.statement.replace(".", r"\.").format(subject=name, value=name))
