"""Grouped matrix product on Hopper: y = x @ w[group of the row], or SiLU-gated by halves of w.

Computed transposed, y^T = w^T x^T: the tensor cores take 64 rows by 8 to 256 columns, so columns of
the weights play the rows, and a tile of tokens may be as small as 8. The rows of each group are cut
into tiles of `Tiling.rows`; the table of the tiles that exist is data. A fixed grid of blocks walks
(tile, stretch of weight columns), stretches first, so that blocks that run together share rows of
x and, where a group has several tiles, its weights in the L2 cache.

In a block the last warpgroup fetches and the others multiply. Fetching runs ahead into the next
tile while this one is stored, so device memory is never idle. Swizzled copies start at multiples of
8 rows, so the rows fetched for a tile may begin before and end after it: only its own rows are
stored, as copies of 2^i rows.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul import tile_list
from pallas_kernels.mgpu.common import LANE, no_hopper

_SMS = 132  # of an H100 SXM or H200; another number is as correct, and less balanced
_SHARED_BYTES = 227 * 1024
_ACCUMULATORS = 128 * 128  # of a warpgroup: 128 registers a thread
_REGISTERS_FETCHING, _REGISTERS_MULTIPLYING = 40, 232
_SWIZZLED = (
    plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)
ALIGNED = 8  # rows that a swizzled copy moves together
_STORED = 64  # columns of y that a warpgroup stores at a time
# exp of SiLU within 2 ulp of float32: the result is bfloat16.
_PARAMS = dataclasses.replace(LANE, approx_math=True)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """What a block of threads works on.

    A tile is `rows` rows of x by `warpgroups * columns` columns of y. A step takes `depth` of the
    inner dimension, and the operands of `stages` steps are in shared memory. `blocks` share a
    multiprocessor.
    """

    rows: int
    columns: int = 64
    depth: int = 64
    stages: int = 4
    warpgroups: int = 1
    blocks: int = 1

    @property
    def width(self) -> int:
        return self.columns * self.warpgroups

    def shared_bytes(self, parts: int) -> int:
        """Shared memory of a block that multiplies by `parts` matrices at once."""
        operands = self.stages * self.depth * (self.rows + parts * self.width)
        return 2 * (operands + self.warpgroups * (self.rows + 2 * ALIGNED) * _STORED)

    def misfit(self, inner: int, outputs: int, parts: int) -> str | None:
        """Why it cannot compute `outputs` columns over `inner`, or None."""
        if self.rows % 8 or not 8 <= self.rows <= 256 or self.columns % 64 or self.depth % 64:
            return f"{self} is off the grid of the tensor cores"
        if inner % self.depth or outputs % self.width:
            return f"[{inner}, {outputs}] is no multiple of steps and tiles of {self}"
        if parts * self.rows * self.columns > _ACCUMULATORS:
            return f"{self} accumulates more than registers hold"
        if self.blocks * (self.shared_bytes(parts) + 2048) > _SHARED_BYTES:
            return f"{self} needs {self.shared_bytes(parts)} bytes of shared memory"
        return None


def default_tiling(num_rows: int, groups: int, inner: int, outputs: int, parts: int) -> Tiling:
    """The tiling for groups of `num_rows / groups` rows.

    Few rows: weights stream through, in two blocks a multiprocessor. Many: tiles as large as two
    warpgroups can accumulate.
    """
    mean = num_rows / groups
    rows = next(rows for limit, rows in _ROWS if mean <= limit)
    if rows <= 32 or outputs % 128:
        depth = 128 if parts == 1 and inner % 128 == 0 else 64
        return _deepest(Tiling(rows, 64, depth, 6, 1, 2 if rows <= 32 else 1), parts)
    columns = 128 if parts == 1 and outputs % 256 == 0 else 64
    return _deepest(Tiling(rows, columns, 64, 6, 2, 1), parts)


_ROWS = ((0.25, 8), (4, 16), (16, 32), (48, 64), (400, 96), (float("inf"), 128))


def _deepest(tiling: Tiling, parts: int) -> Tiling:
    """The same with no more stages than shared memory holds."""
    while tiling.misfit(tiling.depth, tiling.width, parts):
        tiling = dataclasses.replace(tiling, stages=tiling.stages - 1)
    return tiling


def refuses(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> str | None:
    return no_hopper() or unfit(x, w, 1)


def refuses_swiglu(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> str | None:
    return no_hopper() or unfit(x, w, 2)


def unfit(x: jax.Array, w: jax.Array, parts: int) -> str | None:
    """Why the kernel does not take these arrays, on whatever machine."""
    if x.dtype != jnp.bfloat16 or w.dtype != jnp.bfloat16:
        return f"takes bfloat16, not {x.dtype} and {w.dtype}"
    (_, inner), outputs = x.shape, w.shape[2] // parts
    if inner % 64 or outputs % 64 or not inner or not outputs:
        return f"takes multiples of 64, not [{inner}, {outputs}]"
    return None


def grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    *,
    tiling: Tiling | None = None,
    interpret: Any = False,
) -> jax.Array:
    """x [M, K] @ w [G, K, N] of each row's group, bfloat16; see `ops.grouped_matmul`."""
    return _grouped(x, w, group_sizes, 1, tiling, interpret)


def grouped_swiglu(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    *,
    tiling: Tiling | None = None,
    interpret: Any = False,
) -> jax.Array:
    """silu(x @ gate) * (x @ up), w [G, K, 2I] holding gate, then up; see `ops.grouped_swiglu`."""
    return _grouped(x, w, group_sizes, 2, tiling, interpret)


def _grouped(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    parts: int,
    tiling: Tiling | None,
    interpret: Any,
) -> jax.Array:
    num_rows, (groups, inner, width) = x.shape[0], w.shape
    t = tiling or default_tiling(num_rows, groups, inner, width // parts, parts)
    if problem := t.misfit(inner, width // parts, parts):
        raise ValueError(problem)
    if num_rows == 0:
        return jnp.zeros((0, width // parts), x.dtype)
    tiles = tile_list(group_sizes, num_rows, t.rows, ALIGNED)
    return over_tiles(x, w, tiles, parts, t, interpret)


def over_tiles(
    x: jax.Array, w: jax.Array, tiles: jax.Array, parts: int, t: Tiling, interpret: Any
) -> jax.Array:
    """The product (`parts` 1) or the SiLU-gated one (2) over a table of tiles of `t.rows` rows.

    `tiles` is what `tile_list` makes, its first rows multiples of `ALIGNED`, or lists the same
    tiles in another order. `t` fits the matrices (`Tiling.misfit`).
    """
    num_rows, outputs = x.shape[0], w.shape[2] // parts
    # Copies take arrays of at least a tile, and swizzled ones whole groups of 8 rows.
    long = pl.cdiv(max(t.rows, num_rows), ALIGNED) * ALIGNED
    x = jnp.pad(x, ((0, long - num_rows), (0, 0)))
    kernel = plgpu.kernel(
        partial(_kernel, t=t, parts=parts),
        out_type=jax.ShapeDtypeStruct((long, outputs), x.dtype),
        grid=(_SMS * t.blocks,),
        grid_names=("block",),
        num_threads=t.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=_scratch(t, parts, x.dtype),
        compiler_params=_PARAMS,
        interpret=interpret,
        kernel_name="grouped_swiglu" if parts == 2 else "grouped_matmul",
    )
    return kernel(tiles, x, w)[:num_rows]


def _scratch(t: Tiling, parts: int, dtype: Any) -> dict[str, Any]:
    slices = parts * t.warpgroups
    return {
        "x_steps": plgpu.SMEM((t.stages, t.rows, t.depth), dtype, transforms=_SWIZZLED),
        "w_steps": plgpu.SMEM((t.stages, slices, t.depth, t.columns), dtype, transforms=_SWIZZLED),
        "y_tiles": plgpu.SMEM((t.warpgroups, t.rows, _STORED), dtype, transforms=_SWIZZLED),
        "y_edges": plgpu.SMEM((t.warpgroups, 2, ALIGNED, _STORED), dtype),
        "full": plgpu.Barrier(num_arrivals=1 + slices, num_barriers=t.stages),
        "empty": plgpu.Barrier(num_arrivals=t.warpgroups, num_barriers=t.stages),
    }


def _kernel(tiles, x, w, y, x_steps, w_steps, y_tiles, y_edges, full, empty, *, t, parts):
    groups, inner, _ = w.shape
    across = y.shape[1] // t.width
    block, blocks = lax.axis_index("block"), _SMS * t.blocks
    units = lax.div(tiles[tiles.shape[0] - 1, 0] * across - block + blocks - 1, blocks)

    def unit(i):
        """(table entry, group, first column, steps) of the i-th piece of work of this block.

        Rows of no group take no steps: they get the zeros that accumulators start from.
        """
        index = block + i * blocks
        tile, column = lax.div(index, across), lax.rem(index, across) * t.width
        group = tiles[tile, 0]
        steps = jnp.where(group < groups, inner // t.depth, 0)
        return tiles.at[tile], group, column, steps

    @pl.when(lax.axis_index("warpgroup") == t.warpgroups)
    def _():
        if t.warpgroups > 1:
            plgpu.set_max_registers(_REGISTERS_FETCHING, action="decrease")
        _fetch(units, unit, x, w, x_steps, w_steps, full, empty, t, parts)

    @pl.when(lax.axis_index("warpgroup") < t.warpgroups)
    def _():
        if t.warpgroups > 1:
            plgpu.set_max_registers(_REGISTERS_MULTIPLYING, action="increase")
        _multiply(units, unit, y, x_steps, w_steps, y_tiles, y_edges, full, empty, t, parts)


def _fetch(units, unit, x, w, x_steps, w_steps, full, empty, t, parts):
    """Keep the ring of steps full. Slice `part * warpgroups + i` of w is of warpgroup i."""
    half = w.shape[2] // parts

    def fetch_tile(i, done):
        entry, group, column, steps = unit(i)
        first = pl.multiple_of(entry[1], ALIGNED)

        def fetch(k, step):
            slot, depth = lax.rem(step, t.stages), pl.ds(k * t.depth, t.depth)

            @pl.when(step >= t.stages)
            def _():
                plgpu.barrier_wait(empty.at[slot])

            rows = x.at[pl.ds(first, t.rows), depth]
            plgpu.copy_gmem_to_smem(rows, x_steps.at[slot], full.at[slot])
            for index in range(parts * t.warpgroups):
                part, warpgroup = divmod(index, t.warpgroups)
                columns = pl.ds(part * half + column + warpgroup * t.columns, t.columns)
                weights = w.at[group, depth, columns]
                plgpu.copy_gmem_to_smem(weights, w_steps.at[slot, index], full.at[slot])
            return step + 1

        return lax.fori_loop(0, steps, fetch, done)

    def drain(slot, _):
        plgpu.barrier_wait(empty.at[slot])
        return ()

    done = lax.fori_loop(0, units, fetch_tile, jnp.int32(0))
    lax.fori_loop(0, jnp.minimum(done, t.stages), drain, ())


def _multiply(units, unit, y, x_steps, w_steps, y_tiles, y_edges, full, empty, t, parts):
    warpgroup = lax.axis_index("warpgroup")

    def accumulate(done, steps, *accumulators):
        def step(k, _):
            slot = lax.rem(done + k, t.stages)
            plgpu.barrier_wait(full.at[slot])
            for part, accumulator in enumerate(accumulators):
                weights = w_steps.at[slot, part * t.warpgroups + warpgroup]
                plgpu.wgmma(accumulator, weights.T, x_steps.at[slot].T)
            # All but the products of this step are done, and so is the slot of the last one.
            plgpu.wgmma_wait(parts)

            @pl.when(k > 0)
            def _():
                plgpu.barrier_arrive(empty.at[lax.rem(done + k - 1, t.stages)])

            return ()

        lax.fori_loop(0, steps, step, ())
        plgpu.wgmma_wait(0)

        @pl.when(steps > 0)
        def _():
            plgpu.barrier_arrive(empty.at[lax.rem(done + steps - 1, t.stages)])

        # Without the barrier, arithmetic may move ahead of the wait.
        return lax.optimization_barrier(tuple(a[...] for a in accumulators))

    def multiply_tile(i, done):
        entry, _, column, steps = unit(i)
        first, begin, end = entry[1], entry[2], entry[3]
        shape = plgpu.WGMMAAccumulatorRef((t.columns, t.rows), jnp.float32)
        out = pl.run_scoped(partial(accumulate, done, steps), *[shape] * parts)
        value = out[0] if parts == 1 else out[0] * jax.nn.sigmoid(out[0]) * out[1]
        value = plgpu.layout_cast(value.astype(y.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        tile = y_tiles.at[warpgroup]
        for start in range(0, t.columns, _STORED):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            tile.T[...] = value[start : start + _STORED]
            plgpu.commit_smem()
            target = y.at[:, pl.ds(column + warpgroup * t.columns + start, _STORED)]
            _store(tile, y_edges.at[warpgroup], target, first, begin - first, end - first)
        return done + steps

    lax.fori_loop(0, units, multiply_tile, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _store(tile, edges, y, first, begin, end):
    """y[first + begin : first + end] = tile[begin : end].

    Swizzled copies move whole groups of 8 rows. The incomplete ones at both ends are first laid
    out plainly in `edges`.
    """
    after = lax.div(begin + ALIGNED - 1, ALIGNED) * ALIGNED
    before = lax.div(end, ALIGNED) * ALIGNED
    _copy(tile, y, after, first + after, jnp.maximum(before - after, 0), tile.shape[0], ALIGNED)
    tail = jnp.maximum(after, before)
    for i, (start, stop) in enumerate(((begin, jnp.minimum(after, end)), (tail, end))):

        @pl.when(start < stop)
        def _(i=i, start=start, stop=stop):
            group = lax.div(start, ALIGNED) * ALIGNED
            rows = tile.at[pl.ds(pl.multiple_of(group, ALIGNED), ALIGNED)].T
            edges.at[i].T[...] = plgpu.load(rows, layout=plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()
            _copy(edges.at[i], y, start - group, first + start, stop - start, ALIGNED, 1)


def _copy(tile, y, source, target, rows, below, multiple):
    """y[target : target + rows] = tile[source : source + rows], rows a `multiple`, <= `below`."""
    size = 1 << (below.bit_length() - 1)
    while size >= multiple:

        @pl.when((rows & size) != 0)
        def _(size=size, source=source, target=target):
            start, to = (pl.multiple_of(a, multiple) for a in (source, target))
            plgpu.copy_smem_to_gmem(tile.at[pl.ds(start, size)], y.at[pl.ds(to, size)])

        source, target = source + (rows & size), target + (rows & size)
        size //= 2
