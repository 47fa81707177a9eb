"""`ragged_pack` and `ragged_unpack` on Hopper: gathers of rows of 128 values at the rate of memory.

A block of threads makes `Blocking.rows` consecutive rows of the result, each row in one warp, four
values a thread: a warp reads a row with one instruction wherever it lies, finds its largest
magnitude with one more, and writes it with a third. All rows of a block are read before the first
is written, because bytes in flight, not arithmetic, decide the speed.

Pallas has no loads by a vector of row numbers, no fused multiply-add and no division that rounds
correctly, so those three are written in MLIR; the interpreter, which cannot run it, gets JAX code.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxlib.mlir.dialects import math as mlir_math

from pallas_kernels import packing
from pallas_kernels.mgpu.common import no_hopper

VALUE_DIM = 128
WARPS = 4
PER_THREAD = 4

ROW_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((WARPS, VALUE_DIM), (PER_THREAD,))),
    warp_dims=(-3,),
    lane_dims=(-2,),
    vector_dim=-1,
)
"""`[rows, 128]`: row r in warp r % 4, its columns 4 t .. 4 t + 3 in thread t."""

SCALE_LAYOUT = ROW_LAYOUT.reduce(1)
_PARAMS = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Lane,
    # Nothing that a kernel here writes is read in it.
    unsafe_no_auto_barriers=True,
)


@dataclass(frozen=True)
class Blocking:
    """How the work is cut. `rows`: rows a block of threads makes at once, a multiple of 4."""

    rows: int = 32


def refuses_pack(rows, scales, temporal, index, slots, sources) -> str | None:
    """Why `pack` cannot take these arguments here, or None."""
    return no_hopper() or unfit(rows, scales, temporal, index)


def refuses_unpack(temporal, rows, scales, inverse, slots, targets) -> str | None:
    """Why `unpack` cannot take these arguments here, or None."""
    return no_hopper() or unfit(rows, scales, temporal, inverse)


def unfit(rows, scales, temporal, table) -> str | None:
    """Why the kernels cannot take arrays of these shapes and dtypes, on any machine; or None."""
    layers, states, heads, key, value = temporal.shape
    slots, total = rows.shape[0], _packed_rows(rows.shape)
    if temporal.dtype != jnp.float32 or table.dtype != jnp.int32:
        return f"temporal is {temporal.dtype} and its table {table.dtype}, not float32 and int32"
    if (rows.dtype, scales is None) not in ((jnp.float32, True), (jnp.int8, False)):
        return f"rows are {rows.dtype} and scales {'absent' if scales is None else 'present'}"
    if value != VALUE_DIM:
        return f"rows hold {value} values, not {VALUE_DIM}"
    if heads * key % WARPS or total < WARPS:
        return f"{total} packed rows of layers of {heads * key}: too few, or no multiple of {WARPS}"
    if max(slots * total, layers * states * heads * key) >= 2**31:
        return "row numbers exceed 32 bits"
    return None


def pack(
    rows: jax.Array,
    scales: jax.Array | None,
    temporal: jax.Array,
    index: jax.Array,
    slots: jax.Array,
    sources: jax.Array,
    blocking: Blocking | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array | None]:
    """`ragged_pack`: see `pallas_kernels.ops`."""
    _, states, heads, key, value = temporal.shape
    pool_slots, total, layer_rows = rows.shape[0], _packed_rows(rows.shape), heads * key
    unit_rows = total // index.shape[0]
    # Quantising takes registers, of which many rows a thread leave too few for other blocks.
    blocking = blocking or Blocking(32 if scales is None else 8)
    block = _block(blocking, total, unit_rows)
    tiles = pl.cdiv(total, block)

    def ragged_pack_rows(temporal, index, slots, sources, rows, *scales):
        def tile(checkpoint, number):
            # The last tile moves up to end with the rows; what it shares with the one before is
            # written twice, the same.
            first = jnp.minimum(number * block, total - block)
            slot = slots[checkpoint]
            live = (slot > 0) & (slot < pool_slots)
            at = _named(index, first, block, unit_rows, interpret)
            at += lax.div(at, layer_rows) * ((states - 1) * layer_rows)
            at += sources[checkpoint] * layer_rows
            x = _load_rows(temporal, jnp.where(live, at, -1), interpret)

            @pl.when(live)
            def _():
                to = pl.ds(first, block)
                if scales:
                    rows.at[slot, to][...], scales[0].at[slot, to][...] = _quantize(x, interpret)
                else:
                    rows.at[slot, to][...] = x

        tile(lax.axis_index("checkpoint"), lax.axis_index("tile"))

    pools = [rows.reshape(pool_slots, total, value)]
    if scales is not None:
        pools.append(scales.reshape(pool_slots, total))
    flat = temporal.reshape(-1, value)
    grid = (slots.shape[0], tiles)
    new = _update(ragged_pack_rows, (flat, index, slots, sources), pools, grid, interpret)
    return new[0].reshape(rows.shape), None if scales is None else new[1].reshape(scales.shape)


def unpack(
    temporal: jax.Array,
    rows: jax.Array,
    scales: jax.Array | None,
    inverse: jax.Array,
    slots: jax.Array,
    targets: jax.Array,
    blocking: Blocking = Blocking(),
    interpret: Any = None,
) -> jax.Array:
    """`ragged_unpack`: see `pallas_kernels.ops`."""
    layers, states, heads, key, value = temporal.shape
    pool_slots, total, layer_rows = rows.shape[0], _packed_rows(rows.shape), heads * key
    unit_rows = layers * layer_rows // inverse.shape[0]
    block = _block(blocking, layer_rows, unit_rows, layer_rows)
    tiles = layers * (layer_rows // block)

    def ragged_unpack_rows(rows, *args):
        *scales, inverse, slots, targets, temporal = args

        def tile(checkpoint, number):
            first = number * block
            slot, target = slots[checkpoint], targets[checkpoint]
            wanted = (target >= 0) & (target < states) & ((slot != 0) | (target != 0))
            at = _named(inverse, first, block, unit_rows, interpret)
            stored = (at >= 0) & (wanted & (slot > 0) & (slot < pool_slots))
            at = jnp.where(stored, at + slot * total, -1)
            x, *scale = (_load_rows(ref, at, interpret) for ref in (rows, *scales))

            @pl.when(wanted)
            def _():
                y = x.astype(jnp.float32) * _along_rows(scale[0]) if scale else x
                to = pl.ds(lax.rem(first, layer_rows), block)
                temporal.at[lax.div(first, layer_rows), target, to][...] = y

        tile(lax.axis_index("checkpoint"), lax.axis_index("tile"))

    packed = [rows.reshape(-1, value)] + ([] if scales is None else [scales.reshape(-1)])
    pool = temporal.reshape(layers, states, layer_rows, value)
    grid = (slots.shape[0], tiles)
    args = (*packed, inverse, slots, targets)
    (new,) = _update(ragged_unpack_rows, args, [pool], grid, interpret)
    return new.reshape(temporal.shape)


def _packed_rows(shape: tuple[int, ...]) -> int:
    """Rows of 128 values of a checkpoint in a pool of this shape."""
    return math.prod(shape[1:-1])


def _block(blocking: Blocking, available: int, unit_rows: int, whole: int = 0) -> int:
    """Rows of a tile: no more than there are, all of one unit unless that is a single row, and a
    divisor of `whole`."""
    block = blocking.rows
    while block > available or whole % block or unit_rows > 1 and unit_rows % block:
        block //= 2
    return block


def _named(table: Any, first: Any, block: int, unit_rows: int, interpret: Any) -> jax.Array:
    """Rows `first ..` of what a table of units names, as numbers among the rows of all units;
    negative where the table is."""
    if unit_rows == 1:
        return plgpu.load(table.at[pl.ds(first, block)], layout=SCALE_LAYOUT, optimized=False)
    unit = table[lax.div(first, unit_rows)]
    start = jnp.where(unit < 0, -block, unit * unit_rows + lax.rem(first, unit_rows))
    if interpret:
        return start + jnp.arange(block, dtype=jnp.int32)
    return start + plgpu.broadcasted_iota(jnp.int32, (block,), 0, layout=SCALE_LAYOUT)


def _load_rows(ref: Any, at: jax.Array, interpret: Any) -> jax.Array:
    """Rows (or single values) `at` of `ref`, zeros where that is negative."""
    if interpret:
        rows = [jnp.where(row < 0, 0, ref[jnp.maximum(row, 0)]) for row in at]
        return jnp.stack(rows).astype(ref.dtype)
    shape, layout = (*at.shape, *ref.shape[1:]), SCALE_LAYOUT if len(ref.shape) == 1 else ROW_LAYOUT

    def load(ctx: Any, ref: ir.Value, at: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        del ctx
        registers = [_load_register(ref, row) for row in at.registers.flat]
        target = layout.to_mgpu()
        return mgpu.FragmentedArray(
            _registers=np.array(registers, object).reshape(target.registers_shape(shape)),
            _layout=target,
            _is_signed=True if isinstance(ref.type.element_type, ir.IntegerType) else None,
        )

    returned = plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=layout)
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALE_LAYOUT), return_type=returned)
    return inline(load)(ref, at)


def _load_register(ref: ir.Value, row: ir.Value) -> ir.Value:
    """This thread's part of row `row[0]` of `ref`, zeros if that is negative."""
    i32, i64 = (ir.IntegerType.get_signless(width) for width in (32, 64))
    element, single = ref.type.element_type, ref.type.rank == 1
    row = vector.extract(row, [], [0])
    offset, width = arith.extsi(i64, row), 1
    if not single:
        width = PER_THREAD
        lane = arith.remui(utils.thread_idx(), arith.constant(i32, 32))
        within = arith.muli(lane, arith.constant(i32, PER_THREAD))
        offset = arith.muli(offset, arith.constant(i64, VALUE_DIM))
        offset = arith.addi(offset, arith.extui(i64, within))
    base = llvm.addrspacecast(llvm.PointerType.get(1), utils.memref_ptr(ref))
    wanted = arith.cmpi(arith.CmpIPredicate.sge, row, arith.constant(i32, 0))
    words = _load_words(
        utils.getelementptr(base, [offset], element),
        wanted,
        width * utils.bitwidth(element) // 32,
    )
    loaded = vector.from_elements(ir.VectorType.get((len(words),), i32), words)
    return vector.bitcast(ir.VectorType.get((width,), element), loaded)


def _load_words(at: ir.Value, wanted: ir.Value, words: int) -> list[ir.Value]:
    """`words` (1 or 4) 32-bit words of memory that nothing writes meanwhile, or zeros.

    A branch around an ordinary load would serialise the loads of a block; a predicate does not.
    """
    i32 = ir.IntegerType.get_signless(32)
    clear = " ".join(f"mov.b32 ${i}, 0;" for i in range(words))
    load = {
        1: "ld.global.nc.b32 $0",
        4: "ld.global.nc.L1::no_allocate.v4.b32 {$0, $1, $2, $3}",
    }[words]
    out = llvm.inline_asm(
        i32 if words == 1 else llvm.StructType.get_literal([i32] * words),
        [at, wanted],
        f"{clear} @${words + 1} {load}, [${words}];",
        ",".join(["=r"] * words) + ",l,b",
        has_side_effects=True,
    )
    return [out] if words == 1 else [llvm.extractvalue(i32, out, [i]) for i in range(words)]


def _quantize(x: jax.Array, interpret: Any) -> tuple[jax.Array, jax.Array]:
    """Eq. 10 of the DASC paper, both divisions rounded to nearest.

    No quotient exceeds 127 by more than its rounding, so nothing is left to clip.
    """
    if interpret:
        return packing.quantize(x)
    # The bits of magnitudes order as they do, and integers reduce over a warp in one instruction.
    bits = lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
    largest = lax.bitcast_convert_type(jnp.max(bits, axis=1), jnp.float32)
    largest = jnp.maximum(largest, 1e-8)
    scale = _divide(
        largest, jnp.full_like(largest, 127), jnp.full_like(largest, 1 / 127), SCALE_LAYOUT
    )
    quotient = _divide(x, _along_rows(scale), _along_rows(_reciprocal(scale)), ROW_LAYOUT)
    # Adding 1.5 * 2**23 leaves the nearest integer, ties to even, in the low bits.
    rounded = lax.bitcast_convert_type(quotient + 12582912.0, jnp.int32)
    return rounded.astype(jnp.int8), scale


def _divide(x: jax.Array, y: jax.Array, inverse: jax.Array, layout: Any) -> jax.Array:
    """x / y rounded to nearest, from the rounded `inverse` of y (Markstein's theorem).

    Mosaic divides by an approximation that may miss by two places. One step brings x * inverse
    within one place of the quotient, from where the second rounds correctly.
    """

    def fma(a, b, c):
        return _elementwise(mlir_math.fma, layout, a, b, c)

    quotient = x * inverse
    for _ in range(2):
        quotient = fma(fma(-quotient, y, x), inverse, quotient)
    return quotient


def _reciprocal(x: jax.Array) -> jax.Array:
    """1 / x of a value a row, rounded to nearest."""

    def op(value: ir.Value) -> ir.Value:
        f32 = ir.F32Type.get()
        value = vector.extract(value, [], [0])
        value = llvm.inline_asm(f32, [value], "rcp.rn.f32 $0, $1;", "=f,f")
        return vector.from_elements(ir.VectorType.get((1,), f32), [value])

    return _elementwise(op, SCALE_LAYOUT, x)


def _elementwise(op: Callable[..., ir.Value], layout: Any, *arrays: jax.Array) -> jax.Array:
    """`op` on the registers of float32 arrays."""

    def apply(ctx: Any, *arrays: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        del ctx
        registers = np.empty_like(arrays[0].registers)
        for at in np.ndindex(registers.shape):
            registers[at] = op(*(array.registers[at] for array in arrays))
        return mgpu.FragmentedArray(_registers=registers, _layout=arrays[0].layout, _is_signed=None)

    returned = plgpu.ShapeDtypeStruct(arrays[0].shape, jnp.float32, layout=layout)
    inline: Any = plgpu.inline_mgpu(arg_types=(layout,) * len(arrays), return_type=returned)
    return inline(apply)(*(plgpu.layout_cast(array, layout) for array in arrays))


def _along_rows(per_row: jax.Array) -> jax.Array:
    shape = (per_row.shape[0], VALUE_DIM)
    return plgpu.layout_cast(lax.broadcast_in_dim(per_row, shape, [0]), ROW_LAYOUT)


def _update(
    body: Callable[..., None],
    args: tuple[jax.Array, ...],
    pools: list[jax.Array],
    grid: tuple[int, int],
    interpret: Any,
) -> list[jax.Array]:
    """Run `body(*args, *pools)`, which changes the pools in place."""
    refs = [jax.new_ref(pool) for pool in pools]
    kernel = plgpu.kernel(
        body,
        out_type=(),
        grid=grid,
        grid_names=("checkpoint", "tile"),
        compiler_params=_PARAMS,
        interpret=interpret,
    )
    kernel(*args, *refs)
    return [jax.freeze(ref) for ref in refs]
