"""The routed experts on Hopper: both grouped products over one table of tiles."""

from typing import Any

import jax

from pallas_kernels.experts import FEW_CHOICES, by_expert, tiles_by_expert
from pallas_kernels.grouped_matmul import tile_list
from pallas_kernels.mgpu.common import no_hopper
from pallas_kernels.mgpu.grouped_matmul import ALIGNED, default_tiling, over_tiles, unfit


def refuses(h: jax.Array, gate_up: jax.Array, down: jax.Array, chosen: jax.Array) -> str | None:
    return no_hopper() or unfit(h, gate_up, 2) or unfit(h, down, 1)


def run(
    h: jax.Array, gate_up: jax.Array, down: jax.Array, chosen: jax.Array, *, interpret: Any = False
) -> jax.Array:
    """`expert_mlp`; see `ops.expert_mlp`."""
    (experts, inner, width), (tokens, top) = down.shape, chosen.shape
    flat, count = chosen.reshape(-1), tokens * top
    up = default_tiling(count, experts, width, inner, 2)
    back = default_tiling(count, experts, inner, width, 1)
    if count <= FEW_CHOICES:
        order, place, tiles = tiles_by_expert(flat, up.rows, ALIGNED)
    else:
        order, place, sizes = by_expert(flat, experts)
        tiles = tile_list(sizes, count, up.rows, ALIGNED)
    hidden = over_tiles(h[order // top], gate_up, tiles, 2, up, interpret)
    out = over_tiles(hidden, down, tiles, 1, back, interpret)
    return out[place].reshape(tokens, top, width)
