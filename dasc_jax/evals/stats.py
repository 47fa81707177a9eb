"""The statistics of the quality tables: paired differences of instances, never of generations.

Appendix C.3 of the DASC paper. Generations of an instance are averaged first, so the instance is
the unit of inference; it is resampled with all that belongs to it. An interval is the percentile
bootstrap's, from 10,000 resamples; `p` is that of the two-sided *centred bootstrap*, as in the
paper's Table 5. Beside it stands `p_sign`, of the two-sided *sign-flip permutation* test, which
stays valid for the few and mostly zero differences of a saturated task, where a bootstrap is
optimistic.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Num

RESAMPLES = 10_000
LEVEL = 0.95

_EXACT_SIGNS = 14
"""Up to so many non-zero differences all 2^n sign patterns are gone through."""

_BLOCK = 1 << 20
"""Numbers drawn at once: bounds memory where instances are many."""

_TIE = 1e-12
"""Sums that differ by less, relatively, are equal but for rounding."""


class Estimate(NamedTuple):
    """A mean over `n` instances and its confidence interval, NaN where one instance gives none."""

    mean: float
    low: float
    high: float
    n: int


class Difference(NamedTuple):
    """A mean paired difference over `n` instances, its interval and two-sided p-values.

    `p` is from the centred bootstrap, `p_sign` from the sign-flip permutation test; both are 1 for
    a single instance, which tells nothing.
    """

    mean: float
    low: float
    high: float
    p: float
    p_sign: float
    n: int


def mean_interval(
    values: Num[np.ndarray, " N"],
    *,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """The mean of per-instance values and its percentile bootstrap interval.

    Raises:
        ValueError: no values, or one that is not finite.
    """
    values = _checked(values, "values")
    low, high = _percentiles(_resampled_means(values, resamples, seed), level, len(values))
    return Estimate(float(values.mean()), low, high, len(values))


def paired_difference(
    arm: Num[np.ndarray, " N"],
    reference: Num[np.ndarray, " M"],
    *,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Difference:
    """`arm` minus `reference`, instance by instance; M must be N.

    Raises:
        ValueError: unequal lengths, no instance, or a score that is not finite.
    """
    arm, reference = _checked(arm, "arm"), _checked(reference, "reference")
    if len(arm) != len(reference):
        raise ValueError(f"{len(arm)} scores cannot be paired with {len(reference)}")
    d = arm - reference
    means = _resampled_means(d, resamples, seed)
    low, high = _percentiles(means, level, len(d))
    return Difference(
        mean=float(d.mean()),
        low=low,
        high=high,
        p=_centred_p(d, means),
        p_sign=_sign_flip_p(d, resamples, seed),
        n=len(d),
    )


def against_random(
    arm: Num[np.ndarray, " N"],
    masks: Sequence[Num[np.ndarray, " _"]],
    *,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Difference:
    """`arm` minus the mean of the count-matched Random masks, instance by instance.

    `masks` has the scores of one arm for every mask; the inference is conditional on these masks.

    Raises:
        ValueError: as `paired_difference`, or no mask, or masks of unequal lengths.
    """
    if not len(masks):
        raise ValueError("no random mask to compare with")
    lengths = {len(mask) for mask in masks}
    if len(lengths) > 1:
        raise ValueError(f"the masks have {sorted(lengths)} instances; they must have the same")
    mean = np.mean([_checked(mask, "mask") for mask in masks], axis=0)
    return paired_difference(arm, mean, level=level, resamples=resamples, seed=seed)


def holm(p: Sequence[float] | Num[np.ndarray, " M"]) -> Float64[np.ndarray, " M"]:
    """Holm's adjustment of a family of p-values, in their order.

    Raises:
        ValueError: a value that is no probability.
    """
    values = np.asarray(p, np.float64).reshape(-1)
    if not np.all((values >= 0) & (values <= 1)):
        raise ValueError(f"p-values must lie in [0, 1]: {values.tolist()}")
    order = np.argsort(values, kind="stable")
    scaled = values[order] * np.arange(len(values), 0, -1)
    adjusted = np.empty(len(values), np.float64)
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return adjusted


def _checked(values: Num[np.ndarray, " N"], name: str) -> Float64[np.ndarray, " N"]:
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or not len(array):
        raise ValueError(f"{name} has shape {array.shape}; it must be [N] with N >= 1 instances")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} holds values that are not finite")
    return array


def _blocks(rows: int, width: int) -> Iterator[int]:
    """Row counts that sum to `rows`, each times `width` at most a block."""
    most = max(_BLOCK // width, 1)
    while rows > 0:
        yield min(rows, most)
        rows -= most


def _resampled_means(
    values: Float64[np.ndarray, " N"], resamples: int, seed: int
) -> Float64[np.ndarray, " B"]:
    rng, n = np.random.default_rng(seed), len(values)
    return np.concatenate(
        [values[rng.integers(0, n, (rows, n))].mean(axis=1) for rows in _blocks(resamples, n)]
    )


def _percentiles(means: Float64[np.ndarray, " B"], level: float, n: int) -> tuple[float, float]:
    if n < 2:
        return float("nan"), float("nan")
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _centred_p(d: Float64[np.ndarray, " N"], means: Float64[np.ndarray, " B"]) -> float:
    """How often a resampled mean is as far from the mean as that is from 0; never quite 0."""
    if len(d) < 2:
        return 1.0
    mean = d.mean()
    extreme = _at_least(means - mean, mean, np.abs(d).max())
    return float((extreme.sum() + 1) / (len(means) + 1))


def _sign_flip_p(d: Float64[np.ndarray, " N"], resamples: int, seed: int) -> float:
    """Over all sign patterns where they are few, else over random ones and the observed one."""
    moved = d[d != 0]
    if not len(moved):
        return 1.0
    size = np.abs(moved).sum()
    if len(moved) <= _EXACT_SIGNS:
        patterns = np.arange(1 << len(moved))[:, None] >> np.arange(len(moved)) & 1
        return float(_at_least((1 - 2 * patterns) @ moved, moved.sum(), size).mean())
    rng, extreme = np.random.default_rng(seed), 0
    for rows in _blocks(resamples, len(moved)):
        sums = (1 - 2 * rng.integers(0, 2, (rows, len(moved)))) @ moved
        extreme += int(_at_least(sums, moved.sum(), size).sum())
    return (extreme + 1) / (resamples + 1)


def _at_least(
    values: Float64[np.ndarray, " B"], observed: float, scale: float
) -> Bool[np.ndarray, " B"]:
    """Which values are as extreme as the observed one, ties counted whatever the rounding."""
    return np.abs(values) >= abs(observed) - _TIE * scale
