"""Parameters in the order in which ranks hold them, and in another order of head bundles.

A *bundle* is a key head of a recurrent layer with the value heads that use it: what always stays
together, and what `dasc_jax.parallel` gives to a rank. Reordering bundles of a layer (stage 1 of
section 4.3 of the DASC paper) permutes its decays, projections, convolution and gates alike, which
changes nothing but the order of the units in its state. Each tensor is affected along one axis, the
one it is split along, so every rearrangement here is an index into that axis.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jaxtyping import Array, Int

from dasc_jax.config import DeltaConfig, GQAConfig, ModelConfig
from dasc_jax.parallel import SPLIT, family_name, local_config, param_spec, rank_count
from dasc_jax.weights.specs import param_specs

Orders = Sequence[Int[np.ndarray, "Hk"]]
"""For each recurrent layer, new position -> old bundle."""

PADDING = -1
"""In an index: a row of zeros."""


def channel_order(
    delta: DeltaConfig, tp: int = 1, order: Int[np.ndarray, "Hk"] | None = None
) -> Int[np.ndarray, "C"]:
    """Of each convolution channel on `tp` ranks, where it stood in the released order q | k | v.

    A rank's channels are those of its own bundles, again q | k | v, and ranks follow one another.
    """
    bundles = np.arange(delta.num_key_heads) if order is None else np.asarray(order)
    keys, channels = delta.num_key_heads * delta.key_dim, np.arange(delta.conv_channels)
    parts = [
        part.reshape(delta.num_key_heads, -1)[bundles].reshape(tp, -1)
        for part in np.split(channels, [keys, 2 * keys])
    ]
    return np.concatenate(parts, axis=1).reshape(-1)


def sources(
    path: str, config: ModelConfig, tp: int = 1, orders: Orders | None = None
) -> Int[np.ndarray, "N"] | None:
    """Of each row along a parameter's split axis, the row of the released parameter (or PADDING).

    None where nothing moves. `tp` ranks need the convolution's channels in rank order, key-value
    heads repeated where there are fewer, and a vocabulary that divides.
    """
    name = family_name(path)
    if name in ("embed.weight", "lm_head.kernel"):
        rows, padding = config.vocab_size, -config.vocab_size % tp
        return np.pad(np.arange(rows), (0, padding), constant_values=PADDING) if padding else None
    if not name.startswith("mixer.") or SPLIT[name] is None:
        return None
    layer = int(path.split(".")[1])
    if config.layer_kinds[layer] == "attention":
        return _repeated_heads(name, config, tp)
    order = None if orders is None else orders[config.recurrent_layers.index(layer)]
    if name == "mixer.conv.weight":
        moved = tp > 1 or order is not None
        return channel_order(config.delta, tp, order) if moved else None
    return None if order is None else _rows(order, _bundle_width(name, config.delta))


def _repeated_heads(name: str, config: ModelConfig, tp: int) -> Int[np.ndarray, "N"] | None:
    attention = config.attention
    if not isinstance(attention, GQAConfig) or tp <= attention.num_kv_heads:
        return None
    if name not in ("mixer.k_proj.kernel", "mixer.v_proj.kernel"):
        return None
    copies = tp // attention.num_kv_heads
    return _rows(np.repeat(np.arange(attention.num_kv_heads), copies), attention.head_dim)


def _rows(blocks: Int[np.ndarray, "N"], width: int) -> Int[np.ndarray, "R"]:
    """The rows of these blocks of `width` rows each."""
    return (np.asarray(blocks)[:, None] * width + np.arange(width)).reshape(-1)


def _bundle_width(name: str, delta: DeltaConfig) -> int:
    """Rows of a bundle along a parameter's split axis."""
    heads = delta.num_value_heads // delta.num_key_heads
    return {
        "mixer.q_proj.kernel": delta.key_dim,
        "mixer.k_proj.kernel": delta.key_dim,
        "mixer.v_proj.kernel": heads * delta.value_dim,
        "mixer.b_proj.kernel": heads,
        "mixer.decay.A_log": heads,
        "mixer.decay.dt_bias": heads,
        "mixer.decay.up.kernel": heads * (delta.key_dim if delta.kind == "kda" else 1),
        "mixer.gate.up.kernel": heads * delta.value_dim,
        "mixer.o_proj.kernel": heads * delta.value_dim,
    }[name]


def permute(
    params: Mapping[str, Array], config: ModelConfig, orders: Orders, tp: int = 1
) -> dict[str, Array]:
    """The same model with the head bundles of each recurrent layer in another order.

    Args:
        params: in the released order, as `tp` ranks hold them; so they stay.
        orders: for each recurrent layer, new position -> old bundle, such as `HeadOrder.bundles`;
            those of its inverse undo it on one rank.

    Raises:
        ValueError: an order that is no permutation, or not one for every recurrent layer.
    """
    check_orders(config, orders)
    moved = {}
    for path, value in params.items():
        index, now = sources(path, config, tp, orders), sources(path, config, tp)
        if index is not None and (now is None or not np.array_equal(index, now)):
            index = index if now is None else np.argsort(now)[index]
            value = _taken_in_place(path, value, index) if tp > 1 else _taken(path, value, index)
        moved[path] = value
    return moved


def _taken_in_place(path: str, value: Array, index: Int[np.ndarray, "N"]) -> Array:
    take = jax.jit(partial(_taken, path, index=index), out_shardings=value.sharding)
    return take(value)


def check_orders(config: ModelConfig, orders: Orders) -> None:
    """Raise ValueError unless `orders` has a permutation for every recurrent layer."""
    layers, bundles = len(config.recurrent_layers), config.delta.num_key_heads
    if len(orders) != layers:
        raise ValueError(f"{len(orders)} orders for {layers} recurrent layers")
    for row, order in enumerate(orders):
        if sorted(np.asarray(order).tolist()) != list(range(bundles)):
            raise ValueError(
                f"the order of recurrent layer {row} is no permutation of {bundles} head bundles:"
                f" {np.asarray(order).tolist()}"
            )


def _taken(path: str, value: np.ndarray | Array, index: Int[np.ndarray, "N"]) -> Any:
    axis = SPLIT[family_name(path)]
    xp = jnp if isinstance(value, jax.Array) else np
    rows = xp.take(value, np.maximum(index, 0), axis=axis)
    if index.min() >= 0:
        return rows
    shape = [1] * rows.ndim
    shape[axis or 0] = -1
    return xp.where((index >= 0).reshape(shape), rows, xp.zeros((), rows.dtype))


@dataclass(frozen=True)
class Placement:
    """Where each parameter goes and in which order: the last step of loading."""

    config: ModelConfig
    shardings: Callable[[str], Sharding]
    tp: int = 1
    orders: Orders | None = None

    def index(self, path: str) -> Int[np.ndarray, "N"] | None:
        """`sources` of a parameter."""
        return sources(path, self.config, self.tp, self.orders)

    def place(self, path: str, value: np.ndarray | Array) -> Array:
        """A released parameter on its devices: each receives its own part only."""
        index = self.index(path)
        moved = value if index is None else _taken(path, value, index)
        sharding = self.shardings(path)
        if sharding.is_fully_addressable:
            return jax.device_put(moved, sharding)
        # device_put would send all of it between processes, to ask whether they have the same.
        moved = np.asarray(moved)
        return jax.make_array_from_callback(moved.shape, sharding, lambda part: moved[part])


def placement(config: ModelConfig, mesh: Mesh, orders: Orders | None = None) -> Placement:
    """The placement on the ranks of a mesh.

    Raises:
        ConfigError: the ranks do not divide the model.
        ValueError: see `check_orders`.
    """
    tp = rank_count(mesh)
    local_config(config, tp)
    if orders is not None:
        check_orders(config, orders)
    return Placement(config, lambda path: NamedSharding(mesh, param_spec(path)), tp, orders)


def shard_params(
    params: Mapping[str, Array], config: ModelConfig, mesh: Mesh, orders: Orders | None = None
) -> dict[str, Array]:
    """Parameters in the released order, spread over the ranks of a mesh; see `placement`."""
    placed = placement(config, mesh, orders)
    return {path: placed.place(path, value) for path, value in params.items()}


def sharded_specs(config: ModelConfig, dtype: str, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Global shape, dtype and sharding of every parameter on the ranks of a mesh."""
    placed, specs = placement(config, mesh), {}
    for path, spec in param_specs(config, dtype).items():
        shape, index = list(spec.shape), placed.index(path)
        if index is not None:
            shape[SPLIT[family_name(path)] or 0] = len(index)
        specs[path] = jax.ShapeDtypeStruct(
            tuple(shape), spec.dtype, sharding=placed.shardings(path)
        )
    return specs
