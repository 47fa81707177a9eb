"""Chunked prefill of the gated delta rule with one decay a head, on Hopper: what is made ready for
`gdn_within`, which takes all chunks side by side, and `gdn_walk`, which takes them in order."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.chunks import CHUNK, CONTINUE, MERGE, ChunkTable
from pallas_kernels.mgpu.common import by_chunk, no_hopper
from pallas_kernels.mgpu.gdn_walk import COLUMNS, Tiling, walk
from pallas_kernels.mgpu.gdn_within import GROUP, KEY, within
from pallas_kernels.walk import DeltaOut

LEAST_DECAY = -90.0
"""exp of it is zero beside anything that a state holds; a sum of 64 keeps its low bits."""


def refuses(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial: jax.Array,
    table: ChunkTable,
    keep: jax.Array | None,
    num_boundaries: int,
) -> str | None:
    """Why `prefill` cannot take these arguments here, or None."""
    return no_hopper() or unfit(q, k, v, g, initial, table)


def unfit(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    initial: jax.Array,
    table: ChunkTable,
) -> str | None:
    """Why the kernel cannot take arrays of these shapes and dtypes, on any machine; or None."""
    if g.ndim != 2:
        return "takes one log decay a head, not one a channel"
    dtypes = {str(x.dtype) for x in (q, k, v)}
    if dtypes != {"bfloat16"}:
        return f"q, k and v are {', '.join(sorted(dtypes))}, not bfloat16"
    if q.shape[2] != KEY or v.shape[2] % COLUMNS:
        return f"keys and values are {q.shape[2]} and {v.shape[2]} wide, not 128"
    if v.shape[1] != GROUP * q.shape[1]:
        return f"{v.shape[1]} value heads on {q.shape[1]} key heads, not two on each"
    if not all((q.shape[0], q.shape[1], v.shape[2], initial.shape[0], table.token.shape[0])):
        return "takes no empty arrays"
    return None


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
    tiling: Tiling | None = None,
    interpret: Any = None,
) -> DeltaOut:
    """`delta_prefill`: see `pallas_kernels.ops`."""
    tokens, heads, width = v.shape
    table = ChunkTable(*(jnp.asarray(column) for column in table))
    length = jnp.asarray(table.length)
    token = jnp.where(length > 0, jnp.asarray(table.token), 0)
    decay = by_chunk(jnp.maximum(g.astype(jnp.float32), LEAST_DECAY), token, length)
    strength = by_chunk(beta.astype(jnp.float32), token, length)
    # Copies of a chunk start anywhere: what lies past the end reads as zeros on the device, but
    # not where it is interpreted; and none is longer than its array.
    missing = CHUNK if interpret else max(0, CHUNK - tokens)
    if missing:
        q, k, v = (jnp.pad(x, ((0, missing), (0, 0), (0, 0))) for x in (q, k, v))
    local = within(q, k, decay, strength, token, length, interpret)
    final = jax.new_ref(initial)
    # No array is empty; where none is asked for, its row is left alone.
    boundaries = max(1, num_boundaries)
    boundary = jax.new_ref(jnp.zeros((boundaries, heads, KEY, width), jnp.float32))
    asked = jnp.asarray(table.boundary)
    asked = jnp.where(asked < num_boundaries, asked, boundaries)
    o = walk(tiling or Tiling(), max(tokens, CHUNK), v.shape[1:], interpret)(
        local.k,
        local.q,
        local.solve,
        local.attend,
        local.vectors,
        v,
        initial,
        jnp.ones((heads, KEY), jnp.int32) if keep is None else keep.astype(jnp.int32),
        segment_table(table, initial.shape[0], num_boundaries),
        jnp.stack([token, table.length, table.final, asked], axis=1),
        table.cu_seqlens,
        final,
        boundary,
    )
    return DeltaOut(o[:tokens], jax.freeze(final), jax.freeze(boundary)[:num_boundaries])


def segment_table(table: ChunkTable, segments: int, num_boundaries: int) -> jax.Array:
    """`[N, 5]` int32: first chunk, chunks, start mode; and where a run starts, its segments and its
    chunks, zero elsewhere."""
    number = jnp.arange(segments)[:, None]
    listed = (table.length > 0) | (table.final < segments) | (table.boundary < num_boundaries)
    mine = (table.segment == number) & listed
    count = jnp.sum(mine, axis=1)
    first = jnp.argmax(mine, axis=1)
    mode = jnp.where(count > 0, table.start[first], CONTINUE)
    starts = (mode != CONTINUE) & (mode != MERGE)
    # A run reaches to the next segment that does not merge; segments not listed end it too.
    after = (number < jnp.arange(segments)) & (mode != MERGE)
    end = jnp.where(jnp.any(after, axis=1), jnp.argmax(after, axis=1), segments)
    inside = (number <= jnp.arange(segments)) & (jnp.arange(segments) < end[:, None])
    columns = (
        first,
        count,
        mode,
        jnp.where(starts, end - number[:, 0], 0),
        jnp.where(starts, jnp.sum(jnp.where(inside, count, 0), axis=1), 0),
    )
    return jnp.stack(columns, axis=1).astype(jnp.int32)
