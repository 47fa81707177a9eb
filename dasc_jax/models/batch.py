"""The two packed batches a model runs on, and the state that runs through it."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from dasc_jax.types import AnyArray, AttentionPages, RecurrentState
from pallas_kernels import ChunkTable


class State(NamedTuple):
    """All that a model remembers: recurrent slots and attention pages."""

    recurrent: RecurrentState
    pages: AttentionPages


class PrefillBatch(NamedTuple):
    """Prompt tokens of several segments, packed and padded to a bucket.

    A segment is a run of one request's tokens at consecutive positions: usually the whole request,
    two segments when a refresh replays tokens before the checkpoint (`wr`). Padding tokens,
    segments and boundaries point at slot 0 and page 0.
    """

    tokens: Int32[AnyArray, "T"]
    positions: Int32[AnyArray, "T"]
    table: ChunkTable
    fresh: Bool[AnyArray, "N"]  # starts from zero: no state, no convolution window
    slots: Int32[AnyArray, "N"]  # slot a segment starts from
    final_slots: Int32[AnyArray, "N"]  # slot its last state is written to
    page_table: Int32[AnyArray, "N M"]
    write_pages: Int32[AnyArray, "T"]  # page its keys go to; 0 for padding and replayed tokens
    boundary_segment: Int32[AnyArray, "NB"]
    boundary_end: Int32[AnyArray, "NB"]  # packed index just past the boundary
    keep: Bool[AnyArray, "L H K"]  # retained units, for segments that merge
    rows: Int32[AnyArray, "R"]  # packed tokens whose logits are wanted


class DecodeBatch(NamedTuple):
    """One token of each of B requests; padding rows have slot 0 and an all-zero page table."""

    tokens: Int32[AnyArray, "B"]
    positions: Int32[AnyArray, "B"]
    slots: Int32[AnyArray, "B"]
    page_table: Int32[AnyArray, "B M"]


class PrefillOut(NamedTuple):
    """Logits of the wanted rows and the recurrent states at the wanted 64-token boundaries.

    `hidden` is every token's residual stream behind the last layer: what `HybridModel.logits` takes
    for rows that turn out to be wanted later.
    """

    logits: Float32[Array, "R vocab"]
    boundary: RecurrentState
    hidden: Float[Array, "T D"]


def stack_boundaries(
    temporal: list[Float32[Array, "NB H K V"]], conv: list[Float[Array, "NB C 3"]]
) -> RecurrentState:
    """Per-layer boundary states, stacked over the recurrent layers."""
    return RecurrentState(jnp.stack(temporal), jnp.stack(conv))
