"""The state of KDA walked through the chunks of a batch, on Hopper.

A block of threads takes one run, head and half of the value columns. A run is the chunks from one
that starts at zero or at a slot to the last that continues or merges with what it left; runs and
heads are independent. Of its three warpgroups the loader copies what `kda_prep` left of each
chunk, and v, into three rings of slots; one carries the state, which is serial (`kda_state`); one
makes the outputs from the copies of it that are left behind (`kda_output`).
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chunks import CHUNK, ChunkTable
from pallas_kernels.mgpu import kda_output, kda_state
from pallas_kernels.mgpu.common import drain, rows, seen, visit_chunks
from pallas_kernels.mgpu.kda_output import STORED
from pallas_kernels.mgpu.kda_prep import (
    DIM,
    K_START,
    PARAMS,
    Q_START,
    UPDATE,
    Prepared,
)
from pallas_kernels.mgpu.kda_state import COLUMNS, COPIES, Work
from pallas_kernels.mgpu.kda_tile import SWIZZLED
from pallas_kernels.mgpu.pipeline import Runs, runs

LOADER, STATER, OUTPUTTER = range(3)


@dataclass(frozen=True)
class Tiling:
    """Slots of what a step of the state reads first and last, and of what the outputs read; blocks
    of threads for `kda_prep`, of which two fit into each of 132 multiprocessors."""

    start_slots: int = 3
    end_slots: int = 2
    query_slots: int = 2
    prep_blocks: int = 264

    @property
    def shared_bytes(self) -> int:
        start = 2 * CHUNK * (DIM + COLUMNS) + 4 * DIM
        end = 2 * CHUNK * DIM
        query = 2 * (CHUNK * DIM + CHUNK * CHUNK)
        copy = 2 * COLUMNS * (DIM + CHUNK)
        rings = self.start_slots * start + self.end_slots * end + self.query_slots * query
        return rings + COPIES * copy + 4 * CHUNK * COLUMNS


def walk(
    prepared: Prepared,
    v: jax.Array,
    initial: jax.Array,
    keep: jax.Array | None,
    table: ChunkTable,
    num_boundaries: int,
    tiling: Tiling,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """o `[T, H, V]`, final and boundary states, see `ops.delta_prefill`.

    v `[T, H, V]` bfloat16; initial `[N, H, 128, V]` float32; keep `[H, 128]` int32.
    """
    (tokens, heads, value_dim), segments = v.shape, initial.shape[0]
    # A single segment is a single run: no kernel has to count before this one.
    found = () if segments == 1 else runs(table, segments, num_boundaries)
    some = (*found, *(() if keep is None else (keep,)))

    def kda_walk(*refs):
        *inputs, o, final, boundary = refs
        prepared, (v, initial), rest = Prepared(*inputs[:3]), inputs[3:5], inputs[5:]
        table, some = ChunkTable(*rest[: len(ChunkTable._fields)]), rest[len(ChunkTable._fields) :]
        schedule = Runs(*some[:3]) if found else None
        grid = segments, heads, value_dim // COLUMNS
        work = _work(schedule, grid, table, num_boundaries)
        states = initial, None if keep is None else some[-1], final, boundary
        pl.run_scoped(
            lambda **scratch: _block(work, table, prepared, v, states, o, scratch),
            **_scratch(tiling, bool(interpret)),
            collective_axes="warpgroup",
        )

    shape = jax.ShapeDtypeStruct
    o, final, boundary = plgpu.kernel(
        kda_walk,
        out_type=(
            shape((tokens, heads, value_dim), jnp.float32),
            shape(initial.shape, jnp.float32),
            shape((max(1, num_boundaries), *initial.shape[1:]), jnp.float32),
        ),
        grid=(segments * heads * (value_dim // COLUMNS),),
        grid_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=PARAMS,
        interpret=interpret,
        kernel_name="kda_walk",
    )(*prepared, v, initial, *table, *some)
    return o, final, boundary[:num_boundaries]


def _work(
    schedule: Runs | None, grid: tuple[int, int, int], table: ChunkTable, boundaries: int
) -> Work:
    segments, heads, across = grid
    block = lax.axis_index("block")
    unit = lax.div(block, across)
    rank, head = lax.div(unit, heads), lax.rem(unit, heads)
    columns = pl.ds(lax.rem(block, across) * COLUMNS, COLUMNS)
    if schedule is None:
        chunks = table.start.shape[0]
        return Work(rank, head, columns, 0, chunks, None, None, boundaries)
    first, stop = schedule.first[rank], schedule.stop[rank]
    listed, used = schedule.counts[0], schedule.counts[1]
    return Work(rank, head, columns, first, stop, listed, used, boundaries)


def _scratch(tiling: Tiling, interpreted: bool) -> dict[str, Any]:
    def operand(*shape: int) -> Any:
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=SWIZZLED)

    starts, ends, queries = tiling.start_slots, tiling.end_slots, tiling.query_slots
    scratch = {
        "k_start": operand(starts, CHUNK, DIM),
        "values": rows((starts, CHUNK, COLUMNS), jnp.bfloat16, interpreted),
        "update": operand(ends, CHUNK, DIM),
        "decay": plgpu.SMEM((starts, DIM), jnp.float32),
        "q_start": operand(queries, CHUNK, DIM),
        "attend": operand(queries, CHUNK, CHUNK),
        "state": operand(COPIES, COLUMNS, DIM),
        "rest": operand(COPIES, COLUMNS, CHUNK),
        "out": rows((COLUMNS // STORED, CHUNK, STORED), jnp.float32, interpreted),
        "starts_full": plgpu.Barrier(num_arrivals=3, num_barriers=starts),
        "starts_free": plgpu.Barrier(num_barriers=starts),
        "ends_full": plgpu.Barrier(num_barriers=ends),
        "ends_free": plgpu.Barrier(num_barriers=ends),
        "queries_full": plgpu.Barrier(num_arrivals=2, num_barriers=queries),
        "queries_free": plgpu.Barrier(num_barriers=queries),
        "handed": plgpu.Barrier(num_barriers=COPIES),
        "taken": plgpu.Barrier(num_barriers=COPIES),
    }
    return scratch | ({"spare": operand(COLUMNS, DIM)} if interpreted else {})


def _block(work: Work, table, prepared, v, states, o, scratch) -> None:
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == LOADER)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        done = _load_chunks(work, table, prepared, v, scratch)
        drain(scratch["starts_free"], done, begun=done + 1)
        drain(scratch["ends_free"], done)
        drain(scratch["queries_free"], done)

    @pl.when(warpgroup == STATER)
    def _():
        plgpu.set_max_registers(232, action="increase")
        done = kda_state.carry(work, table, states, scratch)
        drain(scratch["taken"], done)

    @pl.when(warpgroup == OUTPUTTER)
    def _():
        kda_output.emit(work, table, o, scratch)
        kda_output.clear(work, table, o, scratch)


def _load_chunks(work: Work, table, prepared, v, scratch) -> Any:
    def load(ring: str, at, copies) -> None:
        slots = scratch[f"{ring}_full"].shape[0]
        slot = lax.rem(at, slots)

        @pl.when(at >= slots)
        def _():
            plgpu.barrier_wait(scratch[f"{ring}_free"].at[slot])

        for name, source in copies.items():
            target, full = scratch[name], scratch[f"{ring}_full"].at[slot]
            if name == "values":
                target, _ = seen(target, "spare" in scratch)
            plgpu.copy_gmem_to_smem(source, target.at[slot], full)

    def start(chunk, at):
        values = v.at[pl.ds(table.token[chunk], CHUNK), work.head, work.columns]
        wide, _, decay = (x.at[chunk, work.head] for x in prepared)
        load("starts", at, {"values": values, "k_start": wide.at[K_START], "decay": decay})

    def visit(chunk, at):
        start(chunk, at)
        wide, attend, _ = (x.at[chunk, work.head] for x in prepared)
        load("ends", at, {"update": wide.at[UPDATE]})
        load("queries", at, {"q_start": wide.at[Q_START], "attend": attend})

    done = visit_chunks(work.first, work.stop, table.length, visit)
    # The state reads values a chunk ahead, behind the last one too.
    start(0, done)
    return done
