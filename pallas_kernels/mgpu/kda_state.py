"""The warpgroup that carries the state of KDA through the chunks of a run, on Hopper.

It keeps S^T, 64 value columns by 128 key channels, in float32 registers. Left operands of products
come from registers, so that nothing on the way from one state to the next passes shared memory:

    R^T = V^T + S^T k_start^T;    S^T = S^T decay + R^T update.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chunks import CHUNK, CONTINUE, MERGE, ZERO
from pallas_kernels.mgpu.common import seen
from pallas_kernels.mgpu.kda_prep import DIM
from pallas_kernels.mgpu.kda_tile import WGMMA, load, operand

COLUMNS = 64
"""Value columns of a block of threads: the rows of a product."""
COPIES = 2
"""Copies of the state that can wait for the outputs."""
_STATE = (COLUMNS, DIM)


class Work(NamedTuple):
    """The part of a block: its rank among the runs, a head, value columns, the first chunk and the
    one past the last. Chunks write `listed` of the final states and `used` of the `boundaries`;
    with a single segment the two are None, and found on the way."""

    rank: jax.Array
    head: jax.Array
    columns: Any
    first: Any
    stop: Any
    listed: Any
    used: Any
    boundaries: int


def carry(work: Work, table, states, scratch) -> Any:
    """Write the states that the table asks for; returns the number of chunks with tokens.

    `states` are initial, keep or None, final, boundary.
    """
    initial, keep, final, boundary = states

    def read(c) -> tuple[jax.Array, ...]:
        columns = (table.start, table.length, table.segment, table.final, table.boundary)
        return tuple(column[c] for column in columns)

    def chunk(c, carried):
        state, value, done, used, (mode, length, segment, *rows) = carried
        # A chunk ahead: device memory is slow to answer.
        ahead = read(jnp.minimum(c + 1, work.stop - 1))

        def start(_, state):
            return _started(state, initial, keep, segment, mode, work)

        def advance(_, carried):
            return _advanced(carried[0], carried[1], length, done, scratch)

        # Loops of one turn or none: values of a branch.
        some = (length > 0).astype(jnp.int32)
        state = lax.fori_loop(0, (mode != CONTINUE).astype(jnp.int32), start, state)
        state, value = lax.fori_loop(0, some, advance, (state, value))
        for target, row, count in zip((final, boundary), rows, counts, strict=True):

            @pl.when(row < count)
            def _(target=target, row=row):
                _write(target.at[row, work.head, :, work.columns], state)

        asked = (rows[1] < work.boundaries).astype(jnp.int32)
        return state, value, done + some, used + asked, ahead

    counts, zero = (final.shape[0], work.boundaries), jnp.int32(0)
    first = read(jnp.minimum(work.first, table.start.shape[0] - 1))
    start = _zeros(), _value(scratch, zero), zero, zero, first
    *_, done, used, _ = lax.fori_loop(work.first, work.stop, chunk, start)
    _fill(work, table, initial, final, boundary, used)
    return done


def _started(state, initial, keep, segment, mode, work: Work) -> jax.Array:
    loaded = _read(initial.at[segment, work.head, :, work.columns])
    if keep is None:
        return jnp.where(mode == ZERO, 0.0, loaded)
    kept = _spread(load(keep.at[work.head], WGMMA.reduce(0)))
    loaded = jnp.where((kept >= 0) & (mode == ZERO), 0.0, loaded)
    return jnp.where((kept > 0) | (mode != MERGE), loaded, state)


def _fill(work: Work, table, initial, final, boundary, counted) -> None:
    """Rows that no chunk writes, the last ones: final states stay the initial ones, boundaries are
    zeros."""
    listed, used = work.listed, work.used
    if used is None:
        listed = ((table.length[0] > 0) | (table.final[0] < 1)).astype(jnp.int32)
        used = counted
    across = final.shape[0]

    @pl.when(work.rank >= listed)
    def _():
        source, target = (x.at[work.rank, work.head, :, work.columns] for x in (initial, final))
        _write(target, _read(source))

    def clear(i, _):
        row = used + work.rank + i * across
        _write(boundary.at[row, work.head, :, work.columns], _zeros())

    left = work.boundaries - used - work.rank
    lax.fori_loop(0, lax.div(jnp.maximum(left, 0) + across - 1, across), clear, None)


def _advanced(state, value, length, at, scratch) -> tuple[jax.Array, jax.Array]:
    """The state behind a chunk and the values of the next; leaves what the outputter needs.

    What is no link of the chain is put between the start of a product and the wait for it.
    """
    begin, end, copy = (
        lax.rem(at, scratch[name].shape[0]) for name in ("k_start", "update", "state")
    )
    spare = scratch.get("spare")
    rounded = state.astype(jnp.bfloat16)
    # A loop of one turn or none, as above.
    short = (length < CHUNK).astype(jnp.int32)
    value = lax.fori_loop(0, short, lambda _, x: _cut(x, length), value)

    @pl.when(at >= COPIES)
    def _():
        plgpu.barrier_wait(scratch["taken"].at[copy])

    def erased(acc):
        _start(acc, value, rounded, scratch["k_start"].at[begin].T, spare)
        scratch["state"].at[copy][...] = rounded
        decay = _spread(load(scratch["decay"].at[begin], WGMMA.reduce(0)))
        decayed = lax.optimization_barrier(state * decay)
        return _result(acc, value, spare), decayed

    rest, decayed = _multiplied(erased, CHUNK)
    rest = rest.astype(jnp.bfloat16)
    plgpu.barrier_arrive(scratch["starts_free"].at[begin])
    plgpu.barrier_wait(scratch["ends_full"].at[end])

    def updated(acc):
        _start(acc, decayed, rest, scratch["update"].at[end], spare)
        scratch["rest"].at[copy][...] = rest
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch["handed"].at[copy])
        value = lax.optimization_barrier(_value(scratch, at + 1))
        return _result(acc, decayed, spare), value

    state, value = _multiplied(updated, DIM)
    plgpu.barrier_arrive(scratch["ends_free"].at[end])
    return state, value


def _value(scratch, at) -> jax.Array:
    """V^T of a chunk. The loader brings one more than there are."""
    slot = lax.rem(at, scratch["k_start"].shape[0])
    plgpu.barrier_wait(scratch["starts_full"].at[slot])
    _, values = seen(scratch["values"], "spare" in scratch)
    return load(values.at[slot].T, WGMMA).astype(jnp.float32)


def _cut(value, length) -> jax.Array:
    """Without the columns past the end, which are other tokens, or none."""
    row = plgpu.broadcasted_iota(jnp.int32, value.shape, 1, layout=WGMMA)
    return jnp.where(row < length, value, 0.0)


def _start(acc, first, a, b, spare) -> None:
    """Start first + a b. The interpreter starts every product at zero."""
    if spare is None:
        acc[...] = first
    plgpu.wgmma(acc, operand(a, spare), b)


def _result(acc, first, spare) -> jax.Array:
    return acc[...] if spare is None else acc[...] + first


def _multiplied(body: Callable[[Any], Any], columns: int) -> Any:
    """`body(accumulator)`, which starts a product, does other work and waits.

    Without the barrier, arithmetic may move ahead of the wait.
    """
    accumulator = plgpu.WGMMAAccumulatorRef((COLUMNS, columns), jnp.float32)
    return lax.optimization_barrier(pl.run_scoped(body, accumulator))


def _read(ref) -> jax.Array:
    """What ref holds, transposed."""
    return plgpu.layout_cast(load(ref.T, plgpu.Layout.WGMMA_TRANSPOSED), WGMMA)


def _write(ref, x: jax.Array) -> None:
    ref.T[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)


def _spread(x: jax.Array) -> jax.Array:
    """One number a key channel."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, _STATE, (1,)), WGMMA)


def _zeros() -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(_STATE, jnp.float32), WGMMA)
