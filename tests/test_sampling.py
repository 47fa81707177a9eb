"""Sampling against numpy: which tokens may be drawn, how often, and on what a draw depends."""

import jax
import numpy as np
import pytest
from scipy import stats

from dasc_jax.engine.request import SamplingParams
from dasc_jax.engine.sampling import log_probabilities, sample, sampling_batch

VOCABULARY, DRAWS = 32, 4096
LOGITS = (2 * np.random.default_rng(0).normal(size=VOCABULARY)).astype(np.float32)

draw = jax.jit(sample)


def params(**options: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, **options})


def drawn(logits: np.ndarray, rows: list[SamplingParams], positions=None, size=None) -> np.ndarray:
    """One token a row, from a batch padded to `size`."""
    size, positions = size or len(rows), positions or [7] * len(rows)
    padded = np.zeros((size, logits.shape[-1]), np.float32)
    padded[: len(rows)] = logits
    out = draw(jax.numpy.asarray(padded), sampling_batch(rows, positions, size))
    return np.asarray(out)[: len(rows)]


def reference(logits: np.ndarray, p: SamplingParams) -> np.ndarray:
    """Probability of each token: temperature, then top-k, then the nucleus of what is left."""
    scaled = logits.astype(np.float64) / p.temperature
    order = np.argsort(-scaled)
    scaled[order[p.top_k or len(order) :]] = -np.inf
    probability = np.exp(scaled - scaled.max())
    probability /= probability.sum()
    before = np.cumsum(probability[order]) - probability[order]
    probability[order[before >= p.top_p]] = 0.0
    return probability / probability.sum()


CASES = {
    "plain": {},
    "hot": {"temperature": 3.0},
    "cold": {"temperature": 0.3},
    "top_k": {"top_k": 5},
    "top_k 1": {"top_k": 1},
    "top_k beyond the vocabulary": {"top_k": 1000},
    "top_p": {"top_p": 0.6},
    "tiny top_p": {"top_p": 1e-6},
    "all": {"temperature": 1.7, "top_k": 9, "top_p": 0.8},
}


@pytest.mark.parametrize("streams", ["seeds", "positions"])
@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_restricted_distribution(case, streams):
    """Over 4096 seeds at one position, and over 4096 positions of one seed."""
    by_seed = streams == "seeds"
    rows = [params(**CASES[case], seed=at if by_seed else 3) for at in range(DRAWS)]
    positions = [9] * DRAWS if by_seed else list(range(DRAWS))
    tokens = drawn(np.broadcast_to(LOGITS, (DRAWS, VOCABULARY)), rows, positions)
    probability = reference(LOGITS, rows[0])
    assert set(tokens) <= set(np.flatnonzero(probability))
    seen = np.bincount(tokens, minlength=VOCABULARY)
    common = probability * DRAWS >= 5
    expected = np.append(probability[common], probability[~common].sum()) * DRAWS
    observed = np.append(seen[common], seen[~common].sum())
    filled = expected > 0
    if filled.sum() > 1:
        assert stats.chisquare(observed[filled], expected[filled]).pvalue > 1e-3


def test_greedy_rows_take_the_most_likely_token_beside_any_others():
    logits = np.random.default_rng(1).normal(size=(6, VOCABULARY)).astype(np.float32)
    greedy = SamplingParams(top_k=3, top_p=0.5, seed=5)
    hot = params(temperature=50.0)
    alone = drawn(logits, [greedy] * 6)
    mixed = drawn(logits, [greedy, hot, greedy, hot, greedy, hot])
    np.testing.assert_array_equal(alone, logits.argmax(axis=1))
    np.testing.assert_array_equal(mixed[::2], alone[::2])


def test_a_draw_is_the_same_alone_and_in_any_batch_and_padding():
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(6, VOCABULARY)).astype(np.float32)
    kinds = [{}, {"top_k": 4}, {"top_p": 0.7}, {"temperature": 2.0}, {"temperature": 0.0}, {}]
    rows = [params(**kind, seed=int(rng.integers(2**63))) for kind in kinds]
    positions = [int(at) for at in rng.integers(0, 10**6, 6)]
    together = drawn(logits, rows, positions)
    np.testing.assert_array_equal(drawn(logits, rows, positions, size=16), together)
    backwards = drawn(logits[::-1], rows[::-1], positions[::-1])
    np.testing.assert_array_equal(backwards[::-1], together)
    for at in range(6):
        alone = drawn(logits[at : at + 1], rows[at : at + 1], positions[at : at + 1])
        assert alone[0] == together[at]


def test_streams_of_other_seeds_and_positions_differ():
    """All 63 bits of a seed count: those that differ above bit 32 are different streams."""
    flat = np.zeros((64, VOCABULARY), np.float32)
    seeds = [0, 1, 2**32, 2**32 + 1, 2**62, 2**63 - 1]
    streams = [tuple(drawn(flat, [params(seed=s)] * 64, list(range(64)))) for s in seeds]
    assert len(set(streams)) == len(seeds)
    assert all(len(set(stream)) > 16 for stream in streams)
    again = drawn(flat, [params(seed=seeds[-1])] * 64, list(range(64)))
    np.testing.assert_array_equal(again, streams[-1])


def test_logprobs_are_those_of_the_unmodified_distribution():
    out = log_probabilities(jax.numpy.asarray(np.stack([LOGITS] * 2)))
    expected = np.log(reference(LOGITS, params()))
    np.testing.assert_allclose(out, np.stack([expected] * 2), atol=1e-5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", 101.0),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("seed", -1),
        ("seed", 2**63),
        ("logprobs", -1),
    ],
)
def test_values_outside_their_range_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} is {value}".replace(".", r"\.")):
        SamplingParams(**{field: value})
