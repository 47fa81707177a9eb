"""The cumulative log decay of a chunk of KDA, and what scales its blocks of 16 tokens, on Hopper.

See `kda_prep` for what both serve. A thread does one channel.
"""

import math

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chunks import CHUNK
from pallas_kernels.mgpu.kda_tile import BLOCK, BLOCKS, load

DIM = 128
LEAST_DECAY = -10.0
LOG2E = math.log2(math.e)
SHIFT = 75.0 * LOG2E
PADDED = DIM + 4  # float32 a row of G, so that 8 rows of it lie in different banks
ANCHOR, START, END, REACH = range(4)
"""Factors of every block b and channel: R_b, 2^R_b, 2^(G_last - R_b), and from REACH on
2^((R_c - R_b) / 2) for c = 1, 2, 3; 1 where c <= b."""
_CHANNEL = plgpu.Layout.WG_STRIDED((DIM,), vec_size=1)


def cumulate(steps, length, gates) -> None:
    """Put G in base 2 into shared memory, a channel a thread, from g `[64, 128]` in the same place.

    Rows from length on, which are arbitrary, count as zeros.
    """
    values = [load(steps.at[row], _CHANNEL) for row in range(CHUNK)]
    # The rows of gates lie across those of other threads' steps.
    plgpu.commit_smem()
    for whole in (True, False):

        @pl.when((length == CHUNK) == whole)
        def _(whole=whole):
            total = None
            for row, value in enumerate(values):
                step = jnp.maximum(value.astype(jnp.float32), LEAST_DECAY) * LOG2E
                step = step if whole else jnp.where(row < length, step, 0.0)
                total = step if total is None else total + step
                gates.at[row, pl.ds(0, DIM)][...] = total


def find_factors(gates, factors, decay) -> None:
    """A thread reads of G what it has written itself."""
    last, *firsts = (
        load(gates.at[row, pl.ds(0, DIM)], _CHANNEL) for row in (CHUNK - 1, *range(0, CHUNK, BLOCK))
    )
    anchors = [first - SHIFT for first in firsts]
    decay[...] = jnp.exp2(last)
    one = plgpu.layout_cast(jnp.ones((DIM,), jnp.float32), _CHANNEL)
    for b, anchor in enumerate(anchors):
        factors.at[ANCHOR, b][...] = anchor
        factors.at[START, b][...] = jnp.exp2(anchor)
        factors.at[END, b][...] = jnp.exp2(last - anchor)
        for c in range(1, BLOCKS):
            reach = jnp.exp2((anchors[c] - anchor) * 0.5) if c > b else one
            factors.at[REACH + c - 1, b][...] = reach
