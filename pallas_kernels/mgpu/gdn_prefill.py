"""Chunked prefill of the gated delta rule with one decay a head, on Hopper: a launch whose makers
(`gdn_within`) take all chunks side by side and whose walkers (`gdn_walk`) take them in order."""

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
from pallas_kernels.mgpu.gdn_walk import part, play
from pallas_kernels.mgpu.gdn_within import WARPGROUPS, Within, make
from pallas_kernels.mgpu.gdn_work import COLUMNS, Shared, Tiling, Work, shared_memory
from pallas_kernels.mgpu.pipeline import Plan, Runs, multiprocessors, new_marks, role, runs
from pallas_kernels.walk import DeltaOut

def default_tiling(segments: int, heads: int, width: int) -> Tiling:
    """Walkers of 64 columns while they leave makers half of the multiprocessors; beyond, staters in
    pairs, for then what the walkers read is the bound."""
    walkers = segments * heads * width // COLUMNS
    many = walkers > multiprocessors() // 2 and not width % (2 * COLUMNS)
    return Tiling(2, 2, staters=2) if many else Tiling()


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
    o, final, boundary = _launch(
        (q, k, g, beta), v, initial, kept, table, num_boundaries, tiling, interpret
    )
    return DeltaOut(o[:tokens], final, boundary[:num_boundaries])


def _launch(inputs, v, initial, keep, table, num_boundaries: int, tiling: Tiling, interpret: Any):
    """o `[max(T, 64), H, V]`, final and boundary states."""
    (tokens, heads, width), key_heads = v.shape, inputs[1].shape[1]
    segments, chunks = initial.shape[0], table.token.shape[0]
    plan = Plan(
        chunks=chunks,
        heads=key_heads,
        side=WARPGROUPS,
        turns=1,
        walkers=heads * width // (COLUMNS * tiling.staters),
        runs=segments,
        sms=multiprocessors(),
        lead=tiling.lead,
    )
    found = () if segments == 1 else runs(table, segments, num_boundaries)
    marks = jax.new_ref(new_marks(chunks, key_heads))
    kept = () if keep is None else (keep,)
    names = ("v", "initial", *(["keep"] if kept else []), "o", "final", "boundary")

    def block(*refs):
        inputs, refs = refs[:4], refs[4:]
        table, refs = ChunkTable(*refs[:8]), refs[8:]
        ordered, (marks, *rest) = Runs(*refs[:3]) if found else None, refs[len(found) :]
        arrays, local = dict(zip(names, rest[:-3], strict=True)), Within(*rest[-3:])
        shared = Shared(
            table,
            local,
            marks,
            arrays | dict(zip("qk", inputs, strict=False)),
            num_boundaries,
            tiling,
            interpret,
        )
        mine = role(plan, ordered, lax.axis_index("block"))

        @pl.when(mine.walks)
        def _():
            own = part(shared, ordered, mine)
            pl.run_scoped(
                lambda **scratch: play(Work(*own, shared, scratch)),
                **shared_memory(tiling, interpret),
                collective_axes="warpgroup",
            )

        @pl.when(~mine.walks)
        def _():
            pl.run_scoped(
                lambda **scratch: make(plan.items(mine.maker), inputs, shared, scratch),
                **gdn_within.shared_memory(interpret),
                collective_axes="warpgroup",
            )

    o, final, boundary, *_ = plgpu.kernel(
        block,
        out_type=(
            jax.ShapeDtypeStruct((max(tokens, CHUNK), heads, width), jnp.float32),
            jax.ShapeDtypeStruct(initial.shape, jnp.float32),
            jax.ShapeDtypeStruct((max(1, num_boundaries), *initial.shape[1:]), jnp.float32),
            *gdn_within.shapes(chunks, heads),
        ),
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=2 + tiling.staters,
        thread_name="warpgroup",
        compiler_params=PARAMS,
        interpret=interpret,
        kernel_name="gdn_prefill",
    )(*inputs, *table, *found, marks, v, initial, *kept)
    return o, final, boundary
