"""The walk over chunks in the prefill of the gated delta rule, on Hopper.

`gdn_within` leaves what the tokens of a chunk are to each other (T - I, P); here a block of threads
walks the chunks of a run, which is a segment and those that merge with it, for one value head and
64 or 128 value columns:

    X = beta (V - exp(G) K^ S);    U = X + (T - I) X;    O = exp(G) Q^ S + P U
    S <- exp(G_last) S + K^^T (exp(G_last - G) U)

with K^, Q^ the normalised keys and queries, whose norms are in the factors. Of its warpgroups

- the loader copies the operands of chunks into two rings of slots;
- a stater, or two with 64 columns each, makes X, U and S transposed, a value column a row, so that
  what one product leaves in registers is an operand of the next one: nothing between two chunks
  waits for shared memory;
- the outputter makes O from the bfloat16 copies of S and U that the staters leave it in shared
  memory, up to two chunks behind.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chunks import CHUNK, ChunkTable
from pallas_kernels.mgpu.common import seen
from pallas_kernels.mgpu.gdn_output import clear, emit
from pallas_kernels.mgpu.gdn_state import carry
from pallas_kernels.mgpu.gdn_tiles import GROUP, HALF, PARAMS
from pallas_kernels.mgpu.gdn_within import QUERY, Within
from pallas_kernels.mgpu.gdn_work import COLUMNS, HALVES, Tiling, Work, drain, shared_memory, visit

LOADER, OUTPUTTER, STATER = range(3)
"""Warpgroups; staters are the last."""
_REGISTERS = {1: (40, 160, 240), 2: (24, 104, 192)}
"""Of a thread of each, by the number of staters."""


def walk(
    local: Within,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    initial: jax.Array,
    keep: jax.Array | None,
    table: ChunkTable,
    num_boundaries: int,
    tiling: Tiling,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """o `[max(T, 64), H, V]`, final and boundary states, see `ops.delta_prefill`.

    q, k, v raw, bfloat16; keep `[H, 128]` int32.
    """
    tokens, heads, width = v.shape
    segments, blocks = initial.shape[0], width // (COLUMNS * tiling.staters)
    boundary = jax.new_ref(local.boundary)
    kept = () if keep is None else (keep,)
    names = ("q", "k", "v", "initial", *(["keep"] if kept else []), "boundary", "o", "final")

    def block(*refs, **scratch):
        local = Within(*refs[:4], boundary=None)  # pyright: ignore[reportArgumentType]
        table = ChunkTable(*refs[4:12])
        arrays = dict(zip(names, refs[12:], strict=True))
        shared = table, local, arrays, scratch, num_boundaries, tiling, interpret
        _play(_part(lax.axis_index("item"), blocks, heads, shared))

    o, final = plgpu.kernel(
        block,
        out_type=(
            jax.ShapeDtypeStruct((max(tokens, CHUNK), heads, width), jnp.float32),
            jax.ShapeDtypeStruct(initial.shape, jnp.float32),
        ),
        grid=(segments * heads * blocks,),
        grid_names=("item",),
        num_threads=2 + tiling.staters,
        thread_name="warpgroup",
        scratch_types=shared_memory(tiling, interpret),
        compiler_params=PARAMS,
        interpret=interpret,
        kernel_name="gdn_walk",
    )(*local[:4], *table, q, k, v, initial, *kept, boundary)
    return o, final, jax.freeze(boundary)


def _part(item, blocks: int, heads: int, shared: tuple[Any, ...]) -> Work:
    """The work of a block; those of a head's columns run side by side, for they read the same."""
    row, local = lax.div(item, blocks), shared[1]
    segment, column = lax.div(row, heads), lax.rem(item, blocks) * COLUMNS * shared[5].staters
    run = local.runs[segment, 0], local.runs[segment, 1]
    return Work(segment, lax.rem(row, heads), column, *run, *shared)


def _play(w: Work) -> None:
    warpgroup = lax.axis_index("warpgroup")
    registers = _REGISTERS[w.tiling.staters]

    @pl.when(warpgroup == LOADER)
    def _():
        plgpu.set_max_registers(registers[LOADER], action="decrease")
        done = _load_chunks(w)
        drain(w.scratch["keys_free"], done, w.tiling.key_slots, begun=done + 1)
        drain(w.scratch["queries_free"], done, w.tiling.query_slots)

    @pl.when(warpgroup >= STATER)
    def _():
        plgpu.set_max_registers(registers[STATER], action="increase")
        stater = warpgroup - STATER
        drain(w.scratch["taken"], carry(w, stater), 2, 2 * stater)

    @pl.when(warpgroup == OUTPUTTER)
    def _():
        plgpu.set_max_registers(registers[OUTPUTTER], action="decrease")
        visit(w, partial(emit, w))
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
        for n in range(w.tiling.staters):
            copy_rows("v", chunk, slot * w.tiling.staters + n, full, w.head, w.columns(n))
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
        done, before = carry
        some = (w.table.length[chunk] > 0).astype(jnp.int32)

        @pl.when(some > 0)
        def _():
            key_side(chunk, done)

            @pl.when(done > 0)
            def _():
                query_side(before, done - 1)

        return done + some, jnp.where(some > 0, chunk, before)

    done, before = lax.fori_loop(w.first, w.stop, step, (jnp.int32(0), jnp.int32(0)))

    @pl.when(done > 0)
    def _():
        # Staters take the values of a chunk while they make the state behind the one before.
        key_side(before, done)
        query_side(before, done - 1)

    return done
