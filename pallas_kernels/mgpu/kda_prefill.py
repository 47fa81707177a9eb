"""Prefill of KDA on Hopper, a decay per key channel: chunks made ready side by side, then walked.

A log decay below -10 a token counts as -10: what a state keeps of it is below the precision of the
bfloat16 products here.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.chunks import CHUNK, ChunkTable
from pallas_kernels.mgpu.common import no_hopper
from pallas_kernels.mgpu.kda_prep import DIM, prepare
from pallas_kernels.mgpu.kda_walk import Tiling, walk
from pallas_kernels.walk import DeltaOut

DEFAULT = Tiling()


def refuses(*args: Any) -> str | None:
    """Why `prefill` cannot take these arguments here, or None."""
    return no_hopper() or unfit(*args)


def unfit(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    initial: Any,
    table: ChunkTable,
    keep: Any,
    num_boundaries: int,
) -> str | None:
    """Why the kernels cannot take arrays of these shapes and dtypes, on any machine; or None."""
    if g.ndim != 3:
        return "built for a decay per key channel"
    if {str(x.dtype) for x in (q, k, v)} != {"bfloat16"}:
        return f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}, not bfloat16"
    if q.shape[1] != v.shape[1]:
        return f"{v.shape[1]} value heads on {q.shape[1]} key heads"
    if (q.shape[2], v.shape[2]) != (DIM, DIM):
        return f"keys and values of {q.shape[2]} and {v.shape[2]}, built for {DIM}"
    if not q.shape[0] or not initial.shape[0] or not table.token.shape[0]:
        return "no token, segment or chunk"
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
    *,
    tiling: Tiling = DEFAULT,
    interpret: Any = None,
) -> DeltaOut:
    """`delta_prefill`: see `pallas_kernels.ops`."""
    tokens = q.shape[0]
    table = ChunkTable(*(jnp.asarray(column, jnp.int32) for column in table))
    kept = None if keep is None else keep.astype(jnp.int32)
    # Copies take arrays of at least a chunk.
    short = max(0, CHUNK - tokens)
    q, k, v, g = (jnp.pad(x, ((0, short), (0, 0), (0, 0))) for x in (q, k, v, g))
    beta = jnp.pad(beta, ((0, short), (0, 0)))
    columns = table.token, table.length
    prepared = prepare(q, k, g, beta, *columns, tiling.prep_blocks, interpret)
    o, final, boundary = walk(prepared, v, initial, kept, table, num_boundaries, tiling, interpret)
    return DeltaOut(o[:tokens], final, boundary)
