"""The warpgroup that makes the outputs of KDA, O = q_start S + attend R, on Hopper."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chunks import CHUNK
from pallas_kernels.mgpu.common import seen, store_rows, visit_chunks
from pallas_kernels.mgpu.kda_state import COLUMNS, Work
from pallas_kernels.mgpu.kda_tile import WGMMA

STORED = 32
"""Columns of an output that are copied at a time: 128 bytes a row."""


def emit(work: Work, table, o, scratch) -> None:
    """The outputs of a run, from the copies of S^T and R^T that its state leaves behind."""

    def visit(chunk, at):
        slot, copy = (lax.rem(at, scratch[name].shape[0]) for name in ("q_start", "state"))
        plgpu.barrier_wait(scratch["queries_full"].at[slot])
        plgpu.barrier_wait(scratch["handed"].at[copy])

        def product(acc):
            plgpu.wgmma(acc, scratch["q_start"].at[slot], scratch["state"].at[copy].T)
            plgpu.wgmma(acc, scratch["attend"].at[slot].T, scratch["rest"].at[copy].T)
            return acc[...]

        accumulator = plgpu.WGMMAAccumulatorRef((CHUNK, COLUMNS), jnp.float32)
        out = lax.optimization_barrier(pl.run_scoped(product, accumulator))
        plgpu.barrier_arrive(scratch["taken"].at[copy])
        plgpu.barrier_arrive(scratch["queries_free"].at[slot])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.commit_smem()
        _put(scratch, out)
        _store(scratch, o.at[:, work.head, work.columns], table.token[chunk], table.length[chunk])

    visit_chunks(work.first, work.stop, table.length, visit)
    plgpu.wait_smem_to_gmem(0)


def clear(work: Work, table, o, scratch) -> None:
    """Zeros where there is no token; the blocks of the shortest run do that."""
    tokens, segments = o.shape[0], table.cu_seqlens.shape[0] - 1

    @pl.when(work.rank == segments - 1)
    def _():
        plgpu.commit_smem()
        _put(scratch, plgpu.layout_cast(jnp.zeros((CHUNK, COLUMNS), jnp.float32), WGMMA))
        used = table.cu_seqlens[segments]

        def clear(i, _):
            token = used + i * CHUNK
            count = jnp.minimum(tokens - token, CHUNK)
            _store(scratch, o.at[:, work.head, work.columns], token, count)

        lax.fori_loop(0, lax.div(tokens - used + (CHUNK - 1), CHUNK), clear, None)
        plgpu.wait_smem_to_gmem(0)


def _put(scratch, out) -> None:
    _, tiles = seen(scratch["out"], "spare" in scratch)
    for n in range(COLUMNS // STORED):
        tiles.at[n][...] = out[:, n * STORED : (n + 1) * STORED]
    plgpu.commit_smem()


def _store(scratch, target, first, count) -> None:
    copied, _ = seen(scratch["out"], "spare" in scratch)
    store_rows(copied, target, first, count)
