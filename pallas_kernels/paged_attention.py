"""Attention over 64-token pages with an online softmax: the XLA form, for prefill and for decode.

Keys of MLA are the cached latent rows themselves and its values their first columns, so both
attention kinds are one function: `Hkv` key heads, each serving `G` query heads. Blocks of pages are
anchored at position 0 and those past the last visible key are skipped, so that a row's bits depend
neither on the width of the page table nor on what else is in the batch.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.chunks import ChunkTable

PAGE = 64
BLOCK_PAGES = 4
GROUP_CHUNKS = 32
"""Chunks of queries that a GPU takes together: one at a time leaves it idle."""
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
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages)))
    grouped = (q * jnp.asarray(scale, q.dtype)).reshape(
        batch, queries, kv_heads, heads // kv_heads, -1
    )

    def block(index: jax.Array, carry: Softmax) -> Softmax:
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

    seen = -(-jnp.max(limit) // (pages * PAGE))
    done = jax.lax.fori_loop(0, seen, block, _empty(grouped.shape[:-1], width))
    out = done.out / jnp.where(done.total == 0.0, 1.0, done.total)[..., None]
    return out.reshape(batch, queries, heads, width)


def prefill(
    q: Float[Array, "T Hq Dk"],
    cache: PagedRows,
    page_table: Int32[Array | np.ndarray, "N M"],
    positions: Int32[Array | np.ndarray, "T"],
    table: ChunkTable,
    scale: float,
) -> Float32[Array, "T Hq Dv"]:
    """`paged_attention_prefill`, 64 queries at a time: see `pallas_kernels.ops`."""
    tokens = q.shape[0]
    rows = jnp.arange(PAGE)
    first, row, length = (jnp.asarray(x)[:, None] for x in (table.token, table.row, table.length))
    index = first - row + rows
    real = (rows >= row) & (rows < row + length)
    inside = jnp.clip(index, 0, tokens - 1)
    limit = jnp.where(real, jnp.asarray(positions)[inside] + 1, 0)
    segment = jnp.asarray(table.segment)

    def some(out: jax.Array, chunks: jax.Array) -> jax.Array:
        pages = jnp.asarray(page_table)[segment[chunks]]
        o = _attend(q[inside[chunks]], cache, pages, limit[chunks], scale)
        return out.at[jnp.where(real, index, tokens)[chunks]].set(o, mode="drop")

    empty = jnp.zeros((tokens, q.shape[1], cache.width), jnp.float32)
    return jax.lax.platform_dependent(
        empty,
        cpu=lambda out: _in_groups(some, out, length.shape[0], 1),
        default=lambda out: _in_groups(some, out, length.shape[0], GROUP_CHUNKS),
    )


def _in_groups(
    some: Callable[[jax.Array, jax.Array], jax.Array], out: jax.Array, chunks: int, size: int
) -> jax.Array:
    """`some(out, chunk numbers [size])` for all chunks; the last group may repeat some."""
    size = min(size, chunks)
    groups = -(-chunks // size)
    first = jnp.minimum(jnp.arange(groups) * size, chunks - size)

    def group(out: jax.Array, start: jax.Array) -> tuple[jax.Array, None]:
        return some(out, start + jnp.arange(size)), None

    return jax.lax.scan(group, out, first)[0]


def decode(
    q: Float[Array, "B Hq Dk"],
    cache: PagedRows,
    page_table: Int32[Array | np.ndarray, "B M"],
    lengths: Int32[Array | np.ndarray, "B"],
    scale: float,
) -> Float32[Array, "B Hq Dv"]:
    """`paged_attention_decode`: see `pallas_kernels.ops`."""
    return _attend(q[:, None], cache, page_table, lengths[:, None], scale)[:, 0]


def prefill_at_once(
    q: Float[Array, "T Hq Dk"],
    cache: PagedRows,
    page_table: Int32[Array | np.ndarray, "N M"],
    positions: Int32[Array | np.ndarray, "T"],
    table: ChunkTable,
    scale: float,
) -> Float32[Array, "T Hq Dv"]:
    """`paged_attention_prefill`, every token a request of its own that decodes."""
    index = jnp.arange(q.shape[0]) - jnp.asarray(table.token)[:, None]
    inside = (index >= 0) & (index < jnp.asarray(table.length)[:, None])
    segment = jnp.asarray(table.segment)[jnp.argmax(inside, axis=0)]
    lengths = jnp.where(jnp.any(inside, axis=0), jnp.asarray(positions) + 1, 0)
    return decode_at_once(q, cache, jnp.asarray(page_table)[segment], lengths, scale)


def decode_at_once(
    q: Float[Array, "B Hq Dk"],
    cache: PagedRows,
    page_table: Int32[Array | np.ndarray, "B M"],
    lengths: Int32[Array | np.ndarray, "B"],
    scale: float,
) -> Float32[Array, "B Hq Dv"]:
    """`paged_attention_decode` as it is defined: one softmax over all keys, in float32."""
    batch, heads, _ = q.shape
    seen = jnp.arange(page_table.shape[1] * PAGE) < lengths[:, None]
    keys, values = (
        jnp.where(
            seen[..., None, None],
            pages[cache.layer, page_table].reshape(*seen.shape, -1, pages.shape[-1]),
            0,
        ).astype(jnp.float32)
        for pages in (cache.keys, cache.values)
    )
    grouped = q.astype(jnp.float32).reshape(batch, keys.shape[2], -1, q.shape[2])
    scores = scale * jnp.einsum("bhgd,bjhd->bhgj", grouped, keys, precision="highest")
    seen = seen[:, None, None, :]
    weights = jnp.where(seen, jax.nn.softmax(jnp.where(seen, scores, LOWEST), axis=-1), 0.0)
    out = jnp.einsum("bhgj,bjhd->bhgd", weights, values[..., : cache.width], precision="highest")
    return out.reshape(batch, heads, cache.width)
