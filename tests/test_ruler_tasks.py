"""What each task's text says, read back from its prompt."""

import collections
import json
import re
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dasc_jax.evals.pools import Split, split_of
from dasc_jax.evals.ruler import NEW_TOKENS, Generator
from dasc_jax.evals.ruler_niah import NIAH
from tests.small_bpe import small_bpe, small_essays

NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for (\S+(?: \S+)*?) is: (\S+)\.")
VALUE = {"numbers": r"\d{7}", "uuids": r"[0-9a-f-]{36}"}
SPLITS = st.sampled_from(["train", "eval"])
INDICES = st.integers(0, 10**6)


@cache
def generator(split: Split = "eval") -> Generator:
    return Generator(small_bpe(), split=split, essays=small_essays())


@pytest.mark.parametrize("task", NIAH)
@settings(max_examples=6)
@given(SPLITS, INDICES, st.integers(800, 2000))
def test_the_needles_asked_for_are_in_the_haystack(task, split, index, length):
    setting = NIAH[task]
    made = generator(split).instance(task, length, index)
    needles = NEEDLE.findall(made.prompt)
    keys = [key for _, key, _ in needles]
    query = re.search(r" for (.*) mentioned in the provided text\?", made.prompt)[1]
    asked = re.split(r", and |, ", query)
    assert len(asked) == setting.queries
    for key in asked:
        assert [v for _, k, v in needles if k == key] != []
    found = {value for _, key, value in needles if key in asked}
    assert found == set(made.references)
    assert len(made.references) == setting.queries * setting.values
    assert {kind for kind, _, _ in needles} == {setting.value}
    assert all(re.fullmatch(VALUE[setting.value], value) for _, _, value in needles)
    assert all(split_of(value) == split for _, _, value in needles)
    assert all(split_of(key) == split for key in keys)
    if setting.haystack == "needles":
        assert len(set(keys)) == len(keys) > 5
    else:
        assert len(set(keys)) == setting.keys
        assert len(needles) == setting.keys * setting.values
    plural = setting.queries * setting.values > 1
    assert made.prompt.startswith("Some special magic" if plural else "A special magic")
    assert made.prompt.endswith("are" if plural else "is")


@pytest.mark.parametrize("task", ["niah_single_1", "niah_single_2", "niah_multikey_1"])
@given(depth=st.floats(0, 1), index=INDICES)
@settings(max_examples=8)
def test_a_depth_places_the_needle_that_is_asked_for(task, depth, index):
    made = generator().instance(task, 2048, index, depth=depth)
    haystack = made.prompt.split("\n", 1)[1].rsplit("\n", 1)[0]
    needle = next(m for m in NEEDLE.finditer(haystack) if m[3] == made.references[0])
    # A depth counts sentences, of which essays have longer and shorter ones.
    assert abs(needle.start() / (len(haystack) - len(needle[0])) - depth) < 0.1
    elsewhere = generator().instance(task, 2048, index, depth=1 - depth)
    assert elsewhere.references == made.references


@settings(max_examples=10)
@given(SPLITS, INDICES, st.integers(600, 3000))
def test_the_chain_leads_from_the_value_to_every_variable(split, index, length):
    made = generator(split).instance("vt", length, index)
    example, task = made.prompt.split("\n\nMemorize", 1)
    value = re.search(r"assigned the value (\d{5})", task)[1]
    chain = re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?([A-Z]{5}|\d{5})", task)
    assert tuple(name for name, _ in chain) == made.references
    assert [source for _, source in chain] == [value, *made.references[:-1]]
    assert len(made.references) == 5
    assert all(split_of(item) == split for item in (*made.references, value))
    shown = re.findall(r"VAR ([A-Z]{3}) =", example)
    assert example.rstrip().endswith(f"they are: {' '.join(shown)}")
    assert all(split_of(name) == split for name in shown)


def counted(question: str) -> collections.Counter[str]:
    listed = question.split("\n")[1]
    entries = re.split(r"(?:^| )(?=\d+\. )", listed)[1:]
    numbers, words = zip(*(entry.split(". ", 1) for entry in entries), strict=True)
    assert [int(number) for number in numbers] == list(range(1, len(words) + 1))
    return collections.Counter(words)


@pytest.mark.parametrize(
    ("length", "example", "task"),
    [(2048, (3, 1), (6, 1)), (6144, (10, 3), (30, 3))],
)
@pytest.mark.parametrize("split", ["train", "eval"])
def test_common_words_appear_as_often_as_in_ruler(split, length, example, task):
    made = generator(split).instance("cwe", length, 3)
    shown, asked = (
        counted(question) for question in made.prompt.split("Below is a numbered list of words")[1:]
    )
    assert sorted(set(shown.values())) == sorted(example)
    assert sorted(set(asked.values())) == sorted(task)
    assert {word for word, times in asked.items() if times == task[0]} == set(made.references)
    assert len(made.references) == 10
    assert len(shown) == {3: 20, 10: 40}[example[0]]
    assert all(split_of(word) == split for word in {*shown, *asked})


@settings(max_examples=10)
@given(SPLITS, INDICES, st.integers(512, 3000))
def test_frequent_words_are_the_three_most_frequent_after_the_dots(split, index, length):
    made = generator(split).instance("fwe", length, index)
    text = made.prompt.split("\n")[0].split("coded words. ")[1]
    words = collections.Counter(text.split(" "))
    ranked = words.most_common(5)
    assert ranked[0][0] == "..."
    assert tuple(word for word, _ in ranked[1:4]) == made.references
    assert ranked[3][1] > ranked[4][1]
    assert all(split_of(word) == split for word in words if word != "...")
    assert abs(words["..."] / ranked[1][1] - 4) < 1


def documents(prompt: str) -> list[str]:
    body = prompt.split("given documents.\n\n")[1].split("\n\nAnswer the question")[0]
    parts = re.split(r"(?:\n\n)?Document (\d+):\n", body)[1:]
    assert [int(n) for n in parts[::2]] == list(range(1, len(parts) // 2 + 1))
    return parts[1::2]


@pytest.mark.parametrize(("task", "hops"), [("qa_1", 1), ("qa_2", 2)])
@settings(max_examples=10)
@given(split=SPLITS, index=INDICES, length=st.integers(500, 2000))
def test_invented_questions_are_answered_by_their_documents(task, hops, split, index, length):
    made = generator(split).instance(task, length, index)
    assert generator(split).qa_source == {"qa_1": "substitute", "qa_2": "substitute"}
    question = re.search(r"Question: (.*) Answer:$", made.prompt)[1]
    named = re.findall(r"[A-Z][a-z]+(?: [A-Z][a-z]+)*", question.split(" ", 1)[1])[-1]
    (start,) = (text for text in documents(made.prompt) if text.startswith(named))
    (answer,) = made.references
    if hops == 1:
        assert answer in start
    else:
        relation = "was born in" if "was born" in question else "later moved to"
        town = re.search(rf"{relation} (\w+)\.", start)[1]
        assert town not in question and answer not in question
        (end,) = (text for text in documents(made.prompt) if text.startswith(f"{town}\n"))
        assert answer in end and answer not in start
    assert all(split_of(name) == split for name in (*answer.split(), *named.split()))


SQUAD = {
    "data": [
        {
            "title": f"Article {a}",
            "paragraphs": [
                {
                    "context": f"Paragraph {p} of article {a} says that its colour is c{a}x{p}.",
                    "qas": [
                        {
                            "question": f"What is colour {p} of article {a}?",
                            "answers": [{"text": f"c{a}x{p}", "answer_start": 0}] * 2,
                            "is_impossible": False,
                        },
                        {"question": "Why?", "answers": [], "is_impossible": True},
                    ],
                }
                for p in range(6)
            ],
        }
        for a in range(20)
    ]
}
HOTPOTQA = [
    {
        "question": f"Which animal lives where {q} lives?",
        "answer": f"animal{q}",
        "context": [[f"Place {q}", [f"Here lives animal{q}.", f" And so does {q}."]]]
        + [[f"Other {q}.{n}", ["Nothing lives here."]] for n in range(9)],
    }
    for q in range(40)
]


@pytest.fixture(scope="module")
def data_sets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qa")
    (folder / "squad.json").write_text(json.dumps(SQUAD))
    (folder / "hotpotqa.json").write_text(json.dumps(HOTPOTQA))
    return {"squad": folder / "squad.json", "hotpotqa": folder / "hotpotqa.json"}


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("task", ["qa_1", "qa_2"])
def test_questions_of_data_sets_come_with_their_documents(data_sets, task, split):
    made_by = Generator(small_bpe(), split=split, **data_sets)
    assert made_by.qa_source[task] == str(data_sets["squad" if task == "qa_1" else "hotpotqa"])
    for index in range(6):
        made = made_by.instance(task, 1200, index)
        question = re.search(r"Question: (.*) Answer:$", made.prompt)[1]
        read = documents(made.prompt)
        assert split_of(question) == split
        assert len(made.references) == 1
        assert any(made.references[0] in text for text in read)
        assert len(set(read)) == len(read)
        number = re.search(r"\d+", question.split("article")[-1])[0]
        related = f"article {number} " if task == "qa_1" else f"Other {number}."
        assert sum(related in text for text in read) == {"qa_1": 6, "qa_2": 9}[task]
        assert len(small_bpe().encode(made.prompt)) + NEW_TOKENS[task] <= 1200


def test_essays_begin_at_the_start_for_evaluation_and_anywhere_for_training():
    first = small_essays()[:60]
    starts = {
        split: {
            generator(split).instance("niah_single_2", 1024, index).prompt.split("\n")[1][:60]
            for index in range(8)
        }
        for split in ("train", "eval")
    }
    assert starts["eval"] <= {first, *(s for s in starts["eval"] if s.startswith("One of"))}
    assert len(starts["train"]) > 4
