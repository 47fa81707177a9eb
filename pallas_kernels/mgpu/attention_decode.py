"""One query a request over its pages, on Hopper: latent (MLA) and grouped-query attention alike.

The keys of a request are cut into splits by its own length and by how many rows the batch has,
padding included, so that its bits depend on no other request. A block of threads keeps taking
items, a split of one key head each; of its three warpgroups

- the loader walks the page table and copies tiles of pages into a ring of slots;
- the scorer computes S^T = K Q^T of one page, `[64, G]`, and its online softmax;
- the mixer computes O^T = shrink O^T + V^T P^T, `[Dv, G]`, a page behind the scorer.

The products are transposed because a matrix instruction has 64 rows, which keys and value columns
fill, and 8 or 32 queries would not. Every split leaves its maximum, sum and values, which
`attention_splits.merge` puts together.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mgpu.attention_splits import (
    LOWEST,
    PAGE,
    PARAMS,
    Shapes,
    Tile,
    Tiling,
    merge,
    split_pages,
)
from pallas_kernels.mgpu.common import drain, no_hopper
from pallas_kernels.paged_attention import PagedRows

type Integers = jax.Array | np.ndarray

BY_QUERY = plgpu.Layout.WGMMA.reduce(0)
LOADER, SCORER, MIXER = range(3)


LATENT = Tiling(partial=jnp.bfloat16)
GROUPED = Tiling(columns=256, slots=6)


def fitted(tiling: Tiling, rows: int) -> Tiling:
    """Short splits where few key heads would leave the GPU idle; long ones, of which less is left
    to merge, where many fill it."""
    return replace(tiling, split_pages=min(32, max(2, rows // 2)))


class Item(NamedTuple):
    """Pages `first .. first + pages` of the request behind key head `row`: its split `split`."""

    row: jax.Array
    request: jax.Array
    split: jax.Array
    first: jax.Array
    pages: jax.Array
    length: jax.Array


def tiles(key_width: int, value_width: int, shared: bool, columns: int) -> tuple[Tile, ...]:
    """The tiles of a page in the order of their use; if `shared`, values are columns of keys."""
    keys = tuple(
        Tile(False, first, max(0, min(columns, value_width - first)) if shared else 0)
        for first in range(0, key_width, columns)
    )
    if shared:
        return keys
    return keys + tuple(Tile(True, first, columns) for first in range(0, value_width, columns))


def refuses(
    q: jax.Array, cache: PagedRows, page_table: Integers, lengths: Integers, scale: float
) -> str | None:
    """Why `decode` cannot take these arguments here, or None."""
    return no_hopper() or unfit(q, cache, page_table, lengths, scale)


def unfit(
    q: jax.Array, cache: PagedRows, page_table: Integers, lengths: Integers, scale: float
) -> str | None:
    """Why the kernel cannot take arrays of these shapes and dtypes, on any machine; or None."""
    dtypes = {str(x.dtype) for x in (q, cache.keys, cache.values)}
    if dtypes != {"bfloat16"}:
        return f"queries and pages are {', '.join(sorted(dtypes))}, not bfloat16"
    if page_table.dtype != jnp.int32 or lengths.dtype != jnp.int32:
        return f"page table and lengths are {page_table.dtype} and {lengths.dtype}, not int32"
    heads, width = math.prod(cache.keys.shape[3:-1]), (q.shape[2], cache.width)
    shared = cache.keys is cache.values
    if cache.keys.shape[2] != PAGE or (shared and heads != 1):
        return f"pages of {cache.keys.shape[2]} tokens with {heads} key heads"
    if width != ((576, 512) if shared else (256, 256)):
        return f"keys and values are {width[0]} and {width[1]} wide{' in one row' * shared}"
    if q.shape[1] % heads or q.shape[1] // heads > 32:
        return f"{q.shape[1]} query heads on {heads} key heads"
    return None


def decode(
    q: jax.Array,
    cache: PagedRows,
    page_table: Integers,
    lengths: Integers,
    scale: float,
    tiling: Tiling | None = None,
    interpret: Any = None,
) -> jax.Array:
    """`paged_attention_decode`: see `pallas_kernels.ops`."""
    batch, query_heads, width = q.shape
    heads = math.prod(cache.keys.shape[3:-1])
    tiling = tiling or fitted(LATENT if cache.keys is cache.values else GROUPED, batch * heads)
    queries = q.reshape(batch, heads, query_heads // heads, width)
    out = attend(queries, cache, page_table, None, lengths[:, None], scale, tiling, interpret)
    return out.reshape(batch, query_heads, cache.width)


def attend(
    q: jax.Array,
    cache: PagedRows,
    page_table: Integers,
    owners: Integers | None,
    limits: Integers,
    scale: float,
    tiling: Tiling,
    interpret: Any = None,
) -> jax.Array:
    """Queries `[R, Hkv, t * G, Dk]` of t tokens each over pages: float32 `[R, Hkv, t * G, Dv]`.

    Those of row r read the pages of `page_table[owners[r]]` (without `owners`, of row r itself),
    token i of it the first `limits[r, i]` keys. The tokens of a row whose limit is not zero lie in
    one page; where it is zero beside others that are not, the result is arbitrary but finite.
    """
    (count, heads, each, key_width), tokens = q.shape, limits.shape[1]
    layers, pages = cache.keys.shape[:2]
    shared = cache.keys is cache.values
    shapes = Shapes(
        rows=count * heads,
        heads=heads,
        queries=-(-each // 8) * 8,
        splits=min(tiling.max_splits, pl.cdiv(page_table.shape[1], tiling.split_pages)),
        layer=cache.layer,
        pages=pages,
        scale=scale,
        tiles=tiles(key_width, cache.width, shared, tiling.columns),
        owned=owners is None,
        limited=tokens > 1,
    )
    if any(not tile.mixed for tile in shapes.tiles) and tiling.slots % len(shapes.tiles):
        raise ValueError(f"{tiling.slots} slots for pages of {len(shapes.tiles)} tiles")
    padding = shapes.queries - each
    limits = jnp.asarray(limits)
    lengths = jnp.max(limits, axis=1)
    limits = jnp.pad(jnp.repeat(limits, each // tokens, axis=1), ((0, 0), (0, padding)))
    arrays = (cache.keys,) if shared else (cache.keys, cache.values)
    queries = jnp.pad(q.reshape(shapes.rows, each, key_width), ((0, 0), (0, padding), (0, 0)))
    parts = _splits(shapes, tiling, cache.width, interpret)(
        queries,
        jnp.asarray(page_table),
        lengths if owners is None else jnp.asarray(owners),
        lengths,
        limits if shapes.limited else lengths,
        *(x.reshape(layers * pages, PAGE, heads, -1) for x in arrays),
    )
    if shapes.splits == 1:
        out = _only_split(jnp.repeat(lengths, heads), *parts)
    else:
        out = merge(shapes, tiling, cache.width, page_table.shape[1], interpret)(lengths, *parts)
    return out.reshape(count, heads, shapes.queries, cache.width)[:, :, :each]


def _only_split(
    lengths: jax.Array, tops: jax.Array, totals: jax.Array, values: jax.Array
) -> jax.Array:
    """What `merge` gives of a single split, left to XLA, which makes it part of what follows.

    No split is written of a row without keys.
    """
    total = jnp.where(totals == 0.0, 1.0, totals)[:, 0, :, None]
    out = values[:, 0].astype(jnp.float32) / total
    return jnp.where((lengths > 0)[:, None, None], out, 0.0)


def _splits(shapes: Shapes, tiling: Tiling, width: int, interpret: Any) -> Callable[..., Any]:
    """The kernel of the splits: (q, page table, owners, lengths, limits, pools) to (maxima, sums,
    values)."""
    rows, splits, queries = shapes.rows, shapes.splits, shapes.queries
    key_width = sum(tiling.columns for tile in shapes.tiles if not tile.of_values)
    swizzled = (
        plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
    )
    blocks = min(tiling.blocks, rows * splits)

    def body(q, table, owners, lengths, limits, *refs):
        pools, (tops, totals, values), scratch = refs[:-4], refs[-4:-1], refs[-1]
        over = _over_items(shapes, tiling, blocks, table.shape[1], lengths)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == LOADER)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            done = over(_loader(shapes, tiling, scratch, q, table, owners, pools))
            drain(scratch["free"], done * len(shapes.tiles))
            drain(scratch["q_free"], done)

        @pl.when(warpgroup == SCORER)
        def _():
            done = over(_scorer(shapes, tiling, scratch, limits, tops, totals))
            drain(scratch["weights_free"], done)

        @pl.when(warpgroup == MIXER)
        def _():
            plgpu.set_max_registers(232, action="increase")
            over(_mixer(shapes, tiling, scratch, values))

    def scoped(*refs):
        pl.run_scoped(
            lambda **scratch: body(*refs, scratch),
            q=plgpu.SMEM((queries, key_width), jnp.bfloat16, transforms=swizzled),
            ring=plgpu.SMEM(
                (tiling.slots, PAGE, tiling.columns), jnp.bfloat16, transforms=swizzled
            ),
            weights=plgpu.SMEM((2, queries, PAGE), jnp.bfloat16, transforms=swizzled),
            shrink=plgpu.SMEM((2, queries), jnp.float32),
            q_full=plgpu.Barrier(),
            q_free=plgpu.Barrier(),
            full=plgpu.Barrier(num_barriers=tiling.slots),
            free=plgpu.Barrier(num_barriers=tiling.slots),
            weights_full=plgpu.Barrier(num_barriers=2),
            weights_free=plgpu.Barrier(num_barriers=2),
            collective_axes="warpgroup",
        )

    softmax = jax.ShapeDtypeStruct((rows, splits, queries), jnp.float32)
    return plgpu.kernel(
        scoped,
        out_type=(
            softmax,
            softmax,
            jax.ShapeDtypeStruct((rows, splits, queries, width), tiling.partial),
        ),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=PARAMS,
        interpret=interpret,
        kernel_name="attention_decode",
    )


def _over_items(
    shapes: Shapes, tiling: Tiling, blocks: int, most_pages: int, lengths: Any
) -> Callable[[Callable[[Item, Any], None]], Any]:
    """`over(run)` calls `run(item, done)` for the items of this block, `done` pages being done
    before it, and returns how many are done after all.

    Neighbours in the grid take the same split of neighbouring key heads.
    """
    own = lax.axis_index("block")

    def over(run: Callable[[Item, Any], None]) -> Any:
        def step(i, done):
            at = own + i * blocks
            row, split = lax.rem(at, shapes.rows), lax.div(at, shapes.rows)
            request = lax.div(row, shapes.heads)
            length = lengths[request]
            pages, each = split_pages(tiling, length, most_pages)
            first = split * each
            here = jnp.minimum(each, pages - first)

            @pl.when(here > 0)
            def _():
                run(Item(row, request, split, first, here, length), done)

            return done + jnp.maximum(here, 0)

        work = shapes.rows * shapes.splits
        return lax.fori_loop(0, lax.div(work - own + (blocks - 1), blocks), step, jnp.int32(0))

    return over


def _loader(shapes, tiling, scratch, q, table, owners, pools) -> Callable[[Item, Any], None]:
    ring, full, free = scratch["ring"], scratch["full"], scratch["free"]

    def run(item: Item, done: Any) -> None:
        head = lax.rem(item.row, shapes.heads)
        owner = item.request if shapes.owned else owners[item.request]

        def page(i, _):
            number = table[owner, item.first + i] + shapes.layer * shapes.pages
            for t, tile in enumerate(shapes.tiles):
                at = (done + i) * len(shapes.tiles) + t
                slot = lax.rem(at, tiling.slots)

                @pl.when(at >= tiling.slots)
                def _(slot=slot):
                    plgpu.barrier_wait(free.at[slot])

                columns = pl.ds(tile.first, tiling.columns)
                source = pools[tile.of_values].at[number, :, head, columns]
                plgpu.copy_gmem_to_smem(source, ring.at[slot], full.at[slot])

            # After the first page: its slots come free while the item before still needs its q.
            @pl.when(i == 0)
            def _():
                @pl.when(done > 0)
                def _():
                    plgpu.barrier_wait(scratch["q_free"])

                plgpu.copy_gmem_to_smem(q.at[item.row], scratch["q"], scratch["q_full"])

        lax.fori_loop(0, item.pages, page, None)

    return run


def _scorer(shapes, tiling, scratch, limits, tops, totals) -> Callable[[Item, Any], None]:
    ring, full, q = scratch["ring"], scratch["full"], scratch["q"]
    block = (PAGE, shapes.queries)
    keys = [(t, tile) for t, tile in enumerate(shapes.tiles) if not tile.of_values]

    def scores(at: Any) -> jax.Array:
        slots = [lax.rem(at * len(shapes.tiles) + t, tiling.slots) for t, _ in keys]

        def product(acc):
            for slot, (_, tile) in zip(slots, keys, strict=True):
                plgpu.barrier_wait(full.at[slot])
                part = q.at[:, pl.ds(tile.first, tiling.columns)]
                plgpu.wgmma(acc, ring.at[slot], part.T)
            return acc[...]

        raw = lax.optimization_barrier(
            pl.run_scoped(product, plgpu.WGMMAAccumulatorRef(block, jnp.float32))
        )
        for slot, (_, tile) in zip(slots, keys, strict=True):
            if not tile.mixed:
                plgpu.barrier_arrive(scratch["free"].at[slot])
        return raw * (shapes.scale * math.log2(math.e))

    def run(item: Item, done: Any) -> None:
        plgpu.barrier_wait(scratch["q_full"])
        limit = item.length
        if shapes.limited:
            limit = plgpu.load(limits.at[item.request], layout=BY_QUERY, optimized=False)

        def page(i, softmax):
            top, total = softmax
            row = plgpu.broadcasted_iota(jnp.int32, block, 0, layout=plgpu.Layout.WGMMA)
            below = limit - (item.first + i) * PAGE
            visible = row < (lax.broadcast_in_dim(below, block, [1]) if shapes.limited else below)
            score = jnp.where(visible, scores(done + i), LOWEST)
            higher = jnp.maximum(top, jnp.max(score, axis=0))
            shrink = jnp.exp2(top - higher)
            weight = jnp.exp2(score - lax.broadcast_in_dim(higher, block, [1]))
            _hand_over(scratch, done + i, weight, shrink)
            return higher, total * lax.broadcast_in_dim(shrink, block, [1]) + weight

        top = plgpu.layout_cast(jnp.full((shapes.queries,), LOWEST, jnp.float32), BY_QUERY)
        total = plgpu.layout_cast(jnp.zeros(block, jnp.float32), plgpu.Layout.WGMMA)
        top, total = lax.fori_loop(0, item.pages, page, (top, total))
        plgpu.barrier_arrive(scratch["q_free"])
        tops.at[item.row, item.split][...] = top
        totals.at[item.row, item.split][...] = jnp.sum(total, axis=0)

    return run


def _hand_over(scratch, at: Any, weight: jax.Array, shrink: jax.Array) -> None:
    """Scorer to mixer: the weights of page `at`, and what they shrink earlier ones by."""
    buffer = lax.rem(at, 2)

    @pl.when(at >= 2)
    def _():
        plgpu.barrier_wait(scratch["weights_free"].at[buffer])

    half = plgpu.layout_cast(weight.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED)
    scratch["weights"].at[buffer].T[...] = half
    scratch["shrink"].at[buffer][...] = shrink
    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch["weights_full"].at[buffer])


def _mixer(shapes, tiling, scratch, values) -> Callable[[Item, Any], None]:
    ring, weights = scratch["ring"], scratch["weights"]
    mixed = [(t, tile) for t, tile in enumerate(shapes.tiles) if tile.mixed]

    def run(item: Item, done: Any) -> None:
        def page(i, outs):
            at = done + i
            buffer = lax.rem(at, 2)
            plgpu.barrier_wait(scratch["weights_full"].at[buffer])
            shrink = plgpu.load(scratch["shrink"].at[buffer], layout=BY_QUERY, optimized=False)
            visible = item.length - (item.first + i) * PAGE
            mixture = []
            for out, (t, tile) in zip(outs, mixed, strict=True):
                slot = lax.rem(at * len(shapes.tiles) + t, tiling.slots)
                plgpu.barrier_wait(scratch["full"].at[slot])
                part = ring.at[slot, :, pl.ds(0, tile.mixed)]
                _hide(part, visible)

                def product(acc, part=part):
                    plgpu.wgmma(acc, part.T, weights.at[buffer].T)
                    return acc[...]

                new = pl.run_scoped(product, plgpu.WGMMAAccumulatorRef(out.shape, jnp.float32))
                new = lax.optimization_barrier(new)
                plgpu.barrier_arrive(scratch["free"].at[slot])
                # Unless held here, these sums sink to the end of the page and registers run out.
                out = out * lax.broadcast_in_dim(shrink, out.shape, [1]) + new
                mixture.append(lax.optimization_barrier(out))
            plgpu.barrier_arrive(scratch["weights_free"].at[buffer])
            return tuple(mixture)

        empty = tuple(
            plgpu.layout_cast(
                jnp.zeros((tile.mixed, shapes.queries), jnp.float32), plgpu.Layout.WGMMA
            )
            for _, tile in mixed
        )
        outs = lax.fori_loop(0, item.pages, page, empty)
        for out, (_, tile) in zip(outs, mixed, strict=True):
            out = plgpu.layout_cast(out.astype(values.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
            values.at[item.row, item.split, :, pl.ds(tile.first, tile.mixed)].T[...] = out

    return run


def _hide(part: Any, visible: Any) -> None:
    """Zeros in the rows from `visible` on: their weights are zero, but they may hold NaN."""

    @pl.when(visible < PAGE)
    def _():
        for first in range(0, part.shape[1], 64):
            square = part.at[:, pl.ds(first, 64)]
            row = plgpu.broadcasted_iota(jnp.int32, (PAGE, 64), 0, layout=plgpu.Layout.WGMMA)
            square[...] = jnp.where(row < visible, square[...], 0)
        plgpu.commit_smem()
