"""Attention over 64-token pages with an online softmax: the XLA form, for prefill and for decode.

Keys of MLA are the cached latent rows themselves and its values their first columns, so both
attention kinds are one function: `Hkv` key heads, each serving `G` query heads. Blocks of pages are
anchored at position 0 and those past the last visible key are skipped, so that a row's bits depend
neither on the width of the page table nor on what else is in the batch.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.chunks import ChunkTable

PAGE = 64
BLOCK_PAGES = 4
LOWEST = -1e30


class PagedRows(NamedTuple):
    """The pages of one attention layer, left inside the stack of all so that nothing is copied.

    A value is the first `width` columns of its row in `values`, which for MLA is the key array
    itself. One key head needs no axis of its own: adding one outside costs a copy of all pages.
    """

    keys: Float[Array, "F P 64 *Hkv Dk"]
    values: Float[Array, "F P 64 *Hkv Dw"]
    layer: int
    width: int


class Softmax(NamedTuple):
    """Running maximum, sum and weighted values of one online softmax."""

    top: Float32[Array, "*rows"]
    total: Float32[Array, "*rows"]
    out: Float32[Array, "*rows Dv"]


def _empty(rows: tuple[int, ...], width: int) -> Softmax:
    return Softmax(
        jnp.full(rows, LOWEST, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros((*rows, width), jnp.float32),
    )


def _add_block(
    carry: Softmax,
    q: Float[Array, "B Q Hkv G Dk"],
    keys: Float[Array, "B J Hkv Dk"],
    values: Float[Array, "B J Hkv Dv"],
    visible: jax.Array,
) -> Softmax:
    """One block of keys; `visible [B, Q, J]`. Hidden scores are selected away, never added."""
    scores = jnp.einsum(
        "bqhgd,bjhd->bqhgj", q, keys, preferred_element_type=jnp.float32, precision="highest"
    )
    seen = visible[:, :, None, None, :]
    scores = jnp.where(seen, scores, LOWEST)
    top = jnp.maximum(carry.top, jnp.max(scores, axis=-1))
    weight = jnp.where(seen, jnp.exp(scores - top[..., None]), 0.0)
    shrink = jnp.exp(carry.top - top)
    add = jnp.einsum(
        "bqhgj,bjhd->bqhgd",
        weight.astype(values.dtype),
        values,
        preferred_element_type=jnp.float32,
        precision="highest",
    )
    return Softmax(
        top, carry.total * shrink + jnp.sum(weight, axis=-1), carry.out * shrink[..., None] + add
    )


def _attend(
    q: Float[Array, "B Q Hq Dk"],
    cache: PagedRows,
    page_table: Int32[Array | np.ndarray, "B M"],
    limit: Int32[Array | np.ndarray, "B Q"],
    scale: float,
) -> Float32[Array, "B Q Hq Dv"]:
    """Each query sees the keys at positions below its `limit` (0: none, giving zeros)."""
    batch, queries, heads, _ = q.shape
    kv_heads, width = math.prod(cache.keys.shape[3:-1]), cache.width
    pages = min(BLOCK_PAGES, page_table.shape[1])
    blocks = -(-page_table.shape[1] // pages)
    table = jnp.pad(page_table, ((0, 0), (0, blocks * pages - page_table.shape[1])))
    grouped = (q * jnp.asarray(scale, q.dtype)).reshape(
        batch, queries, kv_heads, heads // kv_heads, -1
    )
    furthest = jnp.max(limit)

    def block(carry: Softmax, index: jax.Array) -> tuple[Softmax, None]:
        def add(carry: Softmax) -> Softmax:
            at = jax.lax.dynamic_slice_in_dim(table, index * pages, pages, axis=1)
            position = index * pages * PAGE + jnp.arange(pages * PAGE)
            shape = (batch, pages * PAGE, kv_heads, -1)
            keys = cache.keys[cache.layer, at].reshape(shape)
            values = cache.values[cache.layer, at].reshape(shape)[..., :width]
            visible = position[None, None, :] < limit[:, :, None]
            # A sink or freed page may hold anything, NaN included: hidden values must not reach the
            # product.
            values = jnp.where(
                (position[None, :] < jnp.max(limit, axis=1)[:, None])[..., None, None], values, 0
            )
            return _add_block(carry, grouped, keys, values, visible)

        return jax.lax.cond(index * pages * PAGE < furthest, add, lambda c: c, carry), None

    empty = _empty(grouped.shape[:-1], width)
    done, _ = jax.lax.scan(block, empty, jnp.arange(blocks))
    out = done.out / jnp.where(done.total == 0.0, 1.0, done.total)[..., None]
    return out.reshape(batch, queries, heads, width)


def paged_attention_prefill(
    q: Float[Array, "T Hq Dk"],
    cache: PagedRows,
    page_table: Int32[Array | np.ndarray, "N M"],
    positions: Int32[Array | np.ndarray, "T"],
    table: ChunkTable,
    *,
    scale: float,
) -> Float32[Array, "T Hq Dv"]:
    """Causal attention of packed tokens over their own request's pages, 64 queries at a time.

    The keys of the tokens themselves must already lie in the pages. Rows of padding tokens are
    zeros.
    """
    tokens, heads = q.shape[0], q.shape[1]
    rows = jnp.arange(PAGE)

    def chunk(out: jax.Array, c: jax.Array) -> tuple[jax.Array, None]:
        def run(out: jax.Array) -> jax.Array:
            index = table.token[c] + rows - table.row[c]
            real = (rows >= table.row[c]) & (rows < table.row[c] + table.length[c])
            inside = jnp.clip(index, 0, tokens - 1)
            limit = jnp.where(real, positions[inside] + 1, 0)
            pages = page_table[table.segment[c]][None]
            o = _attend(q[inside][None], cache, pages, limit[None], scale)[0]
            return out.at[jnp.where(real, index, tokens)].set(o, mode="drop")

        return jax.lax.cond(table.length[c] > 0, run, lambda o: o, out), None

    empty = jnp.zeros((tokens, heads, cache.width), jnp.float32)
    return jax.lax.scan(chunk, empty, jnp.arange(table.token.shape[0]))[0]


def paged_attention_decode(
    q: Float[Array, "B Hq Dk"],
    cache: PagedRows,
    page_table: Int32[Array | np.ndarray, "B M"],
    lengths: Int32[Array | np.ndarray, "B"],
    *,
    scale: float,
) -> Float32[Array, "B Hq Dv"]:
    """One query of each request over its first `lengths` keys (its own included)."""
    return _attend(q[:, None], cache, page_table, lengths[:, None], scale)[:, 0]
