"""Ragged batches that the Hopper prefill of GDN is run on, and the regimes of its decays."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from tests.kernels import cases
from tests.kernels.cases import Inputs, Segment

KEY = 128
TOLERANCE = 5e-3
"""RMS of the error by RMS of the truth, where operands are rounded to bfloat16."""


def softplus_gate(rng: np.random.Generator, shape: tuple[int, ...], low: float, high: float):
    """Log decays as the models make them: -exp(A) softplus(x + bias) of random heads."""
    rate = np.exp(rng.uniform(low, high, shape[-1:]))
    return -rate * np.log1p(np.exp(rng.normal(size=shape) + rng.normal(size=shape[-1:])))


REGIMES = {
    "fit": lambda rng, shape: softplus_gate(rng, shape, 0.0, 2.7),
    "slow": lambda rng, shape: -np.exp(rng.uniform(-12, -3, shape)),
    "steep": lambda rng, shape: -np.exp(rng.normal(1.0, 1.0, shape)),
    "half forgotten": lambda rng, shape: np.where(rng.random(shape) < 0.5, -1000.0, -0.05),
    "resets": lambda rng, shape: np.where(rng.random(shape) < 0.02, -np.inf, -1e-3),
    "zero": lambda rng, shape: np.zeros(shape),
    "all -8": lambda rng, shape: np.full(shape, -8.0),
    "all -50": lambda rng, shape: np.full(shape, -50.0),
    "mixed": lambda rng, shape: np.where(rng.random(shape) < 0.5, 0.0, -9.9),
}


class Case(NamedTuple):
    """`tokens` are those of `inputs`, whose arrays are longer and hold NaN past them."""

    inputs: Inputs
    segments: list[Segment]
    initial: np.ndarray
    boundaries: list[tuple[int, int]]
    keep: np.ndarray
    table: pk.ChunkTable
    truth: pk.DeltaOut

    def table_boundaries(self) -> range:
        """Rows of boundary states: one more than is asked for."""
        return range(len(self.boundaries) + 1)

    def args(self) -> tuple:
        q, k, v, g, beta = (jnp.asarray(x) for x in self.inputs)
        table = pk.ChunkTable(*(jnp.asarray(x) for x in self.table))
        return q, k, v, g, beta, jnp.asarray(self.initial), table, jnp.asarray(self.keep)


def draw(
    rng: np.random.Generator, tokens: int, key_heads: int, values: int, regime: str = "fit"
) -> Inputs:
    """q, k, v bfloat16, the rest float32."""
    q, k = rng.normal(size=(2, tokens, key_heads, KEY)) * np.exp(rng.normal(size=(2, tokens, 1, 1)))
    v = rng.normal(size=(tokens, 2 * key_heads, values))
    beta = 1 / (1 + np.exp(-rng.normal(size=v.shape[:2])))
    q, k, v = (np.asarray(jnp.asarray(x, jnp.bfloat16)) for x in (q, k, v))
    g = REGIMES[regime](rng, v.shape[:2])
    return Inputs(q, k, v, g.astype(np.float32), beta.astype(np.float32))


def case(
    rng: np.random.Generator,
    segments: list[Segment],
    key_heads: int = 1,
    values: int = 64,
    regime: str = "fit",
    padding: int = 0,
    unlisted: int = 0,
    inputs: Inputs | None = None,
) -> Case:
    """All boundaries of the segments; `padding` tokens and chunks and `unlisted` segments more."""
    tokens = sum(s.length for s in segments)
    inputs = inputs or draw(rng, tokens, key_heads, values, regime)
    initial = rng.normal(size=(len(segments) + unlisted, 2 * key_heads, KEY, values))
    initial = (0.3 * initial).astype(np.float32)
    keep = rng.random((2 * key_heads, KEY)) < 0.5
    boundaries = [
        (index, position)
        for index, (length, start, _) in enumerate(segments)
        for position in range(start // 64 * 64 + 64, start + length + 1, 64)
    ][::-1]
    lengths, starts, modes = zip(*segments, strict=True)
    table = pk.chunk_table(
        lengths,
        starts,
        modes,
        boundaries,
        num_tokens=tokens + padding,
        num_segments=len(initial),
        num_chunks=pk.chunk_count(lengths, starts) + padding,
        num_boundaries=len(boundaries) + 1,
    )
    truth = cases.oracle(inputs, segments, initial, boundaries, keep)
    padded = cases.pad(inputs, tokens + padding)
    return Case(padded, segments, initial, boundaries, keep, table, truth)


def rms_ratio(value: np.ndarray, truth: np.ndarray) -> float:
    value = np.asarray(value, np.float64)
    assert value.shape == truth.shape and np.isfinite(value).all()
    size = np.sqrt(np.mean(truth**2)) if truth.size else 0.0
    error = np.sqrt(np.mean((value - truth) ** 2)) if truth.size else 0.0
    return float(error) if size < 1e-6 else float(error / size)


def assert_right(out: pk.DeltaOut, c: Case, tolerance: float = TOLERANCE) -> None:
    tokens, segments, boundaries = (len(x) for x in c.truth)
    assert rms_ratio(out.o[:tokens], c.truth.o) <= tolerance
    assert rms_ratio(out.final[:segments], c.truth.final) <= tolerance
    assert rms_ratio(out.boundary[:boundaries], c.truth.boundary) <= tolerance
    assert not np.asarray(out.o[tokens:]).any() and not np.asarray(out.boundary[boundaries:]).any()
    cases.assert_same_bits(out.final[segments:], c.initial[segments:])
    for index, (length, _, mode) in enumerate(c.segments):
        if length == 0 and mode == pk.SLOT:
            cases.assert_same_bits(out.final[index], c.initial[index])
    for row, (index, position) in enumerate(c.boundaries):
        if position == c.segments[index].start + c.segments[index].length:
            cases.assert_same_bits(out.boundary[row], out.final[index])
