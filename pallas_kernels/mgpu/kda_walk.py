"""The state of KDA walked through the chunks of a batch, on Hopper.

A block of threads takes one run, head and stretch of value columns. A run is the chunks from one
that starts at zero or at a slot to the last that continues or merges with what it left; runs and
heads are independent. Of its three warpgroups

- the loader copies what `kda_prep` left of each chunk, and v, into two rings of slots;
- the stater keeps the state S in float32 registers and makes, with bfloat16 operands,
  U = solve (V - k_start S) and S = decay S + k_end^T U;
- the outputter makes O = q_start S + attend U from the copies of S and U that the stater leaves it
  in shared memory, up to two chunks behind.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chunks import CHUNK, CONTINUE, MERGE, ZERO, ChunkTable
from pallas_kernels.mgpu.kda_prep import (
    ATTEND,
    DIM,
    K_END,
    K_START,
    PARAMS,
    Q_START,
    SOLVE,
    SWIZZLED,
    Prepared,
)

LOADER, STATER, OUTPUTTER = range(3)
_WGMMA = plgpu.Layout.WGMMA
_KEY_SIDE, _QUERY_SIDE = 5, 2  # copies a slot of each ring takes


@dataclass(frozen=True)
class Tiling:
    """Value columns of a block of threads; slots of what the stater and the outputter read."""

    columns: int = 32
    key_slots: int = 3
    query_slots: int = 2

    @property
    def shared_bytes(self) -> int:
        key_side = 2 * (2 * CHUNK * DIM + CHUNK * CHUNK + CHUNK * self.columns) + 4 * DIM
        query_side = 2 * (CHUNK * DIM + CHUNK * CHUNK)
        left = 2 * self.columns * (2 * DIM + 3 * CHUNK) + 4 * CHUNK * self.columns
        return self.key_slots * key_side + self.query_slots * query_side + left


class Work(NamedTuple):
    """The part of a block: head, first value column, first chunk and the one past the last."""

    run: jax.Array
    head: jax.Array
    columns: Any
    first: jax.Array
    stop: jax.Array


def runs(table: ChunkTable, segments: int) -> jax.Array:
    """First chunk of every run, then the number of chunks that are no padding: `[N + 1]`."""
    begins = (table.start != CONTINUE) & (table.start != MERGE)
    live = (table.length > 0) | (table.final < segments)
    order = jnp.arange(begins.shape[0])
    rank = jnp.sum(begins & (order <= order[:, None]), axis=1)
    return jnp.sum(live & (rank <= jnp.arange(segments + 1)[:, None]), axis=1, dtype=jnp.int32)


def walk(
    prepared: Prepared,
    v: jax.Array,
    initial: jax.Array,
    keep: jax.Array,
    table: ChunkTable,
    num_boundaries: int,
    tiling: Tiling,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """o `[T, H, V]`, final and boundary states, see `ops.delta_prefill`.

    v `[T, H, V]` bfloat16; initial `[N, H, 128, V]` float32; keep `[H, 128]` int32.
    """
    tokens, heads, value_dim = v.shape
    segments, columns = initial.shape[0], tiling.columns
    across = value_dim // columns
    final = jax.new_ref(initial)
    boundary = jax.new_ref(jnp.zeros((num_boundaries + 1, *initial.shape[1:]), jnp.float32))

    def scoped(*refs):
        pl.run_scoped(
            lambda **scratch: _block(refs, scratch, heads, across, tiling),
            **_scratch(tiling),
            collective_axes="warpgroup",
        )

    o = plgpu.kernel(
        scoped,
        out_type=jax.ShapeDtypeStruct((tokens, heads, value_dim), jnp.float32),
        grid=(segments * heads * across,),
        grid_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=PARAMS,
        interpret=interpret,
        kernel_name="kda_walk",
    )(
        *prepared,
        v,
        initial,
        keep,
        runs(table, segments),
        *table[:-1],
        table.cu_seqlens,
        final,
        boundary,
    )
    return o, jax.freeze(final), jax.freeze(boundary)[:num_boundaries]


def _scratch(tiling: Tiling) -> dict[str, Any]:
    def operand(*shape: int) -> Any:
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=SWIZZLED)

    slots, columns = tiling.key_slots, tiling.columns
    return {
        "k_start": operand(slots, CHUNK, DIM),
        "k_end": operand(slots, CHUNK, DIM),
        "solve": operand(slots, CHUNK, CHUNK),
        "values": plgpu.SMEM((slots, CHUNK, columns), jnp.bfloat16),
        "decay": plgpu.SMEM((slots, DIM), jnp.float32),
        "q_start": operand(tiling.query_slots, CHUNK, DIM),
        "attend": operand(tiling.query_slots, CHUNK, CHUNK),
        "state": operand(2, columns, DIM),
        "rest": operand(columns, CHUNK),
        "update": operand(2, columns, CHUNK),
        "out": plgpu.SMEM((CHUNK, columns), jnp.float32),
        "keys_full": plgpu.Barrier(num_arrivals=_KEY_SIDE, num_barriers=slots),
        "keys_free": plgpu.Barrier(num_barriers=slots),
        "queries_full": plgpu.Barrier(num_arrivals=_QUERY_SIDE, num_barriers=tiling.query_slots),
        "queries_free": plgpu.Barrier(num_barriers=tiling.query_slots),
        "handed": plgpu.Barrier(num_barriers=2),
        "taken": plgpu.Barrier(num_barriers=2),
    }


def _block(refs, scratch, heads: int, across: int, tiling: Tiling) -> None:
    *prepared, v, initial, keep, first = refs[:7]
    table, (final, boundary, o) = ChunkTable(*refs[7:15]), refs[15:]
    prepared = Prepared(*prepared)
    block = lax.axis_index("block")
    unit = lax.div(block, across)
    run, head = lax.div(unit, heads), lax.rem(unit, heads)
    columns = pl.ds(lax.rem(block, across) * tiling.columns, tiling.columns)
    work = Work(run, head, columns, first[run], first[run + 1])
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == LOADER)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        done = _load_chunks(work, table, prepared, v, scratch, tiling)
        _drain(scratch["keys_free"], done, tiling.key_slots)
        _drain(scratch["queries_free"], done, tiling.query_slots)

    @pl.when(warpgroup == STATER)
    def _():
        plgpu.set_max_registers(232, action="increase")
        done = _carry(work, table, initial, keep, final, boundary, scratch, tiling)
        _drain(scratch["taken"], done, 2)

    @pl.when(warpgroup == OUTPUTTER)
    def _():
        _emit(work, table, o, scratch, tiling)
        _clear(work, table, o, scratch)


def _visit(work: Work, table: ChunkTable, visit: Callable[[Any, Any], None]) -> Any:
    """`visit(chunk, done)` for the chunks with tokens, `done` of them before; how many in all."""

    def step(chunk, done):
        some = (table.length[chunk] > 0).astype(jnp.int32)

        @pl.when(some > 0)
        def _():
            visit(chunk, done)

        return done + some

    return lax.fori_loop(work.first, work.stop, step, jnp.int32(0))


def _drain(barrier: Any, arrived: Any, buffers: int) -> None:
    """Wait for the last arrivals, one a buffer, so that none is left when the block ends."""

    def wait(i, _):
        plgpu.barrier_wait(barrier.at[lax.rem(i, buffers)])

    lax.fori_loop(jnp.maximum(arrived - buffers, 0), arrived, wait, None)


def _load_chunks(work: Work, table, prepared, v, scratch, tiling: Tiling) -> Any:
    """Keys run a chunk ahead of queries, which come free only behind the output."""

    def key_side(chunk, at):
        slot = lax.rem(at, tiling.key_slots)

        @pl.when(at >= tiling.key_slots)
        def _():
            plgpu.barrier_wait(scratch["keys_free"].at[slot])

        wide, square = (x.at[chunk, work.head] for x in prepared[:2])
        for source, name in (
            (wide.at[K_START], "k_start"),
            (v.at[pl.ds(table.token[chunk], CHUNK), work.head, work.columns], "values"),
            (square.at[SOLVE], "solve"),
            (wide.at[K_END], "k_end"),
            (prepared.decay.at[chunk, work.head], "decay"),
        ):
            plgpu.copy_gmem_to_smem(source, scratch[name].at[slot], scratch["keys_full"].at[slot])

    def query_side(chunk, at):
        slot = lax.rem(at, tiling.query_slots)

        @pl.when(at >= tiling.query_slots)
        def _():
            plgpu.barrier_wait(scratch["queries_free"].at[slot])

        full = scratch["queries_full"].at[slot]
        wide, square = (x.at[chunk, work.head] for x in prepared[:2])
        plgpu.copy_gmem_to_smem(wide.at[Q_START], scratch["q_start"].at[slot], full)
        plgpu.copy_gmem_to_smem(square.at[ATTEND], scratch["attend"].at[slot], full)

    def step(chunk, carry):
        done, before = carry
        some = (table.length[chunk] > 0).astype(jnp.int32)

        @pl.when(some > 0)
        def _():
            key_side(chunk, done)

            @pl.when(done > 0)
            def _():
                query_side(before, done - 1)

        return done + some, jnp.where(some > 0, chunk, before)

    done, before = lax.fori_loop(work.first, work.stop, step, (jnp.int32(0), jnp.int32(0)))

    @pl.when(done > 0)
    def _():
        query_side(before, done - 1)

    return done


def _carry(work: Work, table, initial, keep, final, boundary, scratch, tiling: Tiling) -> Any:
    head, columns = work.head, work.columns
    shape = (DIM, tiling.columns)

    def read(c) -> tuple[jax.Array, ...]:
        columns = (table.start, table.length, table.segment, table.final, table.boundary)
        return tuple(column[c] for column in columns)

    def chunk(c, carry):
        state, done, (mode, length, segment, *rows) = carry
        # A chunk ahead: device memory is slow to answer.
        ahead = read(jnp.minimum(c + 1, work.stop - 1))

        def start(_, state):
            loaded = _load(initial.at[segment, head, :, columns], _WGMMA)
            kept = _load(keep.at[head], _WGMMA.reduce(1))
            kept = plgpu.layout_cast(lax.broadcast_in_dim(kept, shape, (0,)), _WGMMA)
            loaded = jnp.where((kept >= 0) & (mode == ZERO), 0.0, loaded)
            return jnp.where((kept > 0) | (mode != MERGE), loaded, state)

        def advance(_, state):
            return _advance(state, length, done, scratch, tiling)

        # Loops of one turn or none: values of a branch.
        some = (length > 0).astype(jnp.int32)
        state = lax.fori_loop(0, (mode != CONTINUE).astype(jnp.int32), start, state)
        state = lax.fori_loop(0, some, advance, state)
        for target, row, count in zip((final, boundary), rows, counts, strict=True):

            @pl.when(row < count)
            def _(target=target, row=row):
                target.at[row, head, :, columns][...] = state

        return state, done + some, ahead

    counts = final.shape[0], boundary.shape[0] - 1
    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), _WGMMA)
    start = zeros, jnp.int32(0), read(jnp.minimum(work.first, table.start.shape[0] - 1))
    return lax.fori_loop(work.first, work.stop, chunk, start)[1]


def _advance(state, length, at, scratch, tiling: Tiling) -> jax.Array:
    """The state behind a chunk; leaves what the outputter needs."""
    slot, buffer = lax.rem(at, tiling.key_slots), lax.rem(at, 2)
    narrow, update = (CHUNK, tiling.columns), scratch["update"].at[buffer]

    @pl.when(at >= 2)
    def _():
        plgpu.barrier_wait(scratch["taken"].at[buffer])

    _put(scratch["state"].at[buffer], state)
    plgpu.barrier_wait(scratch["keys_full"].at[slot])
    known = _product(narrow, scratch["k_start"].at[slot], scratch["state"].at[buffer].T)
    decay = _load(scratch["decay"].at[slot], _WGMMA.reduce(1))
    row = plgpu.broadcasted_iota(jnp.int32, narrow, 0, layout=_WGMMA)
    value = _load(scratch["values"].at[slot], _WGMMA).astype(jnp.float32)
    # The rows past the end are other tokens, or none.
    _put(scratch["rest"], jnp.where(row < length, value - known, 0.0))
    _put(update, _product(narrow, scratch["solve"].at[slot].T, scratch["rest"].T))
    plgpu.barrier_arrive(scratch["handed"].at[buffer])
    new = _product(state.shape, scratch["k_end"].at[slot].T, update.T)
    decay = plgpu.layout_cast(lax.broadcast_in_dim(decay, state.shape, (0,)), _WGMMA)
    state = state * decay + new
    plgpu.barrier_arrive(scratch["keys_free"].at[slot])
    return state


def _emit(work: Work, table, o, scratch, tiling: Tiling) -> None:
    def visit(chunk, at):
        slot, buffer = lax.rem(at, tiling.query_slots), lax.rem(at, 2)
        plgpu.barrier_wait(scratch["queries_full"].at[slot])
        plgpu.barrier_wait(scratch["handed"].at[buffer])

        def product(acc):
            plgpu.wgmma(acc, scratch["q_start"].at[slot], scratch["state"].at[buffer].T)
            plgpu.wgmma(acc, scratch["attend"].at[slot].T, scratch["update"].at[buffer].T)
            return acc[...]

        accumulator = plgpu.WGMMAAccumulatorRef((CHUNK, tiling.columns), jnp.float32)
        out = lax.optimization_barrier(pl.run_scoped(product, accumulator))
        plgpu.barrier_arrive(scratch["taken"].at[buffer])
        plgpu.barrier_arrive(scratch["queries_free"].at[slot])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        scratch["out"][...] = out
        plgpu.commit_smem()
        target = o.at[:, work.head, work.columns]
        _store(scratch["out"], target, table.token[chunk], table.length[chunk])

    _visit(work, table, visit)
    plgpu.wait_smem_to_gmem(0)


def _clear(work: Work, table, o, scratch) -> None:
    """Zeros where there is no token; the blocks of the first run do that."""
    out, tokens = scratch["out"], o.shape[0]

    @pl.when(work.run == 0)
    def _():
        out[...] = plgpu.layout_cast(jnp.zeros(out.shape, jnp.float32), _WGMMA)
        plgpu.commit_smem()
        used = table.cu_seqlens[table.cu_seqlens.shape[0] - 1]

        def clear(i, _):
            token = used + i * CHUNK
            target = o.at[:, work.head, work.columns]
            _store(out, target, token, jnp.minimum(tokens - token, CHUNK))

        lax.fori_loop(0, lax.div(tokens - used + (CHUNK - 1), CHUNK), clear, None)
        plgpu.wait_smem_to_gmem(0)


def _store(source, target, first, count) -> None:
    """target[first : first + count] = source[:count], as copies of 2^i rows."""
    size, start = CHUNK, 0
    while size:

        @pl.when((count & size) != 0)
        def _(size=size, start=start):
            rows = source.at[pl.ds(start, size)]
            plgpu.copy_smem_to_gmem(rows, target.at[pl.ds(first + start, size)])

        start = start + (count & size)
        size //= 2


def _put(ref, x: jax.Array) -> None:
    """x^T, bfloat16, where products can read it."""
    ref.T[...] = plgpu.layout_cast(x.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()


def _product(shape: tuple[int, int], a, b) -> jax.Array:
    def product(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    # Without the barrier, arithmetic may move ahead of the wait for the product.
    accumulator = plgpu.WGMMAAccumulatorRef(shape, jnp.float32)
    return lax.optimization_barrier(pl.run_scoped(product, accumulator))


def _load(ref: Any, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)
