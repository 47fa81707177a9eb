"""How attention over pages is cut into splits of a request, and how those are put together."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mgpu.common import LANE

PAGE = 64
LOWEST = -1e30
PARAMS = LANE.replace(
    approx_math=True,
    # Threads read what others wrote only past a commit or a barrier that the kernel names.
    unsafe_no_auto_barriers=True,
    # A maximum over the keys of a page for 64 queries at once.
    reduction_scratch_bytes=4096,
)


@dataclass(frozen=True)
class Tiling:
    """How the work is cut.

    A split has `split_pages` pages, or more where a request would have over `max_splits` of them;
    these two and `partial`, the dtype of a split's values, change the bits. A page is loaded in
    tiles of `columns` columns, of which `slots` fit into shared memory: a multiple of the tiles of
    a page, unless the mixer reads them all. `blocks` share the work.
    A merge reads `at_once` splits at once.
    """

    split_pages: int = 16
    max_splits: int = 64
    partial: Any = jnp.float32
    columns: int = 192
    slots: int = 7
    blocks: int = 132
    at_once: int = 8


class Tile(NamedTuple):
    """Columns `first ..` of the keys or values of a page, and how many of them are mixed."""

    of_values: bool
    first: int
    mixed: int


class Shapes(NamedTuple):
    """What is static: `rows` key heads of all requests, `heads` of each, with `queries` each;
    `splits` at most; `pages` a layer and the `layer`; whether a request has a row of the page table
    to itself (`owned`), and its queries a limit each (`limited`)."""

    rows: int
    heads: int
    queries: int
    splits: int
    layer: int
    pages: int
    scale: float
    tiles: tuple[Tile, ...]
    owned: bool
    limited: bool


def split_pages(tiling: Tiling, length: Any, most_pages: int) -> tuple[Any, Any]:
    """The pages of a request, and of a split of it."""
    pages = lax.div(jnp.minimum(length, most_pages * PAGE) + (PAGE - 1), PAGE)
    each = lax.div(pages + (tiling.max_splits - 1), tiling.max_splits)
    return pages, jnp.maximum(each, tiling.split_pages)


def merge(
    shapes: Shapes, tiling: Tiling, width: int, most_pages: int, interpret: Any
) -> Callable[..., Any]:
    """The kernel that merges splits: (lengths, maxima, sums, values) to `[rows * queries, Dv]`."""
    heads, queries = shapes.heads, shapes.queries
    at_once = min(tiling.at_once, shapes.splits)
    layout = plgpu.Layout.WG_STRIDED((width,), width // 128)

    def body(lengths, tops, totals, values, out):
        query = lax.axis_index("query")
        row, own = lax.div(query, queries), lax.rem(query, queries)
        pages, each = split_pages(tiling, lengths[lax.div(row, heads)], most_pages)
        count = lax.div(pages + each - 1, each)

        steps = lax.div(count + (at_once - 1), at_once)

        def highest(i, top):
            for u in range(at_once):
                top = jnp.maximum(top, tops[row, jnp.minimum(i * at_once + u, count - 1), own])
            return top

        top = lax.fori_loop(0, steps, highest, jnp.float32(LOWEST))

        def add(i, merged):
            total, value = merged
            for u in range(at_once):
                split = jnp.minimum(i * at_once + u, count - 1)
                weight = jnp.exp2(tops[row, split, own] - top)
                weight = jnp.where(i * at_once + u < count, weight, 0.0)
                total += weight * totals[row, split, own]
                part = plgpu.load(values.at[row, split, own], layout=layout)
                value += weight * part.astype(jnp.float32)
            return total, value

        zeros = plgpu.layout_cast(jnp.zeros((width,), jnp.float32), layout)
        total, value = lax.fori_loop(0, steps, add, (jnp.float32(0.0), zeros))
        out.at[query][...] = value / jnp.where(total == 0.0, 1.0, total)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((shapes.rows * queries, width), jnp.float32),
        grid=(shapes.rows * queries,),
        grid_names=("query",),
        compiler_params=PARAMS,
        interpret=interpret,
        kernel_name="attention_decode_merge",
    )
