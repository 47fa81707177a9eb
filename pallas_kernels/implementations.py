"""The implementations of each op, the preferred one first; `ops` has their signatures."""

import importlib

import jax

from pallas_kernels import (
    chunked,
    composed,
    conv,
    experts,
    packing,
    paged_attention,
    reference,
)
from pallas_kernels import grouped_matmul as grouped
from pallas_kernels.dispatch import Implementation, Op, anything, traced_once


def _mosaic(module: str, refuses: str, run: str) -> Implementation:
    """A kernel of `pallas_kernels.mgpu`, which is imported only where a GPU could run it."""

    def named(name: str):
        return getattr(importlib.import_module(f"pallas_kernels.mgpu.{module}"), name)

    def refused(*args: object) -> str | None:
        if jax.default_backend() != "gpu":
            return f"needs an NVIDIA Hopper GPU; JAX runs on {jax.default_backend()}"
        return named(refuses)(*args)

    return Implementation("mosaic", refused, traced_once(lambda *args: named(run)(*args)))


DELTA_PREFILL = Op(
    "delta_prefill",
    (
        _mosaic("kda_prefill", "refuses", "prefill"),
        _mosaic("gdn_prefill", "refuses", "prefill"),
        Implementation("xla", anything, chunked.prefill),
        Implementation("reference", anything, reference.prefill),
    ),
)
DELTA_DECODE = Op(
    "delta_decode",
    (
        _mosaic("delta_decode", "refuses_decode", "decode"),
        Implementation("xla", anything, chunked.decode),
        Implementation("reference", anything, reference.decode),
    ),
)
DELTA_STEP = Op(
    "delta_step",
    (
        _mosaic("delta_decode", "refuses_step", "step"),
        Implementation("xla", anything, composed.xla),
        Implementation("reference", anything, composed.serial),
    ),
)
SHORT_CONV = Op(
    "short_conv",
    (
        Implementation("xla", anything, conv.short_conv),
        Implementation("reference", anything, reference.short_conv),
    ),
)
GROUPED_MATMUL = Op(
    "grouped_matmul",
    (
        _mosaic("grouped_matmul", "refuses", "grouped_matmul"),
        Implementation("xla", anything, grouped.grouped_matmul),
        Implementation("reference", anything, reference.grouped_matmul),
    ),
)
GROUPED_SWIGLU = Op(
    "grouped_swiglu",
    (
        _mosaic("grouped_matmul", "refuses_swiglu", "grouped_swiglu"),
        Implementation("xla", anything, grouped.grouped_swiglu),
        Implementation("reference", anything, grouped.serial_swiglu),
    ),
)
EXPERT_MLP = Op(
    "expert_mlp",
    (
        _mosaic("experts", "refuses", "run"),
        Implementation("xla", anything, experts.composed),
        Implementation("reference", anything, experts.serial),
    ),
)
RAGGED_PACK = Op(
    "ragged_pack",
    (
        _mosaic("ragged_pack", "refuses_pack", "pack"),
        Implementation("xla", anything, packing.pack),
        Implementation("reference", anything, packing.pack_serial),
    ),
)
RAGGED_UNPACK = Op(
    "ragged_unpack",
    (
        _mosaic("ragged_pack", "refuses_unpack", "unpack"),
        Implementation("xla", anything, packing.unpack),
        Implementation("reference", anything, packing.unpack_serial),
    ),
)
PAGED_ATTENTION_PREFILL = Op(
    "paged_attention_prefill",
    (
        _mosaic("attention_prefill", "refuses", "prefill"),
        Implementation("xla", anything, paged_attention.prefill),
        Implementation("reference", anything, paged_attention.prefill_at_once),
    ),
)
PAGED_ATTENTION_DECODE = Op(
    "paged_attention_decode",
    (
        _mosaic("attention_decode", "refuses", "decode"),
        Implementation("xla", anything, paged_attention.decode),
        Implementation("reference", anything, paged_attention.decode_at_once),
    ),
)
