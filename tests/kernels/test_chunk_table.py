"""The chunk table: every token once, on the grid of absolute positions; bad requests refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pallas_kernels as pk

SIZES = {"num_tokens": 256, "num_segments": 4, "num_chunks": 16, "num_boundaries": 2}


def build(lengths, starts, modes=None, boundaries=(), **sizes):
    modes = [pk.ZERO] * len(lengths) if modes is None else modes
    return pk.chunk_table(lengths, starts, modes, boundaries, **(SIZES | sizes))


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 300)), min_size=1, max_size=6))
def test_chunks_cover_every_token_once_and_never_cross_the_grid(segments):
    lengths, starts = (list(x) for x in zip(*segments, strict=True))
    count = pk.chunk_count(lengths, starts)
    table = build(
        lengths, starts, num_tokens=sum(lengths), num_segments=len(lengths), num_chunks=count + 2
    )
    token = 0
    for segment, (length, start) in enumerate(segments):
        rows = np.flatnonzero((table.segment == segment) & (np.arange(count + 2) < count))
        assert table.length[rows].sum() == length
        np.testing.assert_array_equal(table.start[rows], [pk.ZERO] + [0] * (len(rows) - 1))
        expected = [len(lengths)] * (len(rows) - 1) + [segment]
        np.testing.assert_array_equal(table.final[rows], expected)
        for c in rows:
            assert table.token[c] == token
            assert table.row[c] == (start + token - table.cu_seqlens[segment]) % pk.CHUNK
            assert table.row[c] + table.length[c] <= pk.CHUNK
            token += table.length[c]
    np.testing.assert_array_equal(table.cu_seqlens, np.cumsum([0, *lengths]))
    assert not table.length[count:].any() and not table.start[count:].any()
    assert (table.final[count:] == len(lengths)).all() and (table.boundary == 2).all()


def test_boundaries_name_the_chunk_that_ends_there():
    table = build([100, 64], [28, 64], boundaries=[(1, 128), (0, 64)])
    np.testing.assert_array_equal(table.length[:3], [36, 64, 64])
    np.testing.assert_array_equal(table.boundary[:3], [1, 2, 0])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"lengths": [257], "starts": [0]}, "257 tokens, the table holds 256"),
        ({"lengths": [1] * 5, "starts": [0] * 5}, "5 segments, the table holds 4"),
        ({"lengths": [3, 4], "starts": [63, 62], "num_chunks": 3}, "4 chunks, the table holds 3"),
        ({"lengths": [0, 0], "starts": [0, 0], "num_chunks": 1}, "2 chunks, the table holds 1"),
        (
            {"lengths": [200], "starts": [0], "boundaries": [(0, 64), (0, 128), (0, 192)]},
            "3 boundaries, the table holds 2",
        ),
        (
            {"lengths": [200], "starts": [0], "boundaries": [(0, 65)]},
            "position 65 .* not a multiple of 64",
        ),
        (
            {"lengths": [100], "starts": [64], "boundaries": [(0, 64)]},
            r"position 64 .* in \(64, 164\]",
        ),
        (
            {"lengths": [100], "starts": [0], "boundaries": [(0, 128)]},
            r"position 128 .* in \(0, 100\]",
        ),
        ({"lengths": [100], "starts": [0], "boundaries": [(1, 64)]}, "segment 1 of 1"),
        ({"lengths": [100], "starts": [0], "boundaries": [(0, 64)] * 2}, "repeats position 64"),
        ({"lengths": [-1], "starts": [0]}, "length -1 and start 0"),
        ({"lengths": [1], "starts": [-1]}, "length 1 and start -1"),
        ({"lengths": [1], "starts": [0], "modes": [0]}, "init mode 0"),
        ({"lengths": [1], "starts": [0], "modes": [pk.MERGE]}, "segment 0 merges"),
        ({"lengths": [1, 2], "starts": [0], "modes": [1]}, "2 lengths, 1 starts and 1 init modes"),
    ],
)
def test_impossible_requests_are_refused_with_the_numbers(request_, message):
    with pytest.raises(ValueError, match=message):
        build(**request_)
