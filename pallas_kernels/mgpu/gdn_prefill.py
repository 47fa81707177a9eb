"""Chunked prefill of the gated delta rule with one decay a head, on Hopper: a launch whose makers
(`gdn_within`) take all chunks side by side and whose walkers (`gdn_walk`) take them in order."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chunks import CHUNK, ChunkTable
from pallas_kernels.mgpu import gdn_within
from pallas_kernels.mgpu.common import no_hopper
from pallas_kernels.mgpu.gdn_tiles import GROUP, KEY, PARAMS
from pallas_kernels.mgpu.gdn_walk import part, walk
from pallas_kernels.mgpu.gdn_within import WARPGROUPS, Within, make
from pallas_kernels.mgpu.gdn_work import COLUMNS, Shared, Tiling, shared_memory
from pallas_kernels.mgpu.pipeline import Plan, Runs, multiprocessors, new_marks, role, runs
from pallas_kernels.walk import DeltaOut

DEFAULT = Tiling()
_COLUMNS = [f"table.{name}" for name in ChunkTable._fields]
"""Of the table among the arrays of a launch."""


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
    tiling: Tiling = DEFAULT,
    interpret: Any = None,
) -> DeltaOut:
    """`delta_prefill`: see `pallas_kernels.ops`."""
    (tokens, heads, width), segments = v.shape, initial.shape[0]
    table = ChunkTable(*(jnp.asarray(column) for column in table))
    chunks, key_heads = table.token.shape[0], q.shape[1]
    arrays = _padded(q, k, v, g, beta, interpret) | {"initial": initial}
    arrays |= dict(zip(_COLUMNS, table, strict=True))
    arrays |= {} if keep is None else {"keep": keep.astype(jnp.int32)}
    # A single segment is a single run: no kernel has to count before this one.
    arrays |= runs(table, segments, num_boundaries)._asdict() if segments > 1 else {}
    arrays["marks"] = jax.new_ref(new_marks(chunks, key_heads))
    walkers = heads * width // COLUMNS
    # Interpreted blocks run one after another: no walker before a maker.
    sms = chunks * key_heads if interpret else multiprocessors()
    plan = Plan(chunks, key_heads, WARPGROUPS, walkers, segments, sms)
    out = {
        "o": jax.ShapeDtypeStruct((max(tokens, CHUNK), heads, width), jnp.float32),
        "final": jax.ShapeDtypeStruct(initial.shape, jnp.float32),
        "boundary": jax.ShapeDtypeStruct((max(1, num_boundaries), *initial.shape[1:]), jnp.float32),
        **gdn_within.shapes(chunks, heads)._asdict(),
    }
    kernel = plgpu.kernel(
        partial(_block, plan, (*arrays, *out), num_boundaries, tiling, interpret),
        out_type=tuple(out.values()),
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        compiler_params=PARAMS,
        interpret=interpret,
        kernel_name="gdn_prefill",
    )
    o, final, boundary, *_ = kernel(*arrays.values())
    return DeltaOut(o[:tokens], final, boundary[:num_boundaries])


def _padded(q, k, v, g, beta, interpret: Any) -> dict[str, Any]:
    """Arrays of at least a chunk, as copies take them. What lies past the end reads as zeros on the
    device, but not where it is interpreted."""
    missing = max(0, CHUNK - q.shape[0])
    g, beta = (jnp.pad(x, ((0, missing), (0, 0))) for x in (g, beta))
    missing = CHUNK if interpret else missing
    q, k, v = (jnp.pad(x, ((0, missing), (0, 0), (0, 0))) for x in (q, k, v))
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta}


def _block(plan: Plan, names, num_boundaries: int, tiling: Tiling, interpret: Any, *refs) -> None:
    """What a block of threads does with references to arrays of these names."""
    arrays = dict(zip(names, refs, strict=True))
    found = Runs(*(arrays[x] for x in Runs._fields)) if plan.runs > 1 else None
    table, local = (
        kind(*(arrays[x] for x in fields))
        for kind, fields in ((ChunkTable, _COLUMNS), (Within, Within._fields))
    )
    shared = Shared(table, local, arrays, num_boundaries, tiling, interpret)
    mine = role(plan, found, lax.axis_index("block"))

    @pl.when(mine.walks)
    def _():
        own = part(shared, found, mine)
        pl.run_scoped(
            lambda **scratch: walk(own._replace(scratch=scratch)),
            **shared_memory(tiling, interpret),
            collective_axes="warpgroup",
        )

    @pl.when(~mine.walks)
    def _():
        pl.run_scoped(
            lambda **scratch: make(mine.maker, shared, scratch),
            **gdn_within.shared_memory(interpret),
            collective_axes="warpgroup",
        )
