"""Grouped matrix product: consecutive groups of rows, each with its own matrix (MoE experts)."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import reference

GATHERED = 1 << 26
"""Bytes of matrices that `tiled` copies together: small ones in one product, large ones one by
one."""


def grouped_matmul(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """`grouped_matmul` by `jax.lax.ragged_dot`; by `tiled` on a GPU.

    There XLA multiplies all rows by every matrix: 38.7 GB of temporaries and 58 ms at 4096 tokens
    of Kimi-Linear.
    """
    return lax.platform_dependent(x, w, group_sizes, default=_ragged, cuda=tiled, rocm=tiled)


def grouped_swiglu(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """`grouped_swiglu` of two halves of `grouped_matmul`, rounded to x's dtype between."""
    return _swiglu(grouped_matmul, x, w, group_sizes)


def serial_swiglu(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """`grouped_swiglu`, one row after the other."""
    return _swiglu(reference.grouped_matmul, x, w, group_sizes)


def _swiglu(product: Callable[..., jax.Array], *args: jax.Array) -> jax.Array:
    gate, up = jnp.split(product(*args), 2, axis=-1)
    return jax.nn.silu(gate) * up


def _ragged(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    y = lax.ragged_dot(x, w, group_sizes, precision="highest", preferred_element_type=jnp.float32)
    real = jnp.arange(x.shape[0], dtype=jnp.int32) < jnp.sum(group_sizes)
    return jnp.where(real[:, None], y, 0.0).astype(x.dtype)


def tiled(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """`grouped_matmul`, tiles of rows of one group; as many at once as `GATHERED` bytes of matrices
    allow.

    Temporaries: those matrices and their tiles.
    """
    (num_rows, _), (groups, *matrix) = x.shape, w.shape
    y = jnp.zeros((num_rows, matrix[1]), x.dtype)
    if num_rows == 0:
        return y
    rows = min(num_rows, 128, max(8, 2 * num_rows // groups))
    count, tiles = tile_table(group_sizes, num_rows, rows)
    at_once = min(tiles.shape[0], max(1, GATHERED // (math.prod(matrix) * w.dtype.itemsize)))
    live = jnp.arange(tiles.shape[0], dtype=jnp.int32)[:, None] < count
    tiles = jnp.pad(jnp.where(live, tiles, 0), ((0, -tiles.shape[0] % at_once), (0, 0)))

    def some(i: jax.Array, y: jax.Array) -> jax.Array:
        chosen = lax.dynamic_slice_in_dim(tiles, i * at_once, at_once)
        group, first, begin, end = (column[:, None] for column in chosen.T)
        row = jnp.minimum(first, num_rows - rows) + jnp.arange(rows, dtype=jnp.int32)
        product = jnp.matmul(
            x[row],
            jnp.take(w, group[:, 0], axis=0, mode="clip"),
            precision="highest",
            preferred_element_type=jnp.float32,
        )
        mine = (begin <= row) & (row < end) & (group < groups)
        return y.at[jnp.where(mine, row, num_rows)].set(product.astype(x.dtype), mode="drop")

    return lax.fori_loop(0, -(-count[0] // at_once), some, y)


def tile_list(group_sizes: jax.Array, num_rows: int, rows: int, align: int = 1) -> jax.Array:
    """`tile_table` as one array [T + 1, 4]: the count, four times, comes last."""
    count, tiles = tile_table(group_sizes, num_rows, rows, align)
    return jnp.concatenate([tiles, jnp.broadcast_to(count, (1, 4))])


def tile_table(
    group_sizes: jax.Array, num_rows: int, rows: int, align: int = 1
) -> tuple[jax.Array, jax.Array]:
    """Tiles of `rows` rows that cover all rows of every group: (count [1], tiles [T, 4]), int32.

    A tile is (group, first row, begin, end): of the `rows` from its first row, a multiple of
    `align`, only begin to end - 1 are the group's. The rows past the last group are one group more.
    T is a bound that holds whatever the sizes; entries past `count` mean nothing. Made of sums over
    masks instead of scans and gathers: XLA needs three small kernels for them.
    """
    groups = group_sizes.shape[0] + 1
    index = jnp.arange(groups, dtype=jnp.int32)
    upto = index[None, :] <= index[:, None]

    def total(values: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(upto[:, : values.shape[0]], values, 0), axis=1, dtype=jnp.int32)

    real = total(group_sizes)
    ends = jnp.where(index < groups - 1, real, num_rows)
    starts = jnp.where(index < groups - 1, real - jnp.append(group_sizes, 0), real)
    needed = (ends - starts // align * align + rows - 1) // rows
    counts = total(jnp.where(ends > starts, needed, 0))
    most = (num_rows + min(groups, num_rows) * (rows + align - 2)) // rows
    tile = jnp.arange(most, dtype=jnp.int32)
    before = counts[None, :] <= tile[:, None]
    start = jnp.max(jnp.where(before, ends, 0), axis=1)
    past = tile - jnp.max(jnp.where(before, counts, 0), axis=1)
    first = start // align * align + rows * past
    end = jnp.minimum(jnp.min(jnp.where(before, num_rows, ends), axis=1), first + rows)
    group = jnp.sum(before, axis=1, dtype=jnp.int32)
    return counts[-1:], jnp.stack([group, first, jnp.maximum(start, first), end], axis=1)
