"""Segments of several requests -> one padded `PrefillBatch`, in numpy on the host.

Every array is made anew for each batch and never written again, so a step that is still running
cannot see a later one's values.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dasc_jax.models.batch import PrefillBatch
from dasc_jax.types import PAGE
from pallas_kernels import MERGE, SLOT, ZERO, chunk_table

__all__ = ["MERGE", "SLOT", "ZERO", "PrefillBucket", "Segment", "pack_segments", "page_rows"]


class Segment(NamedTuple):
    """Tokens of one request at positions `start`, `start + 1`, ...

    `mode` ZERO starts from nothing, SLOT from the state in `slot`, MERGE (legal only right behind
    the same request's replay segment) takes the retained units and the convolution window from
    `slot` and the other units from the segment before. `pages` cover every position up to the last
    token.
    """

    tokens: np.ndarray
    start: int
    pages: Sequence[int]
    slot: int
    final_slot: int
    mode: int
    writes_pages: bool = True


class PrefillBucket(NamedTuple):
    """The static sizes of a prefill step: what is compiled once."""

    tokens: int
    segments: int
    boundaries: int
    pages: int
    rows: int

    @property
    def chunks(self) -> int:
        """Enough for any segments that fit: each may start and end off the 64-token grid."""
        return self.tokens // PAGE + 2 * self.segments


def page_rows(pages: Sequence[Sequence[int]], rows: int, width: int) -> np.ndarray:
    """Page lists -> `[rows, width]` int32, unused entries 0 (the sink)."""
    table = np.zeros((rows, width), np.int32)
    for row, listed in enumerate(pages):
        table[row, : len(listed)] = listed
    return table


def pack_segments(
    segments: Sequence[Segment],
    boundaries: Sequence[tuple[int, int]],
    rows: Sequence[int],
    keep: np.ndarray,
    bucket: PrefillBucket,
) -> PrefillBatch:
    """Pack segments in order.

    Args:
        segments: at most `bucket.segments` of them.
        boundaries: (segment, absolute position) pairs whose states are wanted.
        rows: packed token indices whose logits are wanted.
        keep: bool `[L, H, K]`, the retained units of the plan.
        bucket: the padded sizes.

    Raises:
        ValueError: more of anything than the bucket holds, with both numbers.
    """
    lengths, starts = [len(s.tokens) for s in segments], [s.start for s in segments]
    for name, have, room in (
        ("tokens", sum(lengths), bucket.tokens),
        ("segments", len(segments), bucket.segments),
        ("boundaries", len(boundaries), bucket.boundaries),
        ("rows", len(rows), bucket.rows),
    ):
        if have > room:
            raise ValueError(f"{have} {name} do not fit a prefill bucket of {room}")
    table = chunk_table(
        lengths,
        starts,
        [s.mode for s in segments],
        boundaries,
        num_tokens=bucket.tokens,
        num_segments=bucket.segments,
        num_chunks=bucket.chunks,
        num_boundaries=bucket.boundaries,
    )
    tokens, positions, write_pages = _token_arrays(segments, bucket.tokens)
    ends = [int(table.cu_seqlens[s] + position - starts[s]) for s, position in boundaries]
    return PrefillBatch(
        tokens=tokens,
        positions=positions,
        table=table,
        fresh=_padded([s.mode == ZERO for s in segments], bucket.segments, bool, fill=True),
        slots=_padded([s.slot for s in segments], bucket.segments, np.int32),
        final_slots=_padded([s.final_slot for s in segments], bucket.segments, np.int32),
        page_table=page_rows([s.pages for s in segments], bucket.segments, bucket.pages),
        write_pages=write_pages,
        boundary_segment=_padded([s for s, _ in boundaries], bucket.boundaries, np.int32),
        boundary_end=_padded(ends, bucket.boundaries, np.int32),
        keep=keep,
        rows=_padded(rows, bucket.rows, np.int32),
    )


def _padded(values: Sequence[int], size: int, dtype: type, fill: int = 0) -> np.ndarray:
    out = np.full(size, fill, dtype)
    out[: len(values)] = values
    return out


def _token_arrays(
    segments: Sequence[Segment], size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens, positions, pages = (np.zeros(size, np.int32) for _ in range(3))
    at = 0
    for s in segments:
        span = slice(at, at + len(s.tokens))
        where = s.start + np.arange(len(s.tokens), dtype=np.int32)
        tokens[span], positions[span] = s.tokens, where
        if s.writes_pages:
            pages[span] = np.asarray(s.pages, np.int32)[where // PAGE]
        at = span.stop
    return tokens, positions, pages
