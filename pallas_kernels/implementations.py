"""The implementations of each op, the preferred one first; `ops` has their signatures."""

import importlib
from collections.abc import Callable

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


def _op(name: str, xla: Callable, serial: Callable, *kernels: Implementation) -> Op:
    others = (("xla", xla), ("reference", serial))
    return Op(name, (*kernels, *(Implementation(x, anything, run) for x, run in others)))


DELTA_PREFILL = _op(
    "delta_prefill",
    chunked.prefill,
    reference.prefill,
    _mosaic("kda_prefill", "refuses", "prefill"),
    _mosaic("gdn_prefill", "refuses", "prefill"),
)
DELTA_DECODE = _op(
    "delta_decode",
    chunked.decode,
    reference.decode,
    _mosaic("delta_decode", "refuses_decode", "decode"),
)
DELTA_STEP = _op(
    "delta_step", composed.xla, composed.serial, _mosaic("delta_decode", "refuses_step", "step")
)
SHORT_CONV = _op("short_conv", conv.short_conv, reference.short_conv)
GROUPED_MATMUL = _op(
    "grouped_matmul",
    grouped.grouped_matmul,
    reference.grouped_matmul,
    _mosaic("grouped_matmul", "refuses", "grouped_matmul"),
)
GROUPED_SWIGLU = _op(
    "grouped_swiglu",
    grouped.grouped_swiglu,
    grouped.serial_swiglu,
    _mosaic("grouped_matmul", "refuses_swiglu", "grouped_swiglu"),
)
EXPERT_MLP = _op(
    "expert_mlp", experts.composed, experts.serial, _mosaic("experts", "refuses", "run")
)
RAGGED_PACK = _op(
    "ragged_pack", packing.pack, packing.pack_serial, _mosaic("ragged_pack", "refuses_pack", "pack")
)
RAGGED_UNPACK = _op(
    "ragged_unpack",
    packing.unpack,
    packing.unpack_serial,
    _mosaic("ragged_pack", "refuses_unpack", "unpack"),
)
PAGED_ATTENTION_PREFILL = _op(
    "paged_attention_prefill",
    paged_attention.prefill,
    paged_attention.prefill_at_once,
    _mosaic("attention_prefill", "refuses", "prefill"),
)
PAGED_ATTENTION_DECODE = _op(
    "paged_attention_decode",
    paged_attention.decode,
    paged_attention.decode_at_once,
    _mosaic("attention_decode", "refuses", "decode"),
)
