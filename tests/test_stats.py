"""Intervals, p-values and adjustments against scipy, against the paper, and where data are few."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as reference

from dasc_jax.evals.stats import against_random, holm, mean_interval, paired_difference

PAPER = {
    0.0098: 0.0784,
    0.1453: 0.2940,
    0.0018: 0.0162,
    0.0338: 0.2028,
    0.0259: 0.1813,
    0.8310: 0.8310,
    0.0980: 0.2940,
    0.0442: 0.2210,
    0.0511: 0.2210,
}
"""Table 5 of the DASC paper, p and adjusted p; the other six comparisons are at p = 0.0001."""


def scores(n: int, seed: int = 0, shift: float = 0.0) -> np.ndarray:
    """Recalls in quarters, as a task with four references gives them."""
    return np.random.default_rng(seed).integers(0, 5, n) / 4 + shift


@pytest.mark.parametrize("n", [5, 30, 200])
def test_an_interval_is_the_percentile_bootstrap_of_scipy(n):
    values = scores(n, seed=n)
    found = mean_interval(values)
    theirs = reference.bootstrap(
        (values,), np.mean, n_resamples=10_000, method="percentile", rng=np.random.default_rng(1)
    )
    assert found.mean == pytest.approx(values.mean()) and found.n == n
    # Two bootstraps of 10,000 resamples agree to a few percent of a standard error.
    near = {"abs": 0.12 * values.std() / np.sqrt(n)}
    assert found.low == pytest.approx(theirs.confidence_interval.low, **near)
    assert found.high == pytest.approx(theirs.confidence_interval.high, **near)


@pytest.mark.parametrize("n", [8, 12, 40])
def test_the_sign_flip_p_is_the_paired_permutation_test_of_scipy(n):
    arm, base = scores(n, 1, 0.1), scores(n, 2)
    theirs = reference.permutation_test(
        (arm - base,),
        np.mean,
        permutation_type="samples",
        n_resamples=10_000,
        rng=np.random.default_rng(1),
    )
    exact = n < 14
    found = paired_difference(arm, base).p_sign
    assert found == pytest.approx(theirs.pvalue, abs=1e-12 if exact else 0.02)


@pytest.mark.parametrize("shift", [0.0, 0.05, 0.1, 0.3])
def test_the_centred_bootstrap_p_is_near_the_t_test_of_many_instances(shift):
    rng = np.random.default_rng(3)
    base = rng.normal(size=400)
    arm = base + rng.normal(shift, 1.0, 400)
    theirs = reference.ttest_rel(arm, base).pvalue
    assert paired_difference(arm, base).p == pytest.approx(theirs, abs=0.02)


def test_a_difference_belongs_to_instances_and_not_to_their_order():
    arm, base = scores(30, 1), scores(30, 2)
    order = np.random.default_rng(0).permutation(30)
    found, shuffled = paired_difference(arm, base), paired_difference(arm[order], base[order])
    assert shuffled.mean == pytest.approx(found.mean)
    assert shuffled.p == pytest.approx(found.p, abs=0.02)
    swapped = paired_difference(base, arm)
    assert (swapped.mean, swapped.low, swapped.high) == pytest.approx(
        (-found.mean, -found.high, -found.low)
    )
    assert (swapped.p, swapped.p_sign) == (found.p, found.p_sign)


def test_the_same_seed_gives_the_same_numbers():
    arm, base = scores(30, 1), scores(30, 2)
    assert paired_difference(arm, base, seed=5) == paired_difference(arm, base, seed=5)
    assert paired_difference(arm, base, seed=5) != paired_difference(arm, base, seed=6)


def test_five_masks_are_averaged_instance_by_instance_first():
    arm, masks = scores(30, 9, 0.2), [scores(30, seed) for seed in range(5)]
    assert against_random(arm, masks) == paired_difference(arm, np.mean(masks, axis=0))
    assert against_random(arm, masks, seed=3, resamples=100).n == 30
    with pytest.raises(ValueError, match="no random mask"):
        against_random(arm, [])
    with pytest.raises(ValueError, match=r"\[29, 30\] instances"):
        against_random(arm, [masks[0], masks[1][:29]])


def test_many_instances_are_resampled_in_blocks():
    values = scores(3000)
    found = mean_interval(values, resamples=1000)
    half = 1.96 * values.std() / np.sqrt(3000)
    assert found.high - found.low == pytest.approx(2 * half, rel=0.1)


def test_arms_that_never_differ_differ_by_nothing_for_sure():
    found = paired_difference(scores(30), scores(30))
    assert found == (0.0, 0.0, 0.0, 1.0, 1.0, 30)


def test_a_difference_that_is_the_same_everywhere_is_as_small_a_p_as_there_is():
    base = scores(12)
    found = paired_difference(base + 0.25, base)
    assert (found.mean, found.low, found.high) == pytest.approx((0.25, 0.25, 0.25))
    assert found.p == pytest.approx(1 / 10_001)
    assert found.p_sign == 2 / 2**12


def test_one_instance_gives_a_mean_and_no_inference():
    found = paired_difference(np.array([1.0]), np.array([0.25]))
    assert (found.mean, found.p, found.p_sign, found.n) == (0.75, 1.0, 1.0, 1)
    assert np.isnan([found.low, found.high]).all()
    assert np.isnan(mean_interval(np.array([0.5]))[1:3]).all()


def test_one_changed_instance_of_thirty_is_no_evidence():
    base = np.ones(30)
    arm = base.copy()
    arm[7] = 0.0
    assert paired_difference(arm, base).p_sign == 1.0
    assert paired_difference(arm, base).p > 0.3


@pytest.mark.parametrize("bad", [np.array([]), np.array([0.5, np.nan]), np.ones((2, 2))])
def test_scores_that_cannot_be_averaged_are_refused(bad):
    with pytest.raises((ValueError, TypeError)):
        mean_interval(bad)


def test_scores_that_cannot_be_paired_are_refused():
    with pytest.raises(ValueError, match="29 scores cannot be paired with 30"):
        paired_difference(scores(29), scores(30))


def test_holm_gives_the_adjusted_values_of_the_paper():
    """From rounded p, so to one unit of the last digit times the factor."""
    p = [*PAPER, *[1e-4] * 6]
    found = holm(p)
    np.testing.assert_allclose(found[:9], list(PAPER.values()), atol=15 * 5e-5)
    np.testing.assert_allclose(found[9:], 0.0015)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_holm_is_the_closure_of_bonferroni(p):
    """A hypothesis is rejected iff every intersection that contains it is, by Bonferroni."""

    def worst(at):
        sets = (s for k in range(1, len(p) + 1) for s in combinations(range(len(p)), k) if at in s)
        return max(min(len(s) * min(p[i] for i in s), 1.0) for s in sets)

    np.testing.assert_allclose(holm(p), [worst(at) for at in range(len(p))])


def test_holm_of_nothing_is_nothing_and_of_no_probability_is_refused():
    assert holm([]).shape == (0,)
    for bad in ([0.5, np.nan], [1.5], [-0.1]):
        with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
            holm(bad)
