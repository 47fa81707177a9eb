"""Chunked XLA form of the delta rule: for CPUs, for training, and the fallback of every GPU.

With G the cumulative log decay inside a chunk (Kimi Linear section 3, Gated DeltaNet section 3.3):

    A_ij = beta_i sum_d k_id k_jd exp(G_id - G_jd)  (j < i);    P_ij likewise with q_i  (j <= i)
    U = (I + A)^-1 beta V - ((I + A)^-1 beta (k exp G)) S;    O = (q exp G) S + P U
    S <- diag(exp G_last) S + (k exp(G_last - G))^T U

exp(-G) overflows and G_i - G_j cancels, so neither is formed: every exponent is summed afresh from
the log decays of its own interval, all of one sign. KDA, whose decay differs by channel, does that
pair by pair only inside blocks of 16 tokens; a pair in different blocks meets at the start of the
later one.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.chunks import CHUNK, ChunkTable
from pallas_kernels.reference import token_step
from pallas_kernels.walk import DeltaOut, Tokens, prepare, walk

BLOCK = 16
LEAST_DECAY = -128.0

# Every GPU multiplies float32 in TF32 unless told otherwise, which costs the states ten bits.
_einsum = functools.partial(jnp.einsum, precision="highest")


def prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial: jax.Array,
    table: ChunkTable,
    keep: jax.Array | None,
    num_boundaries: int,
) -> DeltaOut:
    """`delta_prefill`, 64 tokens at a time. The backward pass recomputes each chunk."""
    local, step = (jax.checkpoint(f, prevent_cse=False) for f in (_within, _chunk))
    return walk(local, step, (q, k, v, g, beta), initial, table, keep, num_boundaries)


def decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    pool: jax.Array,
    slots: jax.Array,
    layer: int,
) -> tuple[jax.Array, jax.Array]:
    """`delta_decode`, all requests at once."""
    old = pool[layer, slots]
    new, o = jax.vmap(token_step)(old, prepare(q, k, v, g, beta))
    live = slots > 0
    pool = pool.at[layer, slots].set(jnp.where(live[:, None, None, None], new, old))
    return pool, jnp.where(live[:, None, None], o, 0.0)


class Within(NamedTuple):
    """What 64 tokens are to each other and to the chunk's ends, per head; no state is in it.

    attend `[H, 64, 64]`: P; fresh `[H, 64, V]` and known `[H, 64, K]`: U = fresh - known S;
    q_start, k_end `[H, 64, K]`: q decayed from the chunk's start, k to its end; decay
    `[H, K or 1]`: over the whole chunk.
    """

    attend: jax.Array
    fresh: jax.Array
    known: jax.Array
    q_start: jax.Array
    k_end: jax.Array
    decay: jax.Array


def _within(tokens: Tokens) -> Within:
    q, k, v, g = (jnp.swapaxes(x, 0, 1) for x in tokens[:4])
    beta = tokens.beta.T[..., None]
    group = v.shape[0] // q.shape[0]
    # exp(-128) is zero in float32, so the bound changes no result; 0 * -inf would, in the sums.
    g = jnp.maximum(g, LEAST_DECAY)
    pairs = _scalar_pairs if g.shape[-1] == 1 else _channel_pairs
    attend, erase = pairs(jnp.stack([q, k]), k, g, group)
    q, k = jnp.repeat(q, group, axis=0), jnp.repeat(k, group, axis=0)
    rows = np.arange(CHUNK)
    from_start = jnp.exp(_einsum("im,hmk->hik", _indicator(rows[:, None] >= rows), g))
    to_end = jnp.exp(_einsum("jm,hmk->hjk", _indicator(rows[:, None] < rows), g))
    # Solved here, for all chunks side by side: in the walk it would be a solve a chunk.
    given = jnp.concatenate([beta * v, beta * from_start * k], axis=-1)
    u = jax.scipy.linalg.solve_triangular(beta * erase, given, lower=True, unit_diagonal=True)
    fresh, known = jnp.split(u, [v.shape[-1]], axis=-1)
    return Within(attend, fresh, known, q * from_start, k * to_end, from_start[:, -1])


def _chunk(state: jax.Array, c: Within) -> tuple[jax.Array, jax.Array]:
    """64 tokens of all heads: state `[H, K, V]` -> (state, o `[64, H, V]`)."""
    u = c.fresh - _einsum("hik,hkv->hiv", c.known, state)
    o = _einsum("hik,hkv->hiv", c.q_start, state) + _einsum("hij,hjv->hiv", c.attend, u)
    state = c.decay[..., None] * state + _einsum("hjk,hjv->hkv", c.k_end, u)
    return state, jnp.swapaxes(o, 0, 1)


def _indicator(condition: np.ndarray) -> np.ndarray:
    return condition.astype(np.float32)


def _interval_decay(g: jax.Array) -> jax.Array:
    """exp of the sum of g `[..., n, K]` over (j, i], `[..., n, n, K]`; zero where j > i."""
    rows = np.arange(g.shape[-2])
    causal = rows[:, None] >= rows
    after = jnp.where((rows[:, None] > rows)[..., None], g[..., :, None, :], 0.0)
    sums = _einsum("im,...mjk->...ijk", _indicator(causal), after)
    return jnp.where(causal[..., None], jnp.exp(sums), 0.0)


def _scalar_pairs(left: jax.Array, k: jax.Array, g: jax.Array, group: int) -> jax.Array:
    """GDN: products `[2, H, i, j]` of q_i and of k_i with k_j, decayed from j to i.

    The decay is one number a head, so it multiplies the products of the key heads from outside.
    """
    plain = _einsum("xhik,hjk->xhij", left, k)
    return jnp.repeat(plain, group, axis=1) * _interval_decay(g)[..., 0]


def _channel_pairs(left: jax.Array, k: jax.Array, g: jax.Array, group: int) -> jax.Array:
    """KDA: the same, where every channel decays on its own."""
    left, k = jnp.repeat(left, group, axis=1), jnp.repeat(k, group, axis=0)
    blocks = CHUNK // BLOCK
    heads, _, width = k.shape
    in_blocks = (heads, blocks, BLOCK, width)
    left_blocks = left.reshape(2, *in_blocks)
    g_blocks = g.reshape(in_blocks)
    near = _diagonals(left_blocks, k.reshape(in_blocks), g_blocks)

    rows, first = np.arange(CHUNK), np.arange(blocks)[:, None] * BLOCK
    before = rows < first
    between = before[:, None, :] & (rows[:, None] < rows)
    to_block = jnp.exp(_einsum("bjm,hmk->hbjk", _indicator(between), g))
    columns = jnp.where(before[..., None], k[:, None] * to_block, 0.0)
    inside = np.tril(np.ones((BLOCK, BLOCK), np.float32))
    in_block = jnp.exp(_einsum("im,hbmk->hbik", inside, g_blocks))
    far = _einsum("xhbik,hbjk->xhbij", left_blocks * in_block, columns)

    same = np.eye(blocks, dtype=bool)[:, None, :, None]
    both = jnp.where(same, near[..., None, :], far.reshape(2, heads, blocks, BLOCK, blocks, BLOCK))
    return both.reshape(2, heads, CHUNK, CHUNK)


def _diagonals(left: jax.Array, k: jax.Array, g: jax.Array) -> jax.Array:
    """Products `[2, H, blocks, i, j]` inside blocks: left_i k_j, each channel decayed from j to i.

    Diagonal by diagonal, for the interval of (i, i - n) is that of (i, i - n + 1) and one token
    more: a sum without differences, and nothing of size [i, j, K] is kept.
    """
    sums = jnp.zeros_like(g)
    diagonals = []
    for n in range(BLOCK):
        earlier = jnp.pad(k, ((0, 0), (0, 0), (n, 0), (0, 0)))[:, :, :BLOCK]
        diagonals.append(jnp.sum(left * (earlier * jnp.exp(sums)), axis=-1))
        sums = sums + jnp.pad(g, ((0, 0), (0, 0), (n, 0), (0, 0)))[:, :, :BLOCK]
    stacked = jnp.stack(diagonals, axis=-1)
    i, j = np.indices((BLOCK, BLOCK))
    return jnp.where(i >= j, stacked[..., i, np.maximum(i - j, 0)], 0.0)
