"""Packed prefill, bit for bit: a prefix cache may cut, resume and pack as it likes."""

import numpy as np
import pytest

import pallas_kernels as pk
from tests.kernels import cases
from tests.kernels.cases import Segment

every_impl = pytest.mark.parametrize("impl", cases.IMPLS)
every_kind = pytest.mark.parametrize("kind", cases.KINDS)


@every_impl
@every_kind
def test_padding_and_empty_sequences_touch_nothing(kind, impl):
    rng = np.random.default_rng(2)
    lengths = [0, 5, 0, 64, 1, 0]
    inputs = cases.random_inputs(rng, kind, sum(lengths))
    initial = cases.random_states(rng, len(lengths))
    packed = cases.run(impl, inputs, [Segment(length) for length in lengths], initial)
    assert all(np.isfinite(x).all() for x in packed)
    assert (
        not packed.o[70:].any()
        and not packed.final[len(lengths) :].any()
        and not packed.boundary.any()
    )
    ends = np.cumsum(lengths)
    for index, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        if length == 0:
            cases.assert_same_bits(packed.final[index], initial[index])
        own = cases.cut(inputs, end - length, end)
        alone = cases.run(impl, own, [Segment(length)], initial[index : index + 1])
        cases.assert_same_bits(alone.o[:length], packed.o[end - length : end])
        cases.assert_same_bits(alone.final[0], packed.final[index])


@every_impl
def test_an_empty_sequence_from_zero_is_zero_and_feeds_a_merge(impl):
    rng = np.random.default_rng(3)
    initial = cases.random_states(rng, 3)
    keep = rng.random((cases.HEADS, cases.KEY)) < 0.5
    segments = [Segment(9), Segment(0, 64, pk.ZERO), Segment(0, 64, pk.MERGE)]
    out = cases.run(impl, cases.random_inputs(rng, "kda", 9), segments, initial, keep=keep)
    assert not out.final[1].any()
    cases.assert_same_bits(out.final[2], np.where(keep[..., None], initial[2], np.float32(0)))


@every_impl
@every_kind
@pytest.mark.parametrize("start", [0, 45, 128])
def test_boundary_states_have_the_bits_of_a_run_that_stops_there(kind, impl, start):
    rng = np.random.default_rng(4)
    inputs, initial = cases.random_inputs(rng, kind, 200), cases.random_states(rng, 1)
    grid = [p for p in range(64, start + 201, 64) if p > start]
    whole = cases.run(
        impl, inputs, [Segment(200, start)], initial, [(0, p) for p in reversed(grid)]
    )
    for row, position in enumerate(reversed(grid)):
        length = position - start
        stopped = cases.run(impl, cases.cut(inputs, 0, length), [Segment(length, start)], initial)
        cases.assert_same_bits(whole.boundary[row], stopped.final[0])
        cases.assert_same_bits(whole.o[:length], stopped.o[:length])
    assert not whole.boundary[len(grid) :].any()


@every_impl
@every_kind
@pytest.mark.parametrize("start", [0, 45])
def test_a_run_resumed_on_the_grid_has_the_bits_of_the_whole(kind, impl, start):
    rng = np.random.default_rng(5)
    inputs, initial = cases.random_inputs(rng, kind, 200), cases.random_states(rng, 1)
    whole = cases.run(impl, inputs, [Segment(200, start)], initial)
    for position in (64, 128, 192):
        first = position - start
        head = cases.run(impl, cases.cut(inputs, 0, first), [Segment(first, start)], initial)
        tail = cases.run(
            impl, cases.cut(inputs, first, 200), [Segment(200 - first, position)], head.final[:1]
        )
        cases.assert_same_bits(
            whole.o[:200], np.concatenate([head.o[:first], tail.o[: 200 - first]])
        )
        cases.assert_same_bits(whole.final[0], tail.final[0])


@every_impl
@every_kind
def test_a_segment_has_the_same_bits_whatever_is_packed_beside_it(kind, impl):
    rng = np.random.default_rng(7)
    inputs, initial = cases.random_inputs(rng, kind, 200), cases.random_states(rng, 4)
    segments = [Segment(31, 7), Segment(100, 45), Segment(0, 3), Segment(69, 128, pk.ZERO)]
    packed = cases.run(impl, inputs, segments, initial, [(1, 64), (1, 128), (3, 192)])
    alone = cases.run(
        impl, cases.cut(inputs, 31, 131), segments[1:2], initial[1:2], [(0, 64), (0, 128)]
    )
    cases.assert_same_bits(packed.o[31:131], alone.o[:100])
    cases.assert_same_bits(packed.final[1], alone.final[0])
    cases.assert_same_bits(packed.boundary[:2], alone.boundary[:2])


@every_impl
@every_kind
def test_merge_takes_kept_units_from_the_slot_and_the_others_from_the_replay(kind, impl):
    rng = np.random.default_rng(8)
    inputs, initial = cases.random_inputs(rng, kind, 119), cases.random_states(rng, 2)
    keep = rng.random((cases.HEADS, cases.KEY)) < 0.4
    replay, rest = Segment(19, 109, pk.ZERO), Segment(100, 128, pk.MERGE)
    merged = cases.run(impl, inputs, [replay, rest], initial, [(1, 192)], keep)
    alone = cases.run(impl, cases.cut(inputs, 0, 19), [replay], initial[:1])
    by_hand = np.where(keep[..., None], initial[1], alone.final[0])[None]
    follow = cases.run(impl, cases.cut(inputs, 19, 119), [Segment(100, 128)], by_hand, [(0, 192)])
    cases.assert_same_bits(merged.final[0], alone.final[0])
    cases.assert_same_bits(merged.final[1], follow.final[0])
    cases.assert_same_bits(merged.o[19:119], follow.o[:100])
    cases.assert_same_bits(merged.boundary[0], follow.boundary[0])


@every_impl
@every_kind
@pytest.mark.parametrize("length", [1, 17, 63, 100])
def test_appending_tokens_changes_no_earlier_row(kind, impl, length):
    rng = np.random.default_rng(14)
    inputs, initial = cases.random_inputs(rng, kind, 150), cases.random_states(rng, 1)
    whole = cases.run(impl, inputs, [Segment(150, 45)], initial)
    prefix = cases.run(impl, cases.cut(inputs, 0, length), [Segment(length, 45)], initial)
    cases.assert_same_bits(whole.o[:length], prefix.o[:length])
