"""Chunked prefill of the gated delta rule with one decay a head, on Hopper: what is made ready for
`gdn_within`, which takes all chunks side by side, and `gdn_walk`, which takes them in order."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.chunks import CHUNK, ChunkTable
from pallas_kernels.mgpu.common import no_hopper
from pallas_kernels.mgpu.gdn_tiles import GROUP, KEY
from pallas_kernels.mgpu.gdn_walk import walk
from pallas_kernels.mgpu.gdn_within import within
from pallas_kernels.mgpu.gdn_work import COLUMNS, Tiling
from pallas_kernels.walk import DeltaOut

SMS = 132
"""Multiprocessors of an H100 or H200."""


def default_tiling(segments: int, heads: int, width: int) -> Tiling:
    """Blocks of 64 columns while all of them run at once, an SM each; beyond, staters in pairs,
    for then what the blocks read is the bound."""
    blocks = segments * heads * width // COLUMNS
    return Tiling(2, 1, staters=2) if blocks > SMS and not width % (2 * COLUMNS) else Tiling()


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
    tiling = tiling or default_tiling(initial.shape[0], heads, width)
    table = ChunkTable(*(jnp.asarray(column) for column in table))
    kept = None if keep is None else keep.astype(jnp.int32)
    # Copies take arrays of at least a chunk. What lies past the end reads as zeros on the device,
    # but not where it is interpreted.
    missing = max(0, CHUNK - tokens)
    g, beta = (jnp.pad(x, ((0, missing), (0, 0))) for x in (g, beta))
    missing = CHUNK if interpret else missing
    q, k, v = (jnp.pad(x, ((0, missing), (0, 0), (0, 0))) for x in (q, k, v))
    local = within(q, k, g, beta, table, width, num_boundaries, interpret)
    o, final, boundary = walk(
        local, q, k, v, initial, kept, table, num_boundaries, tiling, interpret
    )
    return DeltaOut(o[:tokens], final, boundary[:num_boundaries])
