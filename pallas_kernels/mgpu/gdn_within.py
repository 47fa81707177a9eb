"""What the 64 tokens of a chunk are to each other under the gated delta rule, on Hopper.

No state is in it, so all chunks and key heads are done side by side, a warpgroup each. With
G the cumulative log decay inside the chunk and k^, q^ the normalised keys and queries:

    A_ij = beta_i k^_i . k^_j exp(G_i - G_j)  (j < i);    T = (I + A)^-1
    P_ij = q^_i . k^_j exp(G_i - G_j)  (j <= i)

The products are taken of the raw rows, which are bfloat16 and therefore exact in the tensor cores;
norms and decays multiply them in float32. Only T - I is rounded and kept: the ones on the diagonal
are then exact, and with them most of what the walk makes of T.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chunks import CHUNK
from pallas_kernels.mgpu.common import rows, seen
from pallas_kernels.mgpu.gdn_solve import BLOCK, cut, invert, solve_diagonal
from pallas_kernels.mgpu.gdn_tiles import (
    BY_COLUMN,
    BY_ROW,
    GROUP,
    HALF,
    KEY,
    SQUARE,
    along,
    index,
    load,
    multiply,
    parts,
    rounded,
    squares,
)
from pallas_kernels.mgpu.pipeline import publish

ERASE, STRENGTH, TO_END, OVER, QUERY = range(5)
"""Rows of the vectors of a chunk: what scales k^T S, v, k of the new state; the decay of the whole
chunk; what scales q^T S."""
LEAST_DECAY = -90.0
"""exp of it is zero beside anything that a state holds; a sum of 64 keeps its low bits."""
WARPGROUPS = 3
"""Of a block of threads, each with a chunk and key head of its own: as many as share the registers
of a multiprocessor without spilling."""
REGISTERS = 168
LOG2E = math.log2(math.e)


class Within(NamedTuple):
    """Of all chunks: solve (T - I) and attend (P) `[NC, H, 64, 64]` bfloat16, vectors
    `[NC, H, 5, 64]` float32, all arbitrary in chunks of length 0."""

    solve: Any
    attend: Any
    vectors: Any


def shapes(chunks: int, heads: int) -> Within:
    square = jax.ShapeDtypeStruct((chunks, heads, *SQUARE), jnp.bfloat16)
    vectors = jax.ShapeDtypeStruct((chunks, heads, 5, CHUNK), jnp.float32)
    return Within(square, square, vectors)


def shared_memory(interpret: Any) -> dict[str, Any]:
    return {
        "raw": rows((WARPGROUPS, 4, CHUNK, HALF), jnp.bfloat16, interpret),
        "tiles": squares(WARPGROUPS, GROUP),
        "diagonal": plgpu.SMEM((WARPGROUPS, GROUP * CHUNK, BLOCK), jnp.float32),
        "gates": plgpu.SMEM((WARPGROUPS, GROUP, 2, 2 * CHUNK), jnp.float32),
        "norms": plgpu.SMEM((WARPGROUPS, CHUNK), jnp.float32),
        "sums": plgpu.SMEM((WARPGROUPS, GROUP, CHUNK), jnp.float32),
        "full": plgpu.Barrier(num_arrivals=4, num_barriers=WARPGROUPS),
    }


def make(maker, shared, scratch) -> None:
    """What a warpgroup of a maker does: an item, if there is one left for it. `shared` is a
    `gdn_work.Shared`; T >= 64."""
    warpgroup, heads = lax.axis_index("warpgroup"), shared.arrays["k"].shape[1]
    item, items = maker * WARPGROUPS + warpgroup, shared.table.token.shape[0] * heads
    copied, tiles = seen(scratch.pop("raw"), shared.interpret)

    @pl.when(item < items)
    def _():
        # As many as it has: else the compiler ignores what walkers ask for.
        plgpu.set_max_registers(REGISTERS, action="increase")
        own = {name: x.at[warpgroup] for name, x in scratch.items()}
        own |= {"copied": copied.at[warpgroup], "raw": tiles.at[warpgroup]}
        chunk, head = lax.div(item, heads), lax.rem(item, heads)
        _chunk(shared, chunk, head, own)
        publish(shared.arrays["marks"], head, chunk, shared.interpret)


def _chunk(shared, chunk, head, scratch):
    q, k, g, beta = (shared.arrays[name] for name in ("q", "k", "g", "beta"))
    count, token = shared.table.length[chunk], shared.table.token[chunk]

    @pl.when(count > 0)
    def _():
        for i in range(4):
            source = (k, q)[i // 2].at[pl.ds(token, CHUNK), head, pl.ds(i % 2 * HALF, HALF)]
            plgpu.copy_gmem_to_smem(source, scratch["copied"].at[i], scratch["full"])
        _read_gates(g, beta, token, head, scratch["gates"])
        _cumulate(count, scratch["gates"], scratch["sums"])
        mine = tuple(x.at[chunk, pl.ds(head * GROUP, GROUP)] for x in shared.local)
        plain = _plain(count, scratch, shared.interpret)
        _solve(*plain, count, mine, scratch, shared.interpret)


def _read_gates(g, beta, token, head, gates):
    """Put g and beta of the chunk's rows behind 64 rows of what may lie before them: what is read
    must not begin past the last 64 tokens."""
    first = jnp.minimum(token, g.shape[0] - CHUNK)
    place = pl.ds(CHUNK - (token - first), CHUNK)
    targets = [(x, e, i) for e in range(GROUP) for i, x in enumerate((g, beta))]
    # All of them before the first is put down, so that they are under way together.
    columns = [load(x.at[pl.ds(first, CHUNK), head * GROUP + e], BY_ROW) for x, e, _ in targets]
    for (_, e, i), column in zip(targets, columns, strict=True):
        gates.at[e, i, place][...] = column.astype(jnp.float32)


def _cumulate(count, gates, sums):
    """Put G in base 2 into `sums`."""
    plgpu.commit_smem()
    before = index(1) <= jnp.minimum(index(0), count - 1)
    for e in range(GROUP):
        g = along(load(gates.at[e, 0, pl.ds(CHUNK, CHUNK)], BY_COLUMN), 1)
        g = jnp.maximum(g, LEAST_DECAY) * LOG2E
        sums.at[e][...] = jnp.sum(jnp.where(before, g, 0.0), axis=1)


def _plain(count, scratch, interpret):
    """K^ K^^T below the diagonal and Q^ K^^T to the diagonal; 1 / |k| and K**-0.5 / |q| by row."""
    raw = scratch["raw"]
    plgpu.barrier_wait(scratch["full"])
    keys, queries = [raw.at[0], raw.at[1]], [raw.at[2], raw.at[3]]
    pairs = (keys, keys), (queries, keys), (queries, queries)
    kk, qk, qq, _ = multiply(
        *([None, *((a[h], b[h].T) for h in (0, 1))] for a, b in pairs), interpret=interpret
    )
    i, j = index(0), index(1)
    # Selected, for the rows past the end are other tokens, or none and NaN.
    own = (i == j) & (i < count)
    k_norm, q_norm = (lax.rsqrt(jnp.sum(jnp.where(own, x, 0.0), axis=1) + 1e-6) for x in (kk, qq))
    q_norm = q_norm * KEY**-0.5
    scratch["norms"][...] = k_norm
    plgpu.commit_smem()
    by_column = along(load(scratch["norms"], BY_COLUMN), 1)
    kk, qk = kk * by_column * along(k_norm, 0), qk * by_column * along(q_norm, 0)
    real = i < count
    return jnp.where((j < i) & real, kk, 0.0), jnp.where((j <= i) & real, qk, 0.0), k_norm, q_norm


def _solve(kk, qk, k_norm, q_norm, count, targets, scratch, interpret):
    """T - I, P and the vectors of both heads, from what `_plain` returns."""
    raw, tiles, sums, diagonal = (scratch[x] for x in ("raw", "tiles", "sums", "diagonal"))
    solve, attend, vectors = targets

    def head(e, _):
        total = load(sums.at[e], BY_ROW)
        strength = load(scratch["gates"].at[e, 1, pl.ds(CHUNK, CHUNK)], BY_ROW)
        strength = _real(strength, count)
        _write_vectors(vectors.at[e], total, sums[e, CHUNK - 1], strength, k_norm, q_norm)
        apart = along(total, 0) - along(load(sums.at[e], BY_COLUMN), 1)
        decay = jnp.exp2(jnp.minimum(apart, 0.0))
        raw.at[e][...] = rounded(qk * decay)
        near, far = cut(kk * decay * along(-strength, 0))
        for target, x in zip((raw.at[GROUP + e], tiles.at[e]), parts(far), strict=True):
            target[...] = x
        diagonal.at[pl.ds(e * CHUNK, CHUNK)][...] = near

    lax.fori_loop(0, GROUP, head, None)
    plgpu.commit_smem()
    for e in range(GROUP):
        plgpu.copy_smem_to_gmem(raw.at[e], attend.at[e])
    solve_diagonal(diagonal, interpret)
    invert(raw, tiles, diagonal, interpret)
    for e in range(GROUP):
        plgpu.copy_smem_to_gmem(raw.at[GROUP + e], solve.at[e])
    plgpu.wait_smem_to_gmem(0)


def _write_vectors(vectors, total, last, strength, k_norm, q_norm):
    from_start = jnp.exp2(total)
    vectors.at[ERASE][...] = -strength * from_start * k_norm
    vectors.at[STRENGTH][...] = strength
    vectors.at[TO_END][...] = jnp.exp2(last - total) * k_norm
    vectors.at[OVER][...] = jnp.exp2(total * 0.0 + last)
    vectors.at[QUERY][...] = from_start * q_norm


def _real(x, count):
    row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=BY_ROW)
    return jnp.where(row < count, x, 0.0)
