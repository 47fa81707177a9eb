"""Ops of hybrid linear-attention models over packed, ragged batches, with interchangeable
implementations.

`impl` is `"auto"`, `"mosaic"` (Pallas kernels on Hopper), `"xla"` or `"reference"` (token by token,
the oracle). `N` segments are packed into `T` tokens by `cu_seqlens [N + 1]`; whatever the tokens
past the last segment hold, NaN included, reaches no result. Everything recurrent is computed in
float32.
"""

from pallas_kernels.chunks import (
    CHUNK,
    MERGE,
    SLOT,
    ZERO,
    ChunkTable,
    chunk_count,
    chunk_table,
)
from pallas_kernels.conv import conv_windows, next_windows, short_conv_step, whole_conv
from pallas_kernels.dispatch import IMPLEMENTATIONS
from pallas_kernels.gates import gdn_gate, gdn_output, kda_gate, kda_output, l2norm
from pallas_kernels.ops import (
    delta_decode,
    delta_prefill,
    delta_step,
    delta_train,
    expert_mlp,
    grouped_matmul,
    grouped_swiglu,
    paged_attention_decode,
    paged_attention_prefill,
    ragged_pack,
    ragged_unpack,
    short_conv,
)
from pallas_kernels.paged_attention import PagedRows
from pallas_kernels.walk import DeltaOut

__all__ = [
    "CHUNK",
    "IMPLEMENTATIONS",
    "MERGE",
    "SLOT",
    "ZERO",
    "ChunkTable",
    "DeltaOut",
    "PagedRows",
    "chunk_count",
    "chunk_table",
    "conv_windows",
    "delta_decode",
    "delta_prefill",
    "delta_step",
    "delta_train",
    "expert_mlp",
    "gdn_gate",
    "gdn_output",
    "grouped_matmul",
    "grouped_swiglu",
    "kda_gate",
    "kda_output",
    "l2norm",
    "next_windows",
    "paged_attention_decode",
    "paged_attention_prefill",
    "ragged_pack",
    "ragged_unpack",
    "short_conv",
    "short_conv_step",
    "whole_conv",
]
