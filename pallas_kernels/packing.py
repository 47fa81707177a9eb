"""Packed state checkpoints: rows gathered out of dense states into the slots of a pool, and back.

The XLA forms and the oracle of `ragged_pack` and `ragged_unpack`. KDA packs rows of V, GDN blocks
`[K, V]`; here and there a *unit* is one of them, and tables number the units of all layers.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32, Shaped


def quantize(rows: Float32[Array, "*R V"]) -> tuple[Shaped[Array, "*R V"], Float32[Array, "*R"]]:
    """Symmetric int8 with one scale per row, in float32 with round half to even.

    s = max(max |row|, 1e-8) / 127;  q = clip(round(row / s), -127, 127)   (Eq. 10 of the DASC
    paper).
    """
    scales = _quotient(jnp.maximum(jnp.abs(rows).max(axis=-1), 1e-8), jnp.float32(127))
    q = jnp.clip(jnp.round(_quotient(rows, scales[..., None])), -127, 127)
    return q.astype(jnp.int8), scales


def dequantize(
    rows: Shaped[Array, "*R V"], scales: Float32[Array, "*R"] | None
) -> Float32[Array, "*R V"]:
    """q s in float32; rows without scales are float32 already."""
    return rows if scales is None else rows.astype(jnp.float32) * scales[..., None]


def take(
    temporal: Float32[Array, "L N H K V"],
    index: Int32[Array, "R"],
    sources: Int32[Array, "M"],
    unit_shape: tuple[int, ...],
) -> Float32[Array, "M R *K V"]:
    """Units `index` of states `sources`; `unit_shape` is (V,) for KDA, (K, V) for GDN."""
    layers, states, heads, key, value = temporal.shape
    units = heads * key if len(unit_shape) == 1 else heads
    flat = temporal.reshape(layers * states * units, *unit_shape)
    layer, unit = index // units, index % units
    return flat.at[(layer * states + sources[:, None]) * units + unit].get(mode="promise_in_bounds")


def spread(
    rows: Shaped[Array, "S R *K V"],
    scales: Float32[Array, "S R *K"] | None,
    inverse: Int32[Array, "U"],
    slots: Int32[Array, "M"],
    layers: int,
) -> Float32[Array, "L M U1 *K V"]:
    """Dense states of pool slots: zeros in units that `inverse` marks -1, and everywhere for a slot
    outside the pool. R is at least 1."""
    pool_slots, retained = rows.shape[:2]
    table, outside = inverse.reshape(layers, 1, -1), pool_slots * retained
    live = (table >= 0) & ((slots >= 0) & (slots < pool_slots))[:, None]
    index = jnp.where(live, slots[:, None] * retained + table, outside)

    def units(packed: Array) -> Array:
        flat = packed.reshape(outside, *packed.shape[2:])
        return flat.at[index].get(mode="fill", fill_value=0)

    return dequantize(units(rows), None if scales is None else units(scales))


def pack(
    rows: jax.Array,
    scales: jax.Array | None,
    temporal: jax.Array,
    index: jax.Array,
    slots: jax.Array,
    sources: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
    """`ragged_pack`, all units at once."""
    values = take(temporal, index, sources, rows.shape[2:])
    # Past the end instead of before the start: JAX counts negative indices from the end.
    slots = jnp.where(slots > 0, slots, rows.shape[0])
    if scales is None:
        return rows.at[slots].set(values, mode="drop"), None
    q, s = quantize(values)
    return rows.at[slots].set(q, mode="drop"), scales.at[slots].set(s, mode="drop")


def unpack(
    temporal: jax.Array,
    rows: jax.Array,
    scales: jax.Array | None,
    inverse: jax.Array,
    slots: jax.Array,
    targets: jax.Array,
) -> jax.Array:
    """`ragged_unpack`, all units at once."""
    layers, states, *unit = temporal.shape
    if rows.shape[1]:
        dense = spread(rows, scales, inverse, jnp.where(slots > 0, slots, -1), layers)
        dense = dense.reshape(layers, -1, *unit)
    else:
        dense = jnp.zeros((layers, slots.shape[0], *unit), jnp.float32)
    dropped = (targets < 0) | (slots == 0) & (targets == 0)
    return temporal.at[:, jnp.where(dropped, states, targets)].set(dense, mode="drop")


def pack_serial(
    rows: jax.Array,
    scales: jax.Array | None,
    temporal: jax.Array,
    index: jax.Array,
    slots: jax.Array,
    sources: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
    """`ragged_pack`, unit by unit."""
    view = _by_unit(temporal, rows)
    retained = index.shape[0]

    def one(step: jax.Array, pools: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        checkpoint, row = step // retained, step % retained
        layer, unit = index[row] // view.shape[2], index[row] % view.shape[2]
        values = view[layer, sources[checkpoint], unit]
        slot = slots[checkpoint]
        inside = (slot > 0) & (slot < rows.shape[0])
        return tuple(
            pool.at[slot, row].set(jnp.where(inside, new, pool[slot, row]))
            for pool, new in zip(
                pools, (values,) if scales is None else quantize(values), strict=True
            )
        )

    pools = (rows,) if scales is None else (rows, scales)
    if retained:
        pools = lax.fori_loop(0, slots.shape[0] * retained, one, pools)
    rows, *rest = pools
    return rows, rest[0] if rest else None


def unpack_serial(
    temporal: jax.Array,
    rows: jax.Array,
    scales: jax.Array | None,
    inverse: jax.Array,
    slots: jax.Array,
    targets: jax.Array,
) -> jax.Array:
    """`ragged_unpack`, unit by unit."""
    layers, states, units, *_ = _by_unit(temporal, rows).shape

    def one(step: jax.Array, view: jax.Array) -> jax.Array:
        checkpoint, unit = step // inverse.shape[0], step % inverse.shape[0]
        slot, target, row = slots[checkpoint], targets[checkpoint], inverse[unit]
        values = jnp.zeros(rows.shape[2:], jnp.float32)
        if rows.shape[1]:
            stored = (row >= 0) & (slot > 0) & (slot < rows.shape[0])
            scale = None if scales is None else scales[slot, row]
            values = jnp.where(stored, dequantize(rows[slot, row], scale), 0)
        layer, unit = unit // units, unit % units
        inside = (target >= 0) & (target < states) & ((slot != 0) | (target != 0))
        old = view[layer, target, unit]
        return view.at[layer, target, unit].set(jnp.where(inside, values, old))

    steps = slots.shape[0] * inverse.shape[0]
    return lax.fori_loop(0, steps, one, _by_unit(temporal, rows)).reshape(temporal.shape)


def _by_unit(temporal: jax.Array, rows: jax.Array) -> jax.Array:
    """`[L, N, units of a layer, *unit]`, units as `rows` has them."""
    return temporal.reshape(*temporal.shape[:2], -1, *rows.shape[2:])


def _quotient(x: jax.Array, y: jax.Array) -> jax.Array:
    # XLA turns x / broadcast(y) into x * broadcast(1 / y), which rounds twice. A divisor chosen by
    # x looks unlike a broadcast, costs nothing once fused, and is y wherever the quotient is a
    # number.
    return x / jnp.where(x == x, y, jnp.float32(1))
