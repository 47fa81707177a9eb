"""Tensor parallelism: how a model is cut over the ranks of a mesh axis.

Every rank runs the same program over what `local_config` says is its own: a share of the heads (a
key head together with the value heads it serves), of the experts, of the inner columns of dense and
shared feed-forwards, and of the vocabulary. Ranks meet at the end of a module, where partial
products are summed, and at the logits, which are gathered. Routers, norms, MLA latents and low-rank
projections into a gate are on every rank; key-value heads are, where there are fewer than ranks.

The ranks of a model lie along the mesh axis `tp`; over other axes of a mesh everything repeats.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dasc_jax.config import ConfigError, GQAConfig, MLAConfig, ModelConfig

AXIS = "tp"
"""The mesh axis of the ranks."""

SPLIT: dict[str, int | None] = {
    "embed.weight": 0,
    "lm_head.kernel": 1,
    "norm.weight": None,
    "input_norm.weight": None,
    "post_norm.weight": None,
    "mixer.q_proj.kernel": 1,
    "mixer.k_proj.kernel": 1,
    "mixer.v_proj.kernel": 1,
    "mixer.conv.weight": 0,
    "mixer.b_proj.kernel": 1,
    "mixer.decay.A_log": 0,
    "mixer.decay.dt_bias": 0,
    "mixer.decay.down.kernel": None,
    "mixer.decay.up.kernel": 1,
    "mixer.gate.down.kernel": None,
    "mixer.gate.up.kernel": 1,
    "mixer.o_norm.weight": None,
    "mixer.o_proj.kernel": 0,
    "mixer.kv_a.kernel": None,
    "mixer.kv_norm.weight": None,
    "mixer.k_up": 0,
    "mixer.v_up": 0,
    "mixer.gate_proj.kernel": 1,
    "mixer.q_norm.weight": None,
    "mixer.k_norm.weight": None,
    "ffn.gate.kernel": 1,
    "ffn.up.kernel": 1,
    "ffn.down.kernel": 0,
    "ffn.router.kernel": None,
    "ffn.router.bias": None,
    "ffn.experts.gate_up": 0,
    "ffn.experts.down": 0,
    "ffn.shared.gate.kernel": 1,
    "ffn.shared.up.kernel": 1,
    "ffn.shared.down.kernel": 0,
    "ffn.shared_gate.kernel": None,
}
"""The axis along which ranks share a parameter; None: every rank holds all of it."""


def make_mesh(tp: int, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of `tp` ranks over the first devices.

    Raises:
        ConfigError: there are fewer devices.
    """
    devices = jax.devices() if devices is None else devices
    if not 1 <= tp <= len(devices):
        raise ConfigError(f"tp={tp}: there are {len(devices)} devices")
    return Mesh(np.array(devices[:tp]), (AXIS,))


def tensor_mesh(mesh: Mesh) -> Mesh:
    """`mesh` as this library uses it: over an explicit axis every operation would have to name its
    sharding.

    Raises:
        ConfigError: no axis is called `tp`.
    """
    if AXIS not in mesh.axis_names:
        raise ConfigError(f"the mesh has axes {mesh.axis_names}, none of them {AXIS!r}")
    if set(mesh.axis_types) == {AxisType.Auto}:
        return mesh
    return Mesh(mesh.devices, mesh.axis_names)


def rank_count(mesh: Mesh | None) -> int:
    """Ranks that a model on this mesh is cut over; 1 without a mesh."""
    return 1 if mesh is None else mesh.shape[AXIS]


def local_config(config: ModelConfig, tp: int) -> ModelConfig:
    """What one of `tp` ranks computes of a model.

    `moe.num_experts` stays whole, because every rank routes; a rank holds `num_experts / tp` of
    them. A vocabulary that does not divide is padded; special tokens mean nothing to one rank.

    Raises:
        ConfigError: `tp` does not divide what has to be divided, with all the numbers.
    """
    if tp == 1:
        return config
    _check(config, tp)
    attention, moe, delta = config.attention, config.moe, config.delta
    heads = {"num_heads": attention.num_heads // tp}
    if isinstance(attention, GQAConfig):
        heads["num_kv_heads"] = max(1, attention.num_kv_heads // tp)
    inner = config.dense_intermediate
    return dataclasses.replace(
        config,
        vocab_size=-(-config.vocab_size // tp),
        dense_intermediate=inner if inner is None else inner // tp,
        delta=dataclasses.replace(
            delta,
            num_key_heads=delta.num_key_heads // tp,
            num_value_heads=delta.num_value_heads // tp,
        ),
        attention=dataclasses.replace(attention, **heads),
        moe=moe and dataclasses.replace(moe, shared_intermediate=moe.shared_intermediate // tp),
        bos_token_id=None,
        eos_token_ids=(),
        pad_token_id=None,
    )


def _check(config: ModelConfig, tp: int) -> None:
    attention, moe = config.attention, config.moe
    shared = {
        "delta.num_key_heads": config.delta.num_key_heads,
        "attention.num_heads": attention.num_heads,
    }
    if moe is not None:
        shared["moe.num_experts"] = moe.num_experts
        shared["moe.shared_intermediate"] = moe.shared_intermediate
    if "dense" in config.ffn_kinds and config.dense_intermediate is not None:
        shared["dense_intermediate"] = config.dense_intermediate
    wrong = [f"{name}={size} is no multiple" for name, size in shared.items() if size % tp]
    if isinstance(attention, GQAConfig):
        heads = attention.num_kv_heads
        if heads % tp and tp % heads:
            wrong.append(f"attention.num_kv_heads={heads} is neither multiple nor divisor")
    if tp < 1 or wrong:
        raise ConfigError(f"tp={tp} does not divide the model: {'; '.join(wrong)}")


def stored_kv_heads(config: GQAConfig, tp: int) -> int:
    """Key-value heads that the pages of all ranks hold together: repeated if fewer than ranks."""
    return max(config.num_kv_heads, tp)


def param_spec(path: str) -> PartitionSpec:
    """How the parameter at `path` lies on the ranks; KeyError for one that no model has."""
    axis = SPLIT[family_name(path)]
    return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, AXIS)


def family_name(path: str) -> str:
    """The path of a parameter without its layer: `layers.3.mixer.conv.weight` ->
    `mixer.conv.weight`."""
    return path.split(".", 2)[2] if path.startswith("layers.") else path


def page_specs(config: ModelConfig) -> tuple[PartitionSpec, ...]:
    """How each array of the attention pages lies on the ranks: by key-value head, latents whole."""
    if isinstance(config.attention, MLAConfig):
        return (PartitionSpec(),)
    return (PartitionSpec(None, None, None, AXIS),) * 2


STATE_SPEC = PartitionSpec(None, None, AXIS)
"""How both arrays of a recurrent state lie on the ranks: by value head, by channel. Channels are
ordered rank by rank, q | k | v of each (see `dasc_jax.weights.permute.channel_order`)."""


def split_ranks(x: Any) -> int:
    """Ranks over which an array is split; 1 for a host array, and while `jax.jit` traces."""
    sharding = None if isinstance(x, Tracer) else getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or AXIS not in jax.tree.leaves(tuple(sharding.spec)):
        return 1
    return sharding.mesh.shape[AXIS]


def sum_over_ranks(x: jax.Array, tp: int) -> jax.Array:
    """The sum of every rank's `x`, on every rank: for the inside of `jax.shard_map`."""
    return jax.lax.psum(x, AXIS) if tp > 1 else x


def own_range(index: jax.Array, size: int, absent: int, tp: int) -> jax.Array:
    """`index` into `tp * size` rows as one into the `size` rows of this rank, `absent` for the rows
    of other ranks."""
    if tp == 1:
        return index
    here = index - jax.lax.axis_index(AXIS) * size
    return jax.numpy.where((here >= 0) & (here < size), here, absent)


def gather_columns(x: jax.Array, tp: int) -> jax.Array:
    """The last axes of every rank's `x` side by side, on every rank."""
    return jax.lax.all_gather(x, AXIS, axis=x.ndim - 1, tiled=True) if tp > 1 else x
