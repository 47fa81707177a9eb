import random
import re
import uuid

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dasc_jax.evals.pools import EVAL_ONE_IN, Pools, distinct_choices, split_of

TRAIN, EVAL = Pools("train"), Pools("eval")
DRAWS = {
    "key": (lambda pools, rng: pools.key(rng), r"[^-]+(-.+)+"),
    "number": (lambda pools, rng: pools.number(rng), r"[1-9]\d{6}"),
    "variable_value": (lambda pools, rng: pools.variable_value(rng), r"[1-9]\d{4}"),
    "uuid": (lambda pools, rng: pools.uuid(rng), r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"),
    "variable": (lambda pools, rng: pools.variable(rng, 5), r"[A-Z]{5}"),
    "example_variable": (lambda pools, rng: pools.variable(rng, 3), r"[A-Z]{3}"),
    "coded_word": (lambda pools, rng: pools.coded_word(rng), r"[a-z]{6}"),
    "name": (lambda pools, rng: rng.choice(pools.names), r"[A-Z][a-z]+"),
    "word": (lambda pools, rng: rng.choice(pools.words), r"\S.*\S|\S"),
}


@pytest.mark.parametrize("kind", sorted(DRAWS))
@settings(max_examples=5)
@given(seeds=st.tuples(st.integers(), st.integers()))
def test_what_a_split_draws_is_of_that_split_and_never_of_the_other(kind, seeds):
    draw, form = DRAWS[kind]
    trained = {draw(TRAIN, random.Random(seeds[0] + step)) for step in range(20)}
    evaluated = {draw(EVAL, random.Random(seeds[1] + step)) for step in range(20)}
    assert not {item.lower() for item in trained} & {item.lower() for item in evaluated}
    assert {split_of(item) for item in trained} == {"train"}
    assert {split_of(item) for item in evaluated} == {"eval"}
    assert all(re.fullmatch(form, item) for item in trained | evaluated)


@given(st.text())
def test_a_split_does_not_depend_on_case(text):
    assert split_of(text) == split_of(text.lower())


@pytest.mark.parametrize("kind", ["words", "names"])
def test_whole_pools_are_disjoint_and_one_in_five_is_for_evaluation(kind):
    trained, evaluated = getattr(TRAIN, kind), getattr(EVAL, kind)
    assert not set(trained) & set(evaluated)
    share = len(evaluated) / (len(trained) + len(evaluated))
    assert abs(share - 1 / EVAL_ONE_IN) < 0.02


@given(st.integers())
def test_uuids_are_of_version_4(seed):
    assert uuid.UUID(EVAL.uuid(random.Random(seed))).version == 4


def test_choices_run_through_the_pool_once():
    pool = TRAIN.words[:50]
    assert sorted(distinct_choices(pool, random.Random(1))) == sorted(pool)


def test_splits_are_those_of_earlier_releases():
    items = ("apple", "Tarvel", "1234567", "quick-fox", "ABCDE", "über", "river", "stone")
    assert [item for item in items if split_of(item) == "eval"] == ["river", "stone"]
