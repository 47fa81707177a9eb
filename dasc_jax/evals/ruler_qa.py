"""RULER's question answering over many documents, from SQuAD, HotpotQA or invented facts."""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from dasc_jax.evals.haystack import Draft, measured
from dasc_jax.evals.pools import Split, split_of
from dasc_jax.evals.qa_substitute import Question

SAMPLE = 16
"""Parts of documents from which the tokens of all are estimated."""


@dataclass(frozen=True)
class Entry:
    """A question of a data set; documents are indices into the data set's."""

    text: str
    references: tuple[str, ...]
    documents: tuple[int, ...]
    related: tuple[int, ...] = ()
    """Documents that hide it best: the other paragraphs of its article. They are taken first."""


@dataclass(frozen=True)
class DataSet:
    """Documents and the questions about them."""

    documents: Sequence[str]
    entries: Sequence[Entry]

    def of(self, split: Split) -> "DataSet":
        """All documents, and the questions of one split. Raises ValueError if there are none."""
        entries = [entry for entry in self.entries if split_of(entry.text) == split]
        if not entries:
            raise ValueError(f"none of {len(self.entries)} questions is of the {split} split")
        return DataSet(self.documents, entries)

    def question(self, index: int, rng: Random) -> Question:
        """A question by number, from 0; after the last comes the first."""
        entry = self.entries[index % len(self.entries)]
        return Question(
            entry.text,
            entry.references,
            tuple(self.documents[number] for number in entry.documents),
            self._distractors(entry, rng),
        )

    def _distractors(self, entry: Entry, rng: Random) -> Iterator[tuple[str, ...]]:
        used = {*entry.documents, *entry.related}
        for number in rng.sample(entry.related, len(entry.related)):
            yield (self.documents[number],)
        while len(used) < len(self.documents):
            number = rng.randrange(len(self.documents))
            if number not in used:
                used.add(number)
                yield (self.documents[number],)


def read_squad(path: str | Path) -> DataSet:
    """A SQuAD file, version 1.1 or 2.0 (of which the unanswerable questions are left out)."""
    articles = _load(path)["data"]
    texts = [[paragraph["context"] for paragraph in a["paragraphs"]] for a in articles]
    documents = sorted({text for article in texts for text in article})
    numbers = {text: number for number, text in enumerate(documents)}
    entries = []
    for article, contexts in zip(articles, texts, strict=True):
        all_of_it = dict.fromkeys(numbers[context] for context in contexts)
        for paragraph in article["paragraphs"]:
            own = numbers[paragraph["context"]]
            related = tuple(number for number in all_of_it if number != own)
            entries += [
                Entry(asked["question"], _texts(asked["answers"]), (own,), related)
                for asked in paragraph["qas"]
                if not asked.get("is_impossible", False)
            ]
    return DataSet(documents, entries)


def read_hotpotqa(path: str | Path) -> DataSet:
    """A HotpotQA file of the distractor setting: ten paragraphs a question, two of which answer."""
    asked = _load(path)
    texts = [[f"{title}\n{''.join(parts)}" for title, parts in one["context"]] for one in asked]
    documents = sorted({text for context in texts for text in context})
    numbers = {text: number for number, text in enumerate(documents)}
    entries = [
        Entry(
            one["question"],
            (one["answer"],),
            tuple(dict.fromkeys(numbers[text] for text in context)),
        )
        for one, context in zip(asked, texts, strict=True)
    ]
    return DataSet(documents, entries)


def build_qa(draft: Draft, question: Question) -> tuple[str, tuple[str, ...]]:
    """Prompt and references of one instance: the question's documents among distractors."""
    needed = [[document] for document in question.documents]
    fixed = draft.counter(_prompt(question.text, needed))
    parts = ((n == 0, part) for document in question.distractors for n, part in enumerate(document))
    first = list(itertools.islice(parts, SAMPLE))
    rate = draft.counter.per_character(" ".join(part for _, part in first))
    header = draft.counter.piece("\n\nDocument 10:\n")
    units, totals = measured(
        itertools.chain(first, parts),
        lambda unit: round((len(unit[1]) + 1) * rate) + header * unit[0],
        2 * draft.limit,
    )

    def build(count: int) -> str:
        documents = list(needed)
        for starts, part in units[:count]:
            if starts:
                documents.append([part])
            else:
                documents[-1].append(part)
        draft.rng.shuffle(documents)
        return _prompt(question.text, documents)

    prompt = draft.fill(build, lambda count: fixed + totals[count], most=len(units))
    return prompt, question.references


def _prompt(question: str, documents: Sequence[Sequence[str]]) -> str:
    numbered = (f"Document {n}:\n{' '.join(parts)}" for n, parts in enumerate(documents, 1))
    task = (
        "Answer the question based on the given documents. Only give me the answer and do not "
        "output any other words."
    )
    return (
        f"{task}\n\nThe following are given documents.\n\n{'\n\n'.join(numbered)}\n\n{task}\n\n"
        f"Question: {question} Answer:"
    )


def _texts(answers: list[dict[str, Any]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(answer["text"] for answer in answers))


def _load(path: str | Path) -> Any:
    return json.loads(Path(path).read_text(encoding="utf-8"))
