"""How many bytes a state checkpoint takes on every tensor-parallel rank, and how many fit a budget.

Sections 4.1 and 4.3, appendices B and C.1 of the DASC paper. *Padded* gives each layer as many rows
as the widest one retains, *ragged* flat-packs the layers; the pools of this library are ragged.
Attention caches are not counted: no checkpoint changes them.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from dasc_jax.balance import Placement, place
from dasc_jax.config import ModelConfig
from dasc_jax.plan import SelectionPlan

Quantization = Literal["int8"] | None

STATE_BYTES = 4
SCALE_BYTES = 4
CONV_WINDOW = 3
CONV_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclasses.dataclass(frozen=True)
class Account:
    """The size of one checkpoint slot under a plan; all bytes are those of one rank.

    `bytes_per_rank` has one entry per rank, `bytes_per_slot` is its maximum (Eq. 8), made of
    `temporal_bytes` (int8 scales included) and `conv_bytes`. `moved` units cross ranks when a
    checkpoint is stored, and again when it is loaded. Ratios are relative to dense float32
    states: `c_temp` (ragged) and `c_temp_padded` of the temporal part of the whole model (Eq. 6,
    appendix B), infinite where nothing is kept; `c_ckpt` of the complete checkpoint on the worst
    rank (Eq. 7). `layout_gain` is R_max over the mean r_l: ragged over padded.
    """

    bytes_per_rank: tuple[int, ...]
    temporal_bytes: int
    conv_bytes: int
    moved: int
    dense_bytes_per_slot: int
    c_temp: float
    c_temp_padded: float
    layout_gain: float

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that every rank allocates for a slot: the worst rank decides."""
        return self.temporal_bytes + self.conv_bytes

    @property
    def c_ckpt(self) -> float:
        """Capacity multiplier of a budget for complete checkpoints."""
        return self.dense_bytes_per_slot / self.bytes_per_slot

    def slots(self, budget_bytes: int) -> int:
        """Checkpoints that `budget_bytes` a rank hold: floor(B / b) - 1, less the sink (Eq. 8)."""
        return max(budget_bytes // self.bytes_per_slot - 1, 0)


def account(
    config: ModelConfig,
    plan: SelectionPlan,
    tp: int = 8,
    placement: Placement = "hybrid",
    quantization: Quantization = None,
) -> Account:
    """The account of one slot on `tp` ranks.

    `off` gives rank r the units of heads [r H/tp, (r+1) H/tp) of every layer; `storage` and
    `hybrid` give every rank C = ceil(sum_r U_r / tp) units, and differ in how many of them move
    (section 4.3, `dasc_jax.balance`). int8 adds one float32 scale for every (layer, head, key
    channel) kept (appendix E.1). Convolution windows keep the model's dtype.
    Raises ValueError when `tp` does not divide the heads or the plan is not of this model.
    """
    _check(config, plan, tp, quantization)
    storage = place(plan, config, tp, placement)
    return account_units(config, plan, storage.units, storage.moved, quantization)


def account_units(
    config: ModelConfig,
    plan: SelectionPlan,
    units: Sequence[int],
    moved: int = 0,
    quantization: Quantization = None,
) -> Account:
    """The account of one slot that holds `units[r]` units of the plan on rank r."""
    _check(config, plan, len(units), quantization)
    unit, dense_unit = unit_bytes(config, quantization), unit_bytes(config, None)
    conv = conv_bytes(config, len(units))
    smaller = dense_unit / unit
    widest = max(plan.counts)
    return Account(
        bytes_per_rank=tuple(n * unit + conv for n in units),
        temporal_bytes=max(units) * unit,
        conv_bytes=conv,
        moved=moved,
        dense_bytes_per_slot=plan.units // len(units) * dense_unit + conv,
        c_temp=smaller * _ratio(plan.units, plan.total),
        c_temp_padded=smaller * _ratio(plan.units, plan.layers * widest),
        layout_gain=widest * plan.layers / plan.total if plan.total else 1.0,
    )


def unit_bytes(config: ModelConfig, quantization: Quantization = None) -> int:
    """Bytes of a retained unit: a row of V (KDA) or K rows of it (GDN), with any int8 scales."""
    rows = 1 if config.delta.kind == "kda" else config.delta.key_dim
    if quantization == "int8":
        return rows * (config.delta.value_dim + SCALE_BYTES)
    return rows * config.delta.value_dim * STATE_BYTES


def conv_bytes(config: ModelConfig, tp: int = 1) -> int:
    """Bytes of the convolution windows of all recurrent layers on one of `tp` ranks."""
    channels = len(config.recurrent_layers) * config.delta.conv_channels // tp
    return channels * CONV_WINDOW * CONV_BYTES[config.dtype]


def padded_shape(config: ModelConfig, plan: SelectionPlan, slots: int) -> tuple[int, ...]:
    """The pool of the padded layout (Scheme 1), k-major: [L, slots, R_max, (K,) V]."""
    return (plan.layers, slots, max(plan.counts), *_unit_shape(config))


def ragged_shape(config: ModelConfig, plan: SelectionPlan, slots: int) -> tuple[int, ...]:
    """The pool of the ragged layout (Scheme 2), k-major: [slots, R, (K,) V].

    `plan.offsets` delimits the layers.
    """
    return (slots, plan.total, *_unit_shape(config))


def _unit_shape(config: ModelConfig) -> tuple[int, ...]:
    delta = config.delta
    return (delta.value_dim,) if delta.kind == "kda" else (delta.key_dim, delta.value_dim)


def _ratio(whole: int, part: int) -> float:
    return whole / part if part else math.inf


def _check(config: ModelConfig, plan: SelectionPlan, tp: int, quantization: Quantization) -> None:
    delta, layers = config.delta, len(config.recurrent_layers)
    heads = (delta.num_value_heads, delta.key_dim)[: 2 if delta.kind == "kda" else 1]
    if (plan.layers, plan.unit_shape) != (layers, heads):
        raise ValueError(
            f"the plan selects from {plan.layers} layers of units {plan.unit_shape},"
            f" the model has {layers} of {heads}"
        )
    if tp < 1 or delta.num_value_heads % tp or delta.num_key_heads % tp:
        raise ValueError(
            f"tp={tp} does not divide {delta.num_value_heads} value heads"
            f" and {delta.num_key_heads} key heads"
        )
    if quantization not in (None, "int8"):
        raise ValueError(f"quantization={quantization!r}: expected None or 'int8'")
