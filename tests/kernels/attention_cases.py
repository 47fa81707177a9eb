"""Queries over scattered pages, for every implementation of the two ops of paged attention.

Whatever no request may see is NaN: page 0 (the sink), other layers, the rows past a length, and the
queries of padding tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from pallas_kernels import PagedRows

PAGE, LAYERS, LAYER = 64, 2, 1
RAGGED = (0, 1, 63, 64, 65, 200)
TOLERANCE = {"bfloat16": 5e-3, "float32": 1e-5}


class Kind(NamedTuple):
    """`heads` 0: values are the first columns of the keys, which have no head axis."""

    queries: int
    heads: int
    key_width: int
    value_width: int


KINDS = {"latent": Kind(32, 0, 576, 512), "grouped": Kind(16, 2, 256, 256)}


class Problem(NamedTuple):
    """`arrays`: keys and values, or keys alone. `truth [B, Hq, Dv]` in float64."""

    q: jax.Array
    arrays: tuple[jax.Array, ...]
    table: np.ndarray
    lengths: np.ndarray
    width: int
    scale: float
    truth: np.ndarray

    def rows(self, arrays: tuple[jax.Array, ...] | None = None) -> PagedRows:
        arrays = arrays or self.arrays
        return PagedRows(arrays[0], arrays[-1], LAYER, self.width)


def problem(kind: str, lengths=RAGGED, pages: int = 4, dtype="bfloat16", seed: int = 0) -> Problem:
    """Requests of `lengths` in tables of `pages` columns, their pages in random places."""
    k, rng, batch = KINDS[kind], np.random.default_rng(seed), len(lengths)
    lengths = np.array(lengths, np.int32)
    table = (1 + rng.permutation(batch * pages)).reshape(batch, pages).astype(np.int32)
    used = np.arange(pages * PAGE).reshape(pages, PAGE) < lengths[:, None, None]
    shape = (batch * pages + 1, PAGE) + ((k.heads,) if k.heads else ())
    widths = (k.key_width, k.value_width) if k.heads else (k.key_width,)
    arrays = []
    for width in widths:
        pool = np.full((LAYERS, *shape, width), np.nan, np.float32)
        pool[LAYER, table[used.any(2)]] = rng.normal(size=pool[LAYER, table[used.any(2)]].shape)
        pool[LAYER, table] = np.where(
            used.reshape(used.shape + (1,) * (pool.ndim - 3)), pool[LAYER, table], np.nan
        )
        arrays.append(jnp.asarray(pool, dtype))
    q = jnp.asarray(rng.normal(size=(batch, k.queries, k.key_width)), dtype)
    table = np.where(used.any(2), table, 0)
    scale = 2 * k.key_width**-0.5
    truth = _oracle(q, arrays, table, lengths, k, scale)
    return Problem(q, tuple(arrays), table, lengths, k.value_width, scale, truth)


class Prompts(NamedTuple):
    """Packed tokens of some requests. `truth [T, Hq, Dv]`, zeros in padding tokens."""

    q: jax.Array
    pages: Problem
    positions: np.ndarray
    table: pk.ChunkTable
    truth: np.ndarray


def prompts(kind: str, segments, tokens: int, pages: int = 4, seed: int = 0) -> Prompts:
    """`segments`: (new tokens, tokens before them) of each request."""
    k, rng = KINDS[kind], np.random.default_rng(seed + 1)
    new, starts = (list(x) for x in zip(*segments, strict=True))
    p = problem(kind, [a + b for a, b in segments], pages, seed=seed)
    table = pk.chunk_table(
        new,
        starts,
        [pk.ZERO] * len(new),
        (),
        num_tokens=tokens,
        num_segments=len(new),
        num_chunks=pk.chunk_count(new, starts) + 2,
        num_boundaries=1,
    )
    q = rng.normal(size=(tokens, k.queries, k.key_width)).astype(np.float32)
    q[sum(new) :] = np.nan
    q = jnp.asarray(q, p.q.dtype)
    positions = np.concatenate([b + np.arange(a) for a, b in segments])
    segment = np.repeat(np.arange(len(new)), new)
    truth = np.zeros((tokens, k.queries, k.value_width))
    real = q[: len(segment)]
    truth[: len(segment)] = _oracle(real, p.arrays, p.table[segment], positions + 1, k, p.scale)
    positions = np.pad(positions, (0, tokens - len(positions))).astype(np.int32)
    return Prompts(q, p, positions, table, truth)


def _oracle(q, arrays, table, lengths, kind: Kind, scale: float) -> np.ndarray:
    heads = max(kind.heads, 1)
    q = np.asarray(q, np.float64).reshape(len(lengths), heads, -1, kind.key_width)
    out = np.zeros((*q.shape[:3], kind.value_width))
    for b, length in enumerate(lengths):
        if not length:
            continue
        keys, values = (
            np.asarray(x[LAYER, table[b]], np.float64).reshape(-1, heads, x.shape[-1])[:length]
            for x in (arrays[0], arrays[-1])
        )
        scores = scale * np.einsum("hgd,jhd->hgj", q[b], keys)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[b] = np.einsum("hgj,jhd->hgd", weights, values[..., : kind.value_width])
    return out.reshape(len(lengths), -1, kind.value_width)


def assert_right(out: jax.Array, p: Problem | Prompts) -> None:
    """RMS error relative to the truth of each request or token; exact zeros where it sees none."""
    out = np.asarray(out, np.float64)
    assert out.shape == p.truth.shape
    for o, truth in zip(out, p.truth, strict=True):
        if truth.any():
            assert np.linalg.norm(o - truth) <= TOLERANCE[str(p.q.dtype)] * np.linalg.norm(truth)
        else:
            assert not o.any()
