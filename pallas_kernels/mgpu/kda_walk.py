"""The state of KDA walked through the chunks of a batch, on Hopper.

A walker takes one run, head and half of the value columns. Of its three warpgroups the loader
copies what `kda_prep` left of each chunk, and v, into three rings of slots, once it is ready; one
carries the state, which is serial (`kda_state`); one makes the outputs from the copies of it that
are left behind (`kda_output`).
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chunks import CHUNK
from pallas_kernels.mgpu import kda_output, kda_state
from pallas_kernels.mgpu.common import rows, seen
from pallas_kernels.mgpu.kda_output import STORED
from pallas_kernels.mgpu.kda_prep import DIM, K_START, Q_START, UPDATE, Prepared
from pallas_kernels.mgpu.kda_state import COLUMNS, COPIES, Work
from pallas_kernels.mgpu.kda_tile import SWIZZLED
from pallas_kernels.mgpu.pipeline import Role, Runs, await_ready

LOADER, STATER, OUTPUTTER = range(3)
"""Warpgroups."""
_REGISTERS = 40, 240, 160
"""Of a thread of each."""


@dataclass(frozen=True)
class Tiling:
    """Slots of what a step of the state reads first and last, and of what the outputs read; `turns`
    and `lead` of a `pipeline.Plan`."""

    start_slots: int = 3
    end_slots: int = 2
    query_slots: int = 2
    turns: int = 4
    lead: int = 28

    @property
    def shared_bytes(self) -> int:
        start = 2 * CHUNK * (DIM + COLUMNS) + 4 * DIM
        end = 2 * CHUNK * DIM
        query = 2 * (CHUNK * DIM + CHUNK * CHUNK)
        copy = 2 * COLUMNS * (DIM + CHUNK)
        rings = self.start_slots * start + self.end_slots * end + self.query_slots * query
        return rings + COPIES * copy + 4 * CHUNK * COLUMNS


def part(runs: Runs | None, role: Role, chunks: int, across: int, boundaries: int) -> Work:
    """Of a walker; those of a head, `across` of them, lie side by side, for they read the same."""
    head, column = lax.div(role.walker, across), lax.rem(role.walker, across)
    place = role.run, head, pl.ds(column * COLUMNS, COLUMNS)
    if runs is None:
        return Work(*place, 0, chunks, None, None, boundaries)
    first, stop = runs.first[role.run], runs.stop[role.run]
    return Work(*place, first, stop, runs.written[0], runs.written[1], boundaries)


def shared_memory(tiling: Tiling, interpreted: bool) -> dict[str, Any]:
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


def play(work: Work, table, prepared: Prepared, marks, v, states, o, scratch) -> None:
    """What a walker does; `states` are initial, keep or None, final, boundary."""
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == LOADER)
    def _():
        plgpu.set_max_registers(_REGISTERS[LOADER], action="decrease")
        done = _load_chunks(work, table, prepared, marks, v, scratch)
        _drain(scratch["starts_free"], done + 1, done)
        _drain(scratch["ends_free"], done, done)
        _drain(scratch["queries_free"], done, done)

    @pl.when(warpgroup == STATER)
    def _():
        plgpu.set_max_registers(_REGISTERS[STATER], action="increase")
        done = kda_state.carry(work, table, states, scratch)
        _drain(scratch["taken"], done, done)

    @pl.when(warpgroup == OUTPUTTER)
    def _():
        plgpu.set_max_registers(_REGISTERS[OUTPUTTER], action="decrease")
        kda_output.fill(work, table, states)
        kda_output.emit(work, table, o, scratch)
        kda_output.clear(work, table, o, scratch)


def _drain(barrier: Any, uses: Any, arrivals: Any) -> None:
    """Wait for the arrivals that no use of a buffer has waited for, so that none is left when the
    block ends."""
    buffers = barrier.shape[0]

    def wait(i, _):
        plgpu.barrier_wait(barrier.at[lax.rem(i, buffers)])

    lax.fori_loop(jnp.maximum(uses - buffers, 0), arrivals, wait, None)


def _load_chunks(work: Work, table, prepared, marks, v, scratch) -> Any:
    interpreted = "spare" in scratch

    def load(ring: str, at, copies) -> None:
        slots = scratch[f"{ring}_full"].shape[0]
        slot = lax.rem(at, slots)

        @pl.when(at >= slots)
        def _():
            plgpu.barrier_wait(scratch[f"{ring}_free"].at[slot])

        for name, source in copies.items():
            target, full = scratch[name], scratch[f"{ring}_full"].at[slot]
            if name == "values":
                target, _ = seen(target, interpreted)
            plgpu.copy_gmem_to_smem(source, target.at[slot], full)

    def start(chunk, at):
        values = v.at[pl.ds(table.token[chunk], CHUNK), work.head, work.columns]
        wide, _, decay = (x.at[chunk, work.head] for x in prepared)
        load("starts", at, {"values": values, "k_start": wide.at[K_START], "decay": decay})

    def step(chunk, carried):
        done, before, ready = carried
        some = (table.length[chunk] > 0).astype(jnp.int32)

        def wait(_, ready):
            return chunk + await_ready(marks, work.head, chunk, interpreted)

        # A loop of one turn or none: a value of a branch.
        ready = lax.fori_loop(0, some * (chunk >= ready).astype(jnp.int32), wait, ready)

        @pl.when(some > 0)
        def _():
            start(chunk, done)
            wide, attend, _ = (x.at[chunk, work.head] for x in prepared)
            load("ends", done, {"update": wide.at[UPDATE]})
            load("queries", done, {"q_start": wide.at[Q_START], "attend": attend})

        return done + some, jnp.where(some > 0, chunk, before), ready

    zero = jnp.int32(0)
    done, before, _ = lax.fori_loop(work.first, work.stop, step, (zero, zero, zero))
    # The state reads values a chunk ahead, behind the last one too.
    start(before, done)
    return done
