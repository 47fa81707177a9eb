"""Random pools, states and tables for `ragged_pack` and `ragged_unpack`, and what numpy makes of
them."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np


class Problem(NamedTuple):
    """The arguments of both ops: pool `rows` (and `scales`), `temporal`, tables, slots, states."""

    rows: np.ndarray
    scales: np.ndarray | None
    temporal: np.ndarray
    index: np.ndarray
    inverse: np.ndarray
    slots: np.ndarray
    states: np.ndarray

    def to_pack(self):
        return self._arrays("rows", "scales", "temporal", "index", "slots", "states")

    def to_unpack(self):
        return self._arrays("temporal", "rows", "scales", "inverse", "slots", "states")

    def _arrays(self, *names):
        values = (getattr(self, name) for name in names)
        return tuple(None if x is None else jnp.array(x) for x in values)


def problem(
    rng: np.random.Generator,
    mask: np.ndarray,
    slots: list[int],
    states: list[int],
    *,
    int8: bool,
    key: int = 4,
    value: int = 128,
    pool_slots: int = 6,
    pool_states: int = 4,
) -> Problem:
    """`mask` `[L, H, K]` (KDA) or `[L, H]` (GDN) says what is retained. Both pools hold noise."""
    layers, heads = mask.shape[:2]
    unit = (value,) if mask.ndim == 3 else (key, value)
    key = mask.shape[2] if mask.ndim == 3 else key
    index = np.flatnonzero(mask).astype(np.int32)
    inverse = np.full(mask.size, -1, np.int32)
    inverse[index] = np.arange(len(index))
    shape = (pool_slots, len(index), *unit)
    rows = rng.integers(-127, 128, shape, np.int8) if int8 else normal(rng, shape)
    scales = np.abs(normal(rng, shape[:-1])) + np.float32(0.01) if int8 else None
    temporal = normal(rng, (layers, pool_states, heads, key, value))
    pairs = (np.array(x, np.int32) for x in (slots, states))
    return Problem(rows, scales, temporal, index, inverse, *pairs)


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def quantized(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eq. 10 in numpy float32."""
    scales = np.maximum(np.abs(rows).max(-1), np.float32(1e-8)) / np.float32(127)
    return np.clip(np.rint(rows / scales[..., None]), -127, 127).astype(np.int8), scales


def packed(given: Problem) -> tuple[np.ndarray, np.ndarray | None]:
    """(rows, scales) behind the pack."""
    rows = given.rows.copy()
    scales = None if given.scales is None else given.scales.copy()
    for slot, state in zip(given.slots, given.states, strict=True):
        if 0 < slot < len(rows):
            dense = given.temporal[:, state].reshape(-1, *rows.shape[2:])[given.index]
            if scales is None:
                rows[slot] = dense
            elif len(given.index):
                rows[slot], scales[slot] = quantized(dense)
    return rows, scales


def unpacked(given: Problem) -> np.ndarray:
    """`temporal` behind the unpack."""
    out = given.temporal.copy()
    for slot, state in zip(given.slots, given.states, strict=True):
        if not 0 <= state < out.shape[1] or slot == state == 0:
            continue
        dense = np.zeros((len(given.inverse), *given.rows.shape[2:]), np.float32)
        if 0 < slot < len(given.rows):
            dense[given.index] = given.rows[slot]
            if given.scales is not None:
                dense[given.index] *= given.scales[slot][..., None]
        out[:, state] = dense.reshape(out[:, state].shape)
    return out


def assert_same_bits(got, want) -> None:
    if want is None:
        assert got is None
        return
    got = np.asarray(got)
    assert got.dtype == want.dtype and got.shape == want.shape
    if got.tobytes() != want.tobytes():
        different = np.argwhere(got != want)
        raise AssertionError(f"{len(different)} values differ, the first at {different[:1]}")
