"""The routed experts of a layer: rows sorted by expert, two grouped products, and back again."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from pallas_kernels import grouped_matmul as grouped
from pallas_kernels import reference

FEW_CHOICES = 1024
"""Up to here, comparing every pair of choices is faster than sorting them."""


def composed(h: jax.Array, gate_up: jax.Array, down: jax.Array, chosen: jax.Array) -> jax.Array:
    """`expert_mlp`, all rows at once."""
    return _sorted(grouped.grouped_swiglu, grouped.grouped_matmul, h, gate_up, down, chosen)


def serial(h: jax.Array, gate_up: jax.Array, down: jax.Array, chosen: jax.Array) -> jax.Array:
    """`expert_mlp`, one row after the other."""
    return _sorted(grouped.serial_swiglu, reference.grouped_matmul, h, gate_up, down, chosen)


def _sorted(
    swiglu: Callable[..., jax.Array],
    product: Callable[..., jax.Array],
    h: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    chosen: jax.Array,
) -> jax.Array:
    order, place, sizes = by_expert(chosen.reshape(-1), down.shape[0])
    inner = swiglu(h[order // chosen.shape[1]], gate_up, sizes)
    # A gather, not a scatter: what a token's experts say comes back in the order it chose them.
    return product(inner, down, sizes)[place].reshape(*chosen.shape, -1)


def by_expert(
    chosen: Int32[Array, "M"], experts: int
) -> tuple[Int32[Array, "M"], Int32[Array, "M"], Int32[Array, "E"]]:
    """Choices sorted by expert, in a stable order: (order, place, sizes).

    Row r of the sorted ones is choice `order[r]`, choice i is row `place[i]`, and expert e has
    `sizes[e]` rows. Choices of no expert, `experts` or more, come last.
    """
    index = jnp.arange(chosen.shape[0], dtype=jnp.int32)
    of_expert = chosen[:, None] == jnp.arange(experts, dtype=jnp.int32)
    sizes = jnp.sum(of_expert, axis=0, dtype=jnp.int32)
    if chosen.shape[0] > FEW_CHOICES:
        order = jnp.argsort(chosen, stable=True).astype(jnp.int32)
        return order, jnp.zeros_like(index).at[order].set(index, unique_indices=True), sizes
    mine, other = chosen[:, None], chosen[None, :]
    first = (other < mine) | ((other == mine) & (index[None, :] < index[:, None]))
    place = jnp.sum(first, axis=1, dtype=jnp.int32)
    return _inverse(place), place, sizes


def tiles_by_expert(
    chosen: Int32[Array, "M"], rows: int, align: int
) -> tuple[Int32[Array, "M"], Int32[Array, "M"], Int32[Array, "M+1 4"]]:
    """(order, place) of `by_expert`, and the table that `grouped.tile_list` makes of its sizes.

    For few choices: all of it is three small kernels of sums over pairs, without the counts of
    every expert.
    """
    index = jnp.arange(chosen.shape[0], dtype=jnp.int32)
    mine, other = chosen[:, None], chosen[None, :]
    same = other == mine
    start = jnp.sum(other < mine, axis=1, dtype=jnp.int32)
    before = jnp.sum(same & (index[None, :] < index[:, None]), axis=1, dtype=jnp.int32)
    end = start + jnp.sum(same, axis=1, dtype=jnp.int32)
    place, base = start + before, start // align * align
    first = base + (place - base) // rows * rows
    heads = (before == 0) | (place == first)
    earlier = heads[None, :] & (place[None, :] < place[:, None])
    number = jnp.sum(earlier, axis=1, dtype=jnp.int32)
    entry = jnp.stack([chosen, first, place, jnp.minimum(end, first + rows)])
    most = chosen.shape[0]
    tile = jnp.arange(most + 1, dtype=jnp.int32)[:, None]
    picked = heads & ((number == tile) | (tile == most))
    values = jnp.where(tile[:, None] < most, entry, 1)
    table = jnp.sum(jnp.where(picked[:, None], values, 0), axis=-1, dtype=jnp.int32)
    return _inverse(place), place, table


def _inverse(place: Int32[Array, "M"]) -> Int32[Array, "M"]:
    index = jnp.arange(place.shape[0], dtype=jnp.int32)
    return jnp.sum(jnp.where(place == index[:, None], index, 0), axis=1, dtype=jnp.int32)
