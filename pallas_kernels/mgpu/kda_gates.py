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


def cumulate(g, head, token, length, gates) -> None:
    """Put G in base 2 into shared memory, a channel a thread."""
    whole = isinstance(length, int)
    steps = []
    rows = g.at[pl.ds(token, CHUNK), head]
    for i in range(CHUNK):
        row = i if whole else jnp.minimum(i, length - 1)
        step = load(rows.at[row], _CHANNEL).astype(jnp.float32)
        step = jnp.maximum(step, LEAST_DECAY) * LOG2E
        steps.append(step if whole else jnp.where(i < length, step, 0.0))
    total = steps[0]
    for i in range(CHUNK):
        total = total + steps[i] if i else total
        gates.at[i, pl.ds(0, DIM)][...] = total


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
