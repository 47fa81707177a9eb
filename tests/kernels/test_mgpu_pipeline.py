"""Makers and walkers of a launch: every one once, and no walker waits for a maker that cannot
start."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import pallas_kernels as pk
from pallas_kernels.mgpu.pipeline import Plan, Role, Runs, role, runs

SEGMENT = st.tuples(st.integers(0, 200), st.sampled_from([pk.ZERO, pk.SLOT, pk.MERGE]))


def runs_of(segments, spare=0, unlisted=0, boundaries=()) -> tuple[Runs, int, int]:
    """Runs, chunks and segments at most."""
    lengths, modes = zip(*segments, strict=True)
    count = len(lengths) + unlisted
    chunks = pk.chunk_count(lengths, [0] * len(lengths)) + spare
    table = pk.chunk_table(
        lengths,
        [0] * len(lengths),
        modes,
        boundaries,
        num_tokens=sum(lengths),
        num_segments=count,
        num_chunks=chunks,
        num_boundaries=4,
    )
    found = runs(pk.ChunkTable(*map(jnp.asarray, table)), count, 4)
    return Runs(*map(np.asarray, found)), chunks, count


def roles(plan, found=None) -> Role:
    found = found and Runs(*map(jnp.asarray, found))
    parts = jax.jit(jax.vmap(lambda block: role(plan, found, block)))(jnp.arange(plan.blocks))
    return Role(*map(np.asarray, parts))


def test_runs_reach_to_the_next_segment_that_does_not_merge():
    segments = [(70, pk.SLOT), (0, pk.MERGE), (0, pk.ZERO), (65, pk.ZERO), (190, pk.SLOT)]
    found, *_ = runs_of(segments, spare=5, unlisted=2, boundaries=[(0, 64), (3, 64)])
    np.testing.assert_array_equal(found.first[:4], [0, 6, 4, 3])
    np.testing.assert_array_equal(found.stop[:4], [3, 9, 6, 4])
    np.testing.assert_array_equal(found.first[4:], found.stop[4:])
    np.testing.assert_array_equal(found.counts, [5, 2, 9])


@given(
    st.lists(SEGMENT, min_size=1, max_size=9),
    st.integers(0, 3),
    st.integers(1, 12),
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(1, 20),
)
def test_all_blocks_have_a_part_and_nobody_waits_for_ever(
    segments, unlisted, walkers, heads, side, sms
):
    """Blocks start in order as multiprocessors come free: those that wait for one that has not
    started leave it a place."""
    segments[0] = segments[0][0], pk.ZERO
    found, chunks, count = runs_of(segments, 2, unlisted)
    plan = Plan(chunks, heads, side, walkers, count, sms)
    walks, maker, run, walker = roles(plan, found)
    assert sorted(maker[~walks]) == list(range(plan.makers))
    pairs = list(zip(run[walks], walker[walks], strict=True))
    assert sorted(pairs) == [(r, w) for r in range(count) for w in range(walkers)]
    last = np.where(found.first < found.stop, (found.stop * heads - 1) // side, -1)
    started = np.maximum.accumulate(np.where(walks, -1, maker))
    for block in np.flatnonzero(walks):
        assert np.sum(last[run[: block + 1][walks[: block + 1]]] > started[block]) < sms


def test_an_only_run_is_walked_while_it_is_made():
    plan = Plan(chunks=128, heads=16, side=3, walkers=64, runs=1, sms=132)
    np.testing.assert_array_equal(np.flatnonzero(roles(plan).walks), np.arange(132, 196))
    short = plan._replace(chunks=16)
    np.testing.assert_array_equal(np.flatnonzero(roles(short).walks), np.arange(86, 150))


def test_the_run_of_most_chunks_is_walked_first():
    found, chunks, count = runs_of([(64, pk.ZERO), (6400, pk.ZERO), (640, pk.ZERO)], unlisted=1)
    plan = Plan(chunks, heads=16, side=3, walkers=64, runs=count, sms=132)
    walks, _, run, _ = roles(plan, found)
    np.testing.assert_array_equal(np.flatnonzero(walks & (run == 0)), np.arange(137, 201))
    assert (run[plan.makers + 64 :] == np.repeat([1, 2, 3], 64)).all()
    even, chunks, count = runs_of([(640, pk.ZERO)] * 3)
    plan = plan._replace(chunks=chunks, runs=count)
    assert roles(plan, even).walks.tolist() == [False] * plan.makers + [True] * 192
