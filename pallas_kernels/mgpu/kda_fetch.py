"""What a block of threads of `kda_prep` does when: its items, and what it reads of the next one.

An item is a chunk and a head. A block takes every so many of those that have tokens, and has the
next one's q, k and g copied while it solves the one before.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chunks import CHUNK
from pallas_kernels.mgpu.kda_tile import WGMMA, load

HALF = 64
"""Columns of q and k that are copied at a time: 128 bytes a row."""
COPIES = 5


class Source(NamedTuple):
    """The arguments of `kda_prep.prepare`, in device memory."""

    q: Any
    k: Any
    g: Any
    beta: Any
    token: Any
    length: Any

    @property
    def items(self) -> int:
        return self.token.shape[0] * self.q.shape[1]


class Item(NamedTuple):
    chunk: jax.Array
    head: jax.Array
    token: jax.Array
    length: jax.Array


def describe(source: Source, item) -> Item:
    """Past the last item: the last one."""
    heads = source.q.shape[1]
    item = jnp.minimum(item, source.items - 1)
    chunk, head = lax.div(item, heads), lax.rem(item, heads)
    return Item(chunk, head, source.token[chunk], source.length[chunk])


def find_item(source: Source, item, step: int) -> jax.Array:
    """The first of item, item + step, ... that has tokens, or one past the last."""

    def length(item) -> jax.Array:
        return describe(source, item).length

    def follow(found) -> tuple[jax.Array, jax.Array]:
        return found[0] + step, length(found[0] + step)

    def empty(found) -> jax.Array:
        return (found[0] < source.items) & (found[1] <= 0)

    return lax.while_loop(empty, follow, (item, length(item)))[0]


def fetch(source: Source, item: Item, scratch) -> None:
    """Start the copies of q, k and g; rows behind the chunk's are other tokens, or arbitrary."""
    rows = pl.ds(item.token, CHUNK)
    for x, name in ((source.q, "q_copy"), (source.k, "k_copy")):
        for half in range(2):
            columns = pl.ds(half * HALF, HALF)
            copied = x.at[rows, item.head, columns]
            plgpu.copy_gmem_to_smem(copied, scratch[name].at[0, half], scratch["arrived"])
    plgpu.copy_gmem_to_smem(source.g.at[rows, item.head], scratch["steps"], scratch["arrived"])


def read_strengths(source: Source, item: Item) -> jax.Array:
    """The betas of 64 tokens, which are earlier ones where the chunk would reach past the last."""
    first = jnp.minimum(item.token, source.beta.shape[0] - CHUNK)
    return load(source.beta.at[pl.ds(first, CHUNK), item.head], WGMMA.reduce(1))


def place_strengths(loaded: jax.Array, strength, source: Source, item: Item) -> None:
    """Put the betas so that the chunk's first one lies at 64: a store, an element a thread, may go
    anywhere, but a load of neighbours may not start anywhere."""
    first = jnp.minimum(item.token, source.beta.shape[0] - CHUNK)
    place = strength.at[pl.ds(CHUNK + first - item.token, CHUNK)]
    place[...] = loaded.astype(jnp.float32)


def strengths(strength, item: Item, axis: int) -> jax.Array:
    """The betas of the chunk, zeros past its length, laid out for a product without `axis`."""
    layout = WGMMA.reduce(axis)
    row = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=layout)
    placed = load(strength.at[pl.ds(CHUNK, CHUNK)], layout)
    return jnp.where(row < item.length, placed, 0.0)
