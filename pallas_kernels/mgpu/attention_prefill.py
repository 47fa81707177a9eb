"""Packed prompt tokens over the pages of their requests, on Hopper: the kernel of decode once more.

To it, a few consecutive tokens are a request whose queries see a key more each, and whose pages are
those of the segment. Keys are read once for every `tokens` of them, from the second-level cache.
"""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.chunks import CHUNK, ChunkTable
from pallas_kernels.mgpu import attention_decode as kernel
from pallas_kernels.mgpu.common import no_hopper
from pallas_kernels.paged_attention import PagedRows

QUERIES = 32
"""Most queries of a key head that a block takes at once: what the accumulators have room for."""

# Prompts keep all blocks busy without splits, whose parts would take memory for every token.
LATENT = replace(kernel.LATENT, split_pages=256, max_splits=8)
GROUPED = replace(kernel.GROUPED, split_pages=256, max_splits=8)


def refuses(
    q: jax.Array,
    cache: PagedRows,
    page_table: kernel.Integers,
    positions: kernel.Integers,
    table: ChunkTable,
    scale: float,
) -> str | None:
    """Why `prefill` cannot take these arguments here, or None."""
    return no_hopper() or kernel.unfit(q, cache, page_table, positions, scale)


def prefill(
    q: jax.Array,
    cache: PagedRows,
    page_table: kernel.Integers,
    positions: kernel.Integers,
    table: ChunkTable,
    scale: float,
    tiling: kernel.Tiling | None = None,
    interpret: Any = None,
) -> jax.Array:
    """`paged_attention_prefill`: see `pallas_kernels.ops`."""
    count, query_heads, width = q.shape
    heads = math.prod(cache.keys.shape[3:-1])
    group = query_heads // heads
    tokens = 1 << ((QUERIES // group).bit_length() - 1)
    tiling = tiling or (LATENT if cache.keys is cache.values else GROUPED)

    row = jnp.arange(CHUNK)
    first, token, length = (jnp.asarray(x)[:, None] for x in (table.row, table.token, table.length))
    real = ((row >= first) & (row < first + length)).reshape(-1)
    index = (token + row - first).reshape(-1)
    inside = jnp.clip(index, 0, count - 1)
    limits = jnp.where(real, jnp.asarray(positions)[inside] + 1, 0).reshape(-1, tokens)
    owners = jnp.repeat(jnp.asarray(table.segment), CHUNK // tokens)

    queries = q[inside].reshape(-1, tokens, heads, group, width).swapaxes(1, 2)
    queries = queries.reshape(-1, heads, tokens * group, width)
    out = kernel.attend(queries, cache, page_table, owners, limits, scale, tiling, interpret)
    out = out.reshape(-1, heads, tokens, group, cache.width).swapaxes(1, 2)
    out = out.reshape(-1, query_heads, cache.width)
    # Gathered by token, which XLA makes one with what follows; a scatter of `out` it would not.
    token = jnp.where(real, index, count)
    place = jnp.full((count,), -1).at[token].set(jnp.arange(token.shape[0]), mode="drop")
    return jnp.where((place >= 0)[:, None, None], out[place], 0.0)
