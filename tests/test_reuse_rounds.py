"""Which rounds may count, and what arms are."""

from dataclasses import replace

import numpy as np
import pytest

from dasc_jax.config import ConfigError, DascConfig
from dasc_jax.evals.arms import DENSE, Arm, random_arms
from dasc_jax.evals.rounds import Answer, Replay, Round, SlotBytes, common_loaded
from dasc_jax.plan import RANDOM_SEEDS

HIT = Answer((1, 2), "stop", "hit", 100, 90, 0)
MISS = Answer((1, 2), "length", "state_evicted", 100, 0, 0)
SLOT = SlotBytes(40, 10, 50)


def rounds_of(*answers: Answer) -> Round:
    return Round(answers, 0, 0)


def replay(*rounds: Round) -> Replay:
    return Replay(DENSE, rounds, SLOT, SlotBytes(400, 0, 50))


def test_a_clean_round_has_no_fault():
    assert rounds_of(*[HIT] * 20).faults == ()


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        (Round((HIT,), 1, 0), "1 pages evicted"),
        (Round((HIT,), 0, 2), "2 checkpoints evicted"),
        (rounds_of(HIT._replace(cached_tokens=70)), "token hit 0.700, not above 0.7"),
        (rounds_of(*[HIT] * 18, MISS), "0.947 of requests loaded, below 0.95"),
        (rounds_of(HIT, HIT._replace(finish="error")), "1 requests ended with ['error']"),
    ],
)
def test_each_rule_of_a_strict_round_is_told_when_it_breaks(broken, fault):
    assert broken.faults == (fault,)
    found = replay(rounds_of(HIT), broken)
    assert not found.strict and found.faults[0] == f"round 2: {fault}"


def test_a_round_with_a_twentieth_missing_passes_and_an_arm_does_not():
    found = replay(rounds_of(*[HIT] * 19, MISS))
    assert found.rounds[0].faults == ()
    assert found.faults == ("0.950 of all requests loaded, below 0.99",)
    many = replay(*[rounds_of(*[HIT] * 50)] * 2, rounds_of(*[HIT] * 49, MISS))
    assert many.strict and many.loaded == 149 / 150


def test_token_hits_pool_tokens_and_not_ratios():
    long = HIT._replace(prompt_tokens=1000, cached_tokens=960)
    found = replay(rounds_of(HIT, HIT), rounds_of(long, MISS))
    assert found.token_hit == (90 + 90 + 960) / (100 + 100 + 1000 + 100)


def test_a_request_without_a_checkpoint_is_not_loaded_whatever_its_reason():
    assert not HIT._replace(cached_tokens=0).loaded
    assert not HIT._replace(reason="lineage").loaded


def test_compression_is_of_bytes_that_are_there():
    found = replay(rounds_of(HIT))
    assert (found.compression, found.temporal_compression) == (4.5, 8.0)
    nothing = replace(found, slot=SlotBytes(0, 0, 50))
    assert (nothing.compression, nothing.temporal_compression) == (9.0, float("inf"))


def test_rounds_are_averaged_within_an_instance():
    other = HIT._replace(tokens=(5,))
    found = replay(rounds_of(HIT, HIT), rounds_of(HIT, other), rounds_of(other, other))
    right = [(1, 2), (5,)]
    scores = found.instance_scores(lambda place, tokens: float(tokens == right[place]))
    np.testing.assert_allclose(scores, [2 / 3, 2 / 3])


def test_common_pairs_are_those_that_every_arm_loaded():
    one = replay(rounds_of(HIT, HIT, MISS), rounds_of(HIT, HIT, HIT))
    two = replay(rounds_of(MISS, HIT, HIT), rounds_of(HIT, HIT, HIT))
    assert common_loaded([one]) == 5 / 6 and common_loaded([one, two]) == 4 / 6
    with pytest.raises(ValueError):
        common_loaded([one, replay(rounds_of(HIT))])
    with pytest.raises(ValueError, match="no replays"):
        common_loaded([])


def test_random_arms_keep_as_many_units_of_every_layer_and_other_ones():
    horizons = [np.random.default_rng(n).uniform(1, 100, (4, 8)) for n in range(3)]
    dasc = DascConfig(w_max=32, policy="wr")
    chosen = Arm(dasc).plan(horizons)
    arms = random_arms(dasc)
    assert [arm.seed for arm in arms] == list(RANDOM_SEEDS)
    plans = [arm.plan(horizons) for arm in arms]
    assert {plan.counts for plan in plans} == {chosen.counts}
    assert len({plan.id for plan in (*plans, chosen)}) == 6
    assert DENSE.plan(horizons).exact


def test_arms_are_named_for_tables():
    int8 = DascConfig(w_max=16, policy="wr", quantization="int8")
    assert [DENSE.name, Arm(DascConfig()).name] == ["dense", "nr W16"]
    assert Arm(int8).name == "wr W16 int8"
    assert random_arms(int8, [7])[0].name == "wr W16 int8 random 7"
    assert Arm(DascConfig(policy="dense")).w_max == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"dasc": DascConfig(), "seed": 3},
        {"dasc": DascConfig(), "selector": "random"},
        {"dasc": DascConfig(w_max=0), "selector": "random", "seed": 3},
        {"dasc": DascConfig(policy="dense"), "selector": "random", "seed": 3},
        {"dasc": DascConfig(policy="dense", quantization="int8")},
    ],
)
def test_arms_that_make_no_sense_are_refused(fields):
    with pytest.raises(ConfigError):
        Arm(**fields)
