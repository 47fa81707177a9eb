"""Makers and walkers of a launch: every one once, and no walker waits for a maker that cannot
start."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels as pk
from pallas_kernels.mgpu.pipeline import Plan, Runs, role, runs

SEGMENT = st.tuples(st.integers(0, 200), st.sampled_from([pk.ZERO, pk.SLOT, pk.MERGE]))


def table_of(segments, spare=0, unlisted=0, boundaries=()):
    lengths, modes = zip(*segments, strict=True)
    needed = pk.chunk_count(lengths, [0] * len(lengths))
    return pk.chunk_table(
        lengths,
        [0] * len(lengths),
        modes,
        boundaries,
        num_tokens=sum(lengths) + spare,
        num_segments=len(lengths) + unlisted,
        num_chunks=needed + spare,
        num_boundaries=4,
    )


def test_runs_reach_to_the_next_segment_that_does_not_merge():
    segments = [(70, pk.SLOT), (0, pk.MERGE), (64, pk.MERGE), (0, pk.ZERO), (65, pk.ZERO)]
    table = table_of(segments, spare=5, unlisted=2, boundaries=[(0, 64), (4, 64)])
    found = runs(pk.ChunkTable(*map(jnp.asarray, table)), 7, 4)
    np.testing.assert_array_equal(found.first, [0, 4, 5, 7, 7, 7, 7])
    np.testing.assert_array_equal(found.stop, [4, 5, 7, 7, 7, 7, 7])
    np.testing.assert_array_equal(found.written, [5, 2])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(SEGMENT, min_size=1, max_size=9),
    st.integers(0, 3),
    st.integers(1, 12),
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 20),
    st.integers(0, 63),
)
def test_all_blocks_have_a_part_and_nobody_waits_for_ever(
    segments, unlisted, walkers, heads, side, turns, sms, lead
):
    segments[0] = segments[0][0], pk.ZERO
    table = table_of(segments, spare=2, unlisted=unlisted)
    count, chunks = len(segments) + unlisted, len(table.token)
    found = Runs(*map(np.asarray, runs(pk.ChunkTable(*map(jnp.asarray, table)), count, 4)))
    plan = Plan(chunks, heads, side, turns, walkers, count, sms, lead)
    parts = jax.vmap(lambda block: role(plan, Runs(*map(jnp.asarray, found)), block))
    walks, maker, run, walker = map(np.asarray, parts(jnp.arange(plan.blocks)))
    assert sorted(maker[~walks]) == list(range(plan.makers))
    pairs = list(zip(run[walks], walker[walks], strict=True))
    assert sorted(pairs) == [(r, w) for r in range(count) for w in range(walkers)]
    first, stop = map(np.asarray, jax.vmap(plan.items)(jnp.arange(plan.makers)))
    made = [item for a, b in zip(first, stop, strict=True) for item in range(a, b)]
    assert made == list(range(chunks * heads))
    owners = np.repeat(np.arange(plan.makers), stop - first)
    np.testing.assert_array_equal(jax.vmap(plan.maker)(jnp.arange(chunks * heads)), owners)
    _all_finish(plan, found, owners, walks, run)


def _all_finish(plan, found, owners, walks, run) -> None:
    """Blocks start in order as multiprocessors come free: those that wait for one that has not
    started leave it a place."""
    last = np.full(plan.runs, -1)
    has = found.first < found.stop
    last[has] = owners[found.stop[has] * plan.heads - 1]
    started = np.cumsum(~walks)
    for block in np.flatnonzero(walks):
        before = run[: block + 1][walks[: block + 1]]
        assert np.sum(last[before] >= started[block]) < plan.sms


def test_an_only_run_begins_while_most_of_it_is_being_made():
    plan = Plan(chunks=128, heads=16, side=3, turns=1, walkers=64, runs=1, sms=132)
    parts = jax.vmap(lambda block: role(plan, None, block))(jnp.arange(plan.blocks))
    np.testing.assert_array_equal(np.flatnonzero(parts.walks), np.arange(132, 196))
    later = plan._replace(lead=32)
    parts = jax.vmap(lambda block: role(later, None, block))(jnp.arange(plan.blocks))
    assert np.flatnonzero(parts.walks)[0] == 128 * 16 // 3 // 2
