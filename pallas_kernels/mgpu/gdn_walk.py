"""The walk over chunks in the prefill of the gated delta rule, on Hopper.

`gdn_within` leaves what the tokens of a chunk are to each other (T - I, P); here a block of threads
walks the chunks of a run, which is a segment and those that merge with it, for one value head and
64 value columns, behind those that make them ready (`pipeline`):

    X = beta (V - exp(G) K^ S);    U = X + (T - I) X;    O = exp(G) Q^ S + P U
    S <- exp(G_last) S + K^^T (exp(G_last - G) U)

with K^, Q^ the normalised keys and queries, whose norms are in the factors. Of its warpgroups

- the loader copies the operands of chunks into two rings of slots;
- the stater makes X, U and S transposed, a value column a row, so that what one product leaves in
  registers is an operand of the next one: nothing between two chunks waits for shared memory;
- the outputter makes O from the bfloat16 copies of S and U that the stater leaves it in shared
  memory, up to two chunks behind.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chunks import CHUNK
from pallas_kernels.mgpu.common import drain, seen, visit_chunks
from pallas_kernels.mgpu.gdn_output import clear, emit, fill
from pallas_kernels.mgpu.gdn_state import carry
from pallas_kernels.mgpu.gdn_tiles import GROUP, HALF
from pallas_kernels.mgpu.gdn_within import QUERY
from pallas_kernels.mgpu.gdn_work import COLUMNS, HALVES, Shared, Work
from pallas_kernels.mgpu.pipeline import Role, Runs, await_ready

LOADER, OUTPUTTER, STATER = range(3)
_REGISTERS = 40, 160, 240


def part(shared: Shared, runs: Runs | None, role: Role) -> Work:
    """The work of a walker, without memory; those of a head's columns lie side by side, for they
    read the same."""
    across = shared.arrays["v"].shape[2] // COLUMNS
    head, column = lax.div(role.walker, across), lax.rem(role.walker, across)
    if runs is None:
        run = 0, shared.table.token.shape[0], None, None
    else:
        run = runs.first[role.run], runs.stop[role.run], runs.counts[0], runs.counts[1]
    return Work(role.run, head, pl.ds(column * COLUMNS, COLUMNS), *run, shared, {})


def walk(w: Work) -> None:
    """What a walker does."""
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == LOADER)
    def _():
        plgpu.set_max_registers(_REGISTERS[LOADER], action="decrease")
        done = _load_chunks(w)
        drain(w.scratch["keys_free"], done, begun=done + 1)
        drain(w.scratch["queries_free"], done)

    @pl.when(warpgroup == STATER)
    def _():
        plgpu.set_max_registers(_REGISTERS[STATER], action="increase")
        drain(w.scratch["taken"], carry(w))

    @pl.when(warpgroup == OUTPUTTER)
    def _():
        plgpu.set_max_registers(_REGISTERS[OUTPUTTER], action="decrease")
        fill(w)
        visit_chunks(w.first, w.stop, w.table.length, partial(emit, w))
        clear(w)


def _load_chunks(w: Work) -> Any:
    """Keys run a chunk ahead of queries, which come free only behind the output."""
    arrays, s = w.arrays, w.scratch
    key_head = lax.div(w.head, GROUP)

    def copy_rows(name, chunk, target, full, head, columns):
        source = arrays[name].at[pl.ds(w.table.token[chunk], CHUNK), head, columns]
        plgpu.copy_gmem_to_smem(source, seen(s[name], w.interpret)[0].at[target], full)

    def begin(name, at, slots):
        slot = lax.rem(at, slots)

        @pl.when(at >= slots)
        def _():
            plgpu.barrier_wait(s[name + "_free"].at[slot])

        return slot, s[name + "_full"].at[slot]

    def key_side(chunk, at):
        slot, full = begin("keys", at, w.tiling.key_slots)
        local = [x.at[chunk, w.head] for x in (w.local.solve, w.local.vectors)]
        for h in HALVES:
            copy_rows("k", chunk, 2 * slot + h, full, key_head, pl.ds(h * HALF, HALF))
        copy_rows("v", chunk, slot, full, w.head, w.columns)
        plgpu.copy_gmem_to_smem(local[1].at[pl.ds(0, QUERY)], s["key_vectors"].at[slot], full)
        plgpu.copy_gmem_to_smem(local[0], s["solve"].at[slot], full)

    def query_side(chunk, at):
        slot, full = begin("queries", at, w.tiling.query_slots)
        local = [x.at[chunk, w.head] for x in (w.local.attend, w.local.vectors)]
        for h in HALVES:
            copy_rows("q", chunk, 2 * slot + h, full, key_head, pl.ds(h * HALF, HALF))
        plgpu.copy_gmem_to_smem(local[0], s["attend"].at[slot], full)
        plgpu.copy_gmem_to_smem(local[1].at[QUERY], s["query_vector"].at[slot], full)

    def step(chunk, carry):
        done, before, ready = carry
        some = (w.table.length[chunk] > 0).astype(jnp.int32)

        def wait(_, ready):
            return chunk + await_ready(arrays["marks"], key_head, chunk, w.interpret)

        # A loop of one turn or none: a value of a branch.
        ready = lax.fori_loop(0, some * (chunk >= ready).astype(jnp.int32), wait, ready)

        @pl.when(some > 0)
        def _():
            key_side(chunk, done)

            @pl.when(done > 0)
            def _():
                query_side(before, done - 1)

        return done + some, jnp.where(some > 0, chunk, before), ready

    zero = jnp.int32(0)
    done, before, _ = lax.fori_loop(w.first, w.stop, step, (zero, zero, zero))

    @pl.when(done > 0)
    def _():
        # The stater takes the values of a chunk while it makes the state behind the one before.
        key_side(before, done)
        query_side(before, done - 1)

    return done
