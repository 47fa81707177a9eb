"""Chunked prefill of the gated delta rule with one decay a head, on Hopper: a launch whose makers
(`gdn_within`) take all chunks side by side and whose walkers (`gdn_walk`) take them in order."""

from collections.abc import Callable
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
from pallas_kernels.mgpu.gdn_walk import part, play
from pallas_kernels.mgpu.gdn_within import WARPGROUPS, Within, make
from pallas_kernels.mgpu.gdn_work import COLUMNS, Shared, Tiling, Work, shared_memory
from pallas_kernels.mgpu.pipeline import (
    Plan,
    Role,
    Runs,
    multiprocessors,
    new_marks,
    role,
    runs,
)
from pallas_kernels.walk import DeltaOut
_COLUMNS = [f"table.{name}" for name in ChunkTable._fields]
"""Of the table among the arrays of a launch."""


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
    operands = {"q": q, "k": k, "g": g, "beta": beta} | dict(zip(_COLUMNS, table, strict=True))
    segments, chunks = initial.shape[0], table.token.shape[0]
    walked = {"v": v, "initial": initial} | ({} if kept is None else {"keep": kept})
    if segments > 1:
        walked |= runs(table, segments, num_boundaries)._asdict()
    made = gdn_within.shapes(chunks, heads)._asdict()
    out = {
        "o": jax.ShapeDtypeStruct((max(tokens, CHUNK), heads, width), jnp.float32),
        "final": jax.ShapeDtypeStruct(initial.shape, jnp.float32),
        "boundary": jax.ShapeDtypeStruct((max(1, num_boundaries), *initial.shape[1:]), jnp.float32),
    }
    plan = Plan(
        chunks=chunks,
        heads=q.shape[1],
        side=WARPGROUPS,
        turns=1,
        walkers=heads * width // (COLUMNS * tiling.staters),
        runs=segments,
        sms=multiprocessors(),
        lead=tiling.lead,
    )
    launch = partial(_launch, plan, tiling, num_boundaries, interpret)
    if tiling.together:
        marks = {"marks": jax.new_ref(new_marks(chunks, q.shape[1]))}
        o, final, boundary, *_ = launch(_either, plan.blocks, operands | walked | marks, out | made)
    else:
        local = launch(_maker, plan.makers, operands, made)
        ready = dict(zip(made, local, strict=True))
        blocks = plan.walkers * plan.runs
        o, final, boundary = launch(_walker, blocks, operands | walked | ready, out)
    return DeltaOut(o[:tokens], final, boundary[:num_boundaries])


def _either(plan: Plan, found: Runs | None, block: Any) -> Role:
    return role(plan, found, block)


def _maker(plan: Plan, found: Runs | None, block: Any) -> Role:
    return Role(False, block, None, None)


def _walker(plan: Plan, found: Runs | None, block: Any) -> Role:
    return Role(True, None, lax.div(block, plan.walkers), lax.rem(block, plan.walkers))


def _launch(
    plan: Plan,
    tiling: Tiling,
    num_boundaries: int,
    interpret: Any,
    cast: Callable[[Plan, Runs | None, Any], Role],
    blocks: int,
    operands: dict[str, Any],
    out: dict[str, Any],
) -> list[jax.Array]:
    """`out` as `blocks` make it whose roles `cast` gives."""

    def body(*refs):
        arrays = dict(zip((*operands, *out), refs, strict=True))
        found = Runs(*map(arrays.get, Runs._fields)) if "written" in arrays else None
        mine = cast(plan, found, lax.axis_index("block"))
        shared = Shared(
            ChunkTable(*map(arrays.get, _COLUMNS)),
            Within(*map(arrays.get, Within._fields)),
            arrays.get("marks"),
            arrays,
            num_boundaries,
            tiling,
            interpret,
        )

        def walk():
            own = part(shared, found, mine)
            pl.run_scoped(
                lambda **scratch: play(Work(*own, shared, scratch)),
                **shared_memory(tiling, interpret),
                collective_axes="warpgroup",
            )

        def make_ready():
            pl.run_scoped(
                lambda **scratch: make(plan.items(mine.maker), shared, scratch),
                **gdn_within.shared_memory(interpret),
                collective_axes="warpgroup",
            )

        if isinstance(mine.walks, bool):
            (walk if mine.walks else make_ready)()
        else:
            pl.when(mine.walks)(walk)
            pl.when(~mine.walks)(make_ready)

    return plgpu.kernel(
        body,
        out_type=tuple(out.values()),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=WARPGROUPS if cast is _maker else 2 + tiling.staters,
        thread_name="warpgroup",
        compiler_params=PARAMS,
        interpret=interpret,
        kernel_name="gdn_prefill",
    )(*operands.values())
