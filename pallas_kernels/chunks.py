"""The chunk table: a packed, ragged batch cut into chunks of at most 64 tokens.

The chunk grid is anchored at absolute position 0, not at the start of a segment: a segment that
starts at position 45 fills rows 45..63 of its first chunk. A run resumed at a multiple of 64
therefore does the same arithmetic, in the same order, as the run that was never cut.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

CHUNK = 64
"""Tokens of a chunk; the grid of boundary states."""

CONTINUE, ZERO, SLOT, MERGE = 0, 1, 2, 3
"""What a chunk starts from: the chunk before it, zeros, `initial[segment]`, or unit by unit
(`keep`) `initial[segment]` where it is kept and the state of the chunk before it elsewhere."""


type Column = np.ndarray | jax.Array


class ChunkTable(NamedTuple):
    """The chunks of a batch in packed order: int32 data, so that one program serves every batch.

    A chunk of `length` 0 computes nothing. One that belongs to an empty segment still starts and
    writes its state; one that pads the table continues and writes nothing.
    """

    token: Column  # [NC] first packed token
    row: Column  # [NC] row of that token, its absolute position modulo 64
    length: Column  # [NC] tokens
    segment: Column  # [NC] row of `initial` to start from
    start: Column  # [NC] CONTINUE, ZERO, SLOT or MERGE
    final: Column  # [NC] row of `final` to write afterwards, N for none
    boundary: Column  # [NC] row of `boundary` to write afterwards, NB for none
    cu_seqlens: Column  # [N + 1] packed start of every segment, then the number of tokens


def chunk_count(lengths: Sequence[int], starts: Sequence[int]) -> int:
    """Chunks that `chunk_table` needs: those a segment touches, one for each empty segment."""
    return sum(
        max(1, -(-(start % CHUNK + length) // CHUNK))
        for length, start in zip(lengths, starts, strict=True)
    )


def chunk_table(
    lengths: Sequence[int],
    starts: Sequence[int],
    init_modes: Sequence[int],
    boundaries: Sequence[tuple[int, int]],
    *,
    num_tokens: int,
    num_segments: int,
    num_chunks: int,
    num_boundaries: int,
) -> ChunkTable:
    """Cut packed segments at the multiples of 64 of their absolute positions.

    Segment s holds `lengths[s]` tokens from absolute position `starts[s]` and begins as
    `init_modes[s]` (ZERO, SLOT or MERGE) says. Row i of `boundary` is to hold the state of segment
    s at position p where `boundaries[i] = (s, p)`; p is a multiple of 64 past the segment's start
    and at most its end. Unused rows of all tables, up to the four sizes, are inert; segments not
    listed keep their initial state.

    Raises:
        ValueError: a table is too small, or a length, start, mode or boundary is impossible.
    """
    _check_segments(lengths, starts, init_modes)
    needed = chunk_count(lengths, starts)
    for name, need, size in (
        ("tokens", sum(lengths), num_tokens),
        ("segments", len(lengths), num_segments),
        ("chunks", needed, num_chunks),
        ("boundaries", len(boundaries), num_boundaries),
    ):
        if need > size:
            raise ValueError(f"the batch has {need} {name}, the table holds {size}")
    rows = _boundary_rows(lengths, starts, boundaries)
    chunks = _cut(lengths, starts, init_modes, rows, num_segments, num_boundaries)
    padding = (0, 0, 0, 0, CONTINUE, num_segments, num_boundaries)
    columns = np.array(chunks + [padding] * (num_chunks - needed), np.int32).reshape(-1, 7).T
    cu = np.full(num_segments + 1, sum(lengths), np.int32)
    cu[: len(lengths) + 1] = np.cumsum([0, *lengths])
    return ChunkTable(*np.ascontiguousarray(columns), cu_seqlens=cu)


def _cut(
    lengths: Sequence[int],
    starts: Sequence[int],
    init_modes: Sequence[int],
    rows: dict[tuple[int, int], int],
    no_segment: int,
    no_boundary: int,
) -> list[tuple[int, ...]]:
    """The first seven columns of the table, a tuple a chunk."""
    chunks, token = [], 0
    for segment, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        position, end, mode = start, start + length, int(init_modes[segment])
        for _ in range(chunk_count([length], [start])):
            stop = min(end, position // CHUNK * CHUNK + CHUNK)
            final = segment if stop == end else no_segment
            boundary = rows.get((segment, stop), no_boundary)
            taken = stop - position
            chunks.append((token, position % CHUNK, taken, segment, mode, final, boundary))
            token, position, mode = token + taken, stop, CONTINUE
    return chunks


def _check_segments(lengths: Sequence[int], starts: Sequence[int], modes: Sequence[int]) -> None:
    if not len(lengths) == len(starts) == len(modes):
        raise ValueError(
            f"{len(lengths)} lengths, {len(starts)} starts and {len(modes)} init modes"
        )
    for segment, (length, start, mode) in enumerate(zip(lengths, starts, modes, strict=True)):
        if length < 0 or start < 0:
            raise ValueError(f"segment {segment} has length {length} and start {start}")
        if mode not in (ZERO, SLOT, MERGE):
            raise ValueError(
                f"segment {segment} has init mode {mode}, not one of {ZERO, SLOT, MERGE}"
            )
    if len(modes) and modes[0] == MERGE:
        raise ValueError("segment 0 merges with the segment before it, and there is none")


def _boundary_rows(
    lengths: Sequence[int], starts: Sequence[int], boundaries: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], int]:
    rows: dict[tuple[int, int], int] = {}
    for row, (segment, position) in enumerate(boundaries):
        if not 0 <= segment < len(lengths):
            raise ValueError(f"boundary {row} names segment {segment} of {len(lengths)}")
        first, last = starts[segment], starts[segment] + lengths[segment]
        if position % CHUNK or not first < position <= last:
            raise ValueError(
                f"boundary {row} at position {position} of segment {segment} is not a multiple of "
                f"{CHUNK} in ({first}, {last}]"
            )
        if (segment, position) in rows:
            raise ValueError(f"boundary {row} repeats position {position} of segment {segment}")
        rows[segment, position] = row
    return rows
