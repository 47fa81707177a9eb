"""Packing segments into a prefill batch: what lands where, and what is refused."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from dasc_jax.models.packing import (
    SLOT,
    ZERO,
    PrefillBucket,
    Segment,
    pack_segments,
    page_rows,
)

BUCKET = PrefillBucket(tokens=256, segments=4, boundaries=6, pages=8, rows=4)
KEEP = np.ones((1, 1, 1), bool)


def segment(length: int, start: int = 0, first_page: int = 1, **options: object) -> Segment:
    tokens = np.arange(100, 100 + length, dtype=np.int32)
    pages = range(first_page, first_page + -(-(start + length) // 64))
    mode = SLOT if start else ZERO
    return Segment(tokens, start, tuple(pages), 1, 1, mode)._replace(**options)


@st.composite
def batches(draw) -> list[Segment]:
    """Up to 4 segments of at most 256 tokens in all, starting anywhere."""
    out, room = [], BUCKET.tokens
    for at in range(draw(st.integers(0, BUCKET.segments))):
        length = draw(st.integers(0, room))
        start = draw(st.integers(0, 512 - length))
        slots = {"slot": at + 1, "final_slot": at + 5}
        writes = draw(st.booleans())
        out.append(segment(length, start, 1 + 8 * at, writes_pages=writes, **slots))
        room -= length
    return out


@given(batches())
def test_every_token_has_its_position_and_page_and_padding_has_none(segments):
    """Whatever fits the tokens fits the chunks: a bucket's size needs no luck with the grid."""
    batch = pack_segments(segments, [], [], KEEP, BUCKET)
    at = 0
    for s in segments:
        for offset, token in enumerate(s.tokens):
            position = s.start + offset
            page = s.pages[position // 64] if s.writes_pages else 0
            packed = (batch.tokens[at], batch.positions[at], batch.write_pages[at])
            assert packed == (token, position, page)
            at += 1
    for column in (batch.tokens, batch.positions, batch.write_pages):
        assert column.shape == (BUCKET.tokens,) and not column[at:].any()
    n = len(segments)
    assert batch.slots.tolist() == [s.slot for s in segments] + [0] * (4 - n)
    assert batch.final_slots.tolist() == [s.final_slot for s in segments] + [0] * (4 - n)
    assert batch.fresh.tolist() == [s.mode == ZERO for s in segments] + [True] * (4 - n)
    for row, s in zip(batch.page_table, segments, strict=False):
        assert row.tolist() == [*s.pages] + [0] * (BUCKET.pages - len(s.pages))
    assert not batch.page_table[n:].any()


@given(batches())
def test_boundaries_end_where_their_position_lies(segments):
    wanted = [
        (at, position)
        for at, s in enumerate(segments)
        for position in range(s.start // 64 * 64 + 64, s.start + len(s.tokens) + 1, 64)
    ][: BUCKET.boundaries]
    batch = pack_segments(segments, wanted, [], KEEP, BUCKET)
    for row, (at, position) in enumerate(wanted):
        assert batch.boundary_segment[row] == at
        assert batch.positions[batch.boundary_end[row] - 1] == position - 1
    assert not batch.boundary_end[len(wanted) :].any()


def test_batches_share_no_memory():
    segments = [segment(70)]
    a, b = (pack_segments(segments, [], [69], KEEP, BUCKET) for _ in range(2))
    for x, y in zip(a, b, strict=True):
        if isinstance(x, np.ndarray) and x is not KEEP:
            assert not np.shares_memory(x, y)


@pytest.mark.parametrize(
    ("segments", "boundaries", "rows", "message"),
    [
        ([segment(200), segment(57)], [], [], "257 tokens do not fit a prefill bucket of 256"),
        ([segment(1)] * 5, [], [], "5 segments do not fit a prefill bucket of 4"),
        ([segment(1)], [(0, 64)] * 7, [], "7 boundaries do not fit a prefill bucket of 6"),
        ([segment(1)], [], [0] * 5, "5 rows do not fit a prefill bucket of 4"),
        ([segment(70)], [(0, 65)], [], "position 65"),
        ([segment(70)], [(0, 128)], [], "position 128"),
        ([segment(70, start=64)], [(0, 64)], [], "position 64"),
        ([segment(70)], [(1, 64)], [], "segment 1"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(segments, boundaries, rows, message):
    with pytest.raises(ValueError, match=message):
        pack_segments(segments, boundaries, rows, KEEP, BUCKET)


def test_page_rows_point_unused_entries_at_the_sink():
    table = page_rows([[3, 1], [], [2]], 4, 3)
    assert table.dtype == np.int32
    assert table.tolist() == [[3, 1, 0], [0, 0, 0], [2, 0, 0], [0, 0, 0]]
