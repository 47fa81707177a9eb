"""Grouped products in float64, for every implementation and machine."""

import ml_dtypes
import numpy as np

TOLERANCE = 5e-3
"""Of bfloat16 results: ||result - truth|| / ||truth||."""


def operands(rng: np.random.Generator, sizes, rows: int, inner: int, width: int, dtype):
    """x `[rows, inner]`, NaN in the rows of no group, and w `[G, inner, width]`."""
    x = rng.normal(size=(rows, inner)).astype(dtype)
    x[sum(sizes) :] = np.nan
    return x, (rng.normal(size=(len(sizes), inner, width)) / inner**0.5).astype(dtype)


def truth(x: np.ndarray, w: np.ndarray, sizes, swiglu: bool = False) -> np.ndarray:
    ends = np.cumsum(sizes)
    y = np.zeros((len(x), w.shape[2]))
    for group, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        rows = slice(end - size, end)
        y[rows] = x[rows].astype(np.float64) @ w[group].astype(np.float64)
    if not swiglu:
        return y
    gate, up = np.split(y, 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


def assert_right(y, expected: np.ndarray, real: int, tolerance: float = TOLERANCE) -> None:
    """Near the truth in the rows of a group; zero, bit for bit, in the others."""
    y = np.asarray(y)
    assert y.shape == expected.shape
    assert not y[real:].astype(np.float64).any()
    error = np.linalg.norm(y[:real].astype(np.float64) - expected[:real])
    assert error <= tolerance * np.linalg.norm(expected[:real])


BF16 = ml_dtypes.bfloat16
SIZES = (
    (6, 6, 6, 6),
    (0, 24, 0, 0),
    (0, 5, 0, 7),
    (1, 0, 22, 1),
    (0, 0, 0, 0),
    (0, 0, 0, 24),
    (17, 1, 0, 0),
)
