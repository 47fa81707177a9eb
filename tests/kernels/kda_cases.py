"""Gates that KDA meets, from what a trained model has to what breaks chunked forms, and how near a
kernel with bfloat16 operands has to stay to the recurrence in float64."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from tests.kernels import cases
from tests.kernels.cases import Inputs, Segment

DIM = 128
TOLERANCE, PARALLEL_TOLERANCE = 5e-3, 2e-2


def _kimi(rng, shape):
    channels = np.exp(-0.284 + 1.43 * rng.normal(size=shape[1:]))
    return -channels * np.exp(0.3 * rng.normal(size=shape))


def _slow(rng, shape):
    return -np.exp(-4 + rng.normal(size=shape))


def _steep(rng, shape):
    return -5 / (1 + np.exp(-rng.normal(size=shape)))


def _half_masked(rng, shape):
    return np.where(rng.random(shape) < 0.5, -1000, -np.exp(-2 + rng.normal(size=shape)))


def _resets(rng, shape):
    reset = rng.random((shape[0], 1, 1)) < 0.02
    return np.where(reset, -np.inf, -np.exp(-4 + 0.5 * rng.normal(size=shape)))


def _mixed(rng, shape):
    return np.where(rng.random(shape) < 0.5, 0.0, -9.9)


REGIMES = {
    "kimi": _kimi,
    "slow": _slow,
    "steep": _steep,
    "half masked": _half_masked,
    "resets": _resets,
    "all -30": lambda rng, shape: np.full(shape, -30.0),
    "all -8": lambda rng, shape: np.full(shape, -8.0),
    "all 0": lambda rng, shape: np.zeros(shape),
    "mixed": _mixed,
    "parallel keys": _slow,
}


class Batch(NamedTuple):
    """Segments of a bucket; of states, `initial` has a row for every one the bucket holds."""

    inputs: Inputs
    segments: list[Segment]
    boundaries: list[tuple[int, int]]
    initial: np.ndarray
    keep: np.ndarray

    def table(self, tokens: int, chunks: int, boundaries: int) -> pk.ChunkTable:
        lengths, starts, modes = zip(*self.segments, strict=True)
        return pk.chunk_table(
            lengths,
            starts,
            modes,
            self.boundaries,
            num_tokens=tokens,
            num_segments=len(self.initial),
            num_chunks=chunks,
            num_boundaries=boundaries,
        )

    def oracle(self) -> pk.DeltaOut:
        return cases.oracle(self.inputs, self.segments, self.initial, self.boundaries, self.keep)


def batch(
    rng: np.random.Generator,
    regime: str,
    segments: list[Segment],
    heads: int,
    rows: int | None = None,
) -> Batch:
    """Random tokens of a regime, a boundary at every multiple of 64, and `rows` initial states."""
    tokens = sum(segment.length for segment in segments)
    shape = (tokens, heads, DIM)
    q, k, v = rng.normal(size=(3, *shape))
    beta = 1 / (1 + np.exp(-rng.normal(size=shape[:2])))
    if regime == "parallel keys":
        k, beta = rng.normal(size=(1, heads, DIM)) + 0.05 * k, np.full_like(beta, 0.95)
    q, k, v = (np.asarray(jnp.asarray(x, jnp.bfloat16)) for x in (q, k, v))
    g = REGIMES[regime](rng, shape).astype(np.float32)
    grid = [
        (index, position)
        for index, (length, start, _) in enumerate(segments)
        for position in range(start // 64 * 64 + 64, start + length + 1, 64)
    ]
    initial = 0.1 * rng.normal(size=(rows or len(segments), heads, DIM, DIM))
    return Batch(
        Inputs(q, k, v, g, beta.astype(np.float32)),
        segments,
        grid,
        initial.astype(np.float32),
        rng.random((heads, DIM)) < 0.5,
    )


def distance(value: np.ndarray, truth: np.ndarray) -> float:
    """RMS of the difference over the RMS of the truth."""
    difference = np.asarray(value, np.float64) - truth
    scale = np.sqrt(np.mean(truth**2)) if truth.size else 0.0
    return float(np.sqrt(np.mean(difference**2)) / scale) if scale else float(difference.any())


def assert_right(out: pk.DeltaOut, b: Batch, tolerance: float = TOLERANCE) -> None:
    """Outputs and states follow the recurrence; zeros and initial states where nothing happens."""
    truth = b.oracle()
    o, final, boundary = (np.asarray(x) for x in out)
    tokens, segments, boundaries = len(truth.o), len(b.segments), len(b.boundaries)
    assert all(np.isfinite(x).all() for x in (o, final, boundary))
    assert distance(o[:tokens], truth.o) <= tolerance
    assert distance(final[:segments], truth.final) <= tolerance
    assert distance(boundary[:boundaries], truth.boundary) <= tolerance
    assert not o[tokens:].any() and not boundary[boundaries:].any()
    cases.assert_same_bits(final[segments:], b.initial[segments:])
    for index, segment in enumerate(b.segments):
        if segment.length == 0 and segment.mode == pk.SLOT:
            cases.assert_same_bits(final[index], b.initial[index])
