"""Sorting choices by expert: by comparing all pairs where they are few, by a sort otherwise."""

import jax
import numpy as np
import pytest

from pallas_kernels import experts
from pallas_kernels.grouped_matmul import tile_list

EXPERTS = 16
by_expert = jax.jit(experts.by_expert, static_argnums=1)


@pytest.mark.parametrize("count", [1, 8, 320, experts.FEW_CHOICES, experts.FEW_CHOICES + 1, 3000])
def test_choices_are_sorted_in_a_stable_order_that_can_be_undone(count):
    chosen = np.random.default_rng(count).integers(0, EXPERTS, count).astype(np.int32)
    order, place, sizes = (np.asarray(a) for a in by_expert(chosen, EXPERTS))
    np.testing.assert_array_equal(order, np.argsort(chosen, stable=True))
    np.testing.assert_array_equal(order[place], np.arange(count))
    np.testing.assert_array_equal(sizes, np.bincount(chosen, minlength=EXPERTS))


@pytest.mark.parametrize(("count", "rows"), [(1, 8), (16, 8), (40, 16), (256, 16), (300, 8)])
def test_tiles_made_of_the_choices_are_those_made_of_the_counts(count: int, rows: int):
    chosen = np.random.default_rng(rows).integers(0, EXPERTS + 1, count).astype(np.int32)
    order, place, sizes = (np.asarray(a) for a in by_expert(chosen, EXPERTS))
    made = jax.jit(experts.tiles_by_expert, static_argnums=(1, 2))(chosen, rows, 8)
    np.testing.assert_array_equal(made[0], order)
    np.testing.assert_array_equal(made[1], place)
    expected = np.asarray(jax.jit(tile_list, static_argnums=(1, 2, 3))(sizes, count, rows, 8))
    tiles, number = np.asarray(made[2]), expected[-1, 0]
    assert set(tiles[-1]) == {number} and number <= count
    np.testing.assert_array_equal(tiles[:number], expected[:number])
