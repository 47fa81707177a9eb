"""Prefill of KDA on Hopper, a decay per key channel: a launch whose makers (`kda_prep`) take all
chunks side by side and whose walkers (`kda_walk`) take them in order.

A log decay below -10 a token counts as -10: what a state keeps of it is below the precision of the
bfloat16 products here.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chunks import CHUNK, ChunkTable
from pallas_kernels.mgpu import kda_prep, kda_room, kda_walk
from pallas_kernels.mgpu.common import no_hopper
from pallas_kernels.mgpu.kda_fetch import Source
from pallas_kernels.mgpu.kda_prep import DIM, PARAMS, Prepared
from pallas_kernels.mgpu.kda_room import WARPGROUPS
from pallas_kernels.mgpu.kda_state import COLUMNS
from pallas_kernels.mgpu.kda_walk import Tiling
from pallas_kernels.mgpu.pipeline import Plan, Runs, multiprocessors, new_marks, role, runs
from pallas_kernels.walk import DeltaOut


def default_tiling(chunks: int, heads: int) -> Tiling:
    """Makers of few items where there are few, for every multiprocessor to have two makers."""
    turns = chunks * heads // (2 * WARPGROUPS * multiprocessors())
    return Tiling(turns=min(max(turns, 1), Tiling.turns))


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
    tiling: Tiling | None = None,
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
    tiling = tiling or default_tiling(table.token.shape[0], q.shape[1])
    o, final, boundary = _launch(
        (q, k, g, beta), v, initial, kept, table, num_boundaries, tiling, interpret
    )
    return DeltaOut(o[:tokens], final, boundary[:num_boundaries])


def _launch(inputs, v, initial, keep, table, num_boundaries: int, tiling: Tiling, interpret: Any):
    """o `[T, H, V]`, final and boundary states."""
    (tokens, heads, width), decays = v.shape, inputs[2].dtype
    segments, chunks, across = initial.shape[0], table.token.shape[0], width // COLUMNS
    plan = Plan(
        chunks=chunks,
        heads=heads,
        side=WARPGROUPS,
        turns=tiling.turns,
        walkers=heads * across,
        runs=segments,
        sms=multiprocessors(),
        lead=tiling.lead,
    )
    # A single segment is a single run: no kernel has to count before this one.
    found = () if segments == 1 else runs(table, segments, num_boundaries)
    marks = jax.new_ref(new_marks(chunks, heads))
    kept = () if keep is None else (keep,)

    def block(*refs):
        (q, k, g, beta), refs = refs[:4], refs[4:]
        table, refs = ChunkTable(*refs[:8]), refs[8:]
        ordered, refs = Runs(*refs[:3]) if found else None, refs[len(found) :]
        (marks, v, initial), refs = refs[:3], refs[3:]
        keep, (o, final, boundary, *left) = refs[0] if kept else None, refs[len(kept) :]
        prepared, states = Prepared(*left), (initial, keep, final, boundary)
        mine = role(plan, ordered, lax.axis_index("block"))

        @pl.when(mine.walks)
        def _():
            work = kda_walk.part(ordered, mine, chunks, across, num_boundaries)
            pl.run_scoped(
                lambda **scratch: kda_walk.play(
                    work, table, prepared, marks, v, states, o, scratch
                ),
                **kda_walk.shared_memory(tiling, bool(interpret)),
                collective_axes="warpgroup",
            )

        @pl.when(~mine.walks)
        def _():
            source = Source(q, k, g, beta, table.token, table.length)
            pl.run_scoped(
                lambda **scratch: kda_prep.make(
                    plan.items(mine.maker), source, prepared, marks, interpret, scratch
                ),
                **kda_room.shared_memory(decays, bool(interpret)),
                collective_axes="warpgroup",
            )

    o, final, boundary, *_ = plgpu.kernel(
        block,
        out_type=(
            jax.ShapeDtypeStruct((tokens, heads, width), jnp.float32),
            jax.ShapeDtypeStruct(initial.shape, jnp.float32),
            jax.ShapeDtypeStruct((max(1, num_boundaries), *initial.shape[1:]), jnp.float32),
            *kda_prep.shapes(chunks, heads),
        ),
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=PARAMS,
        interpret=interpret,
        kernel_name="kda_prefill",
    )(*inputs, *table, *found, marks, v, initial, *kept)
    return o, final, boundary
