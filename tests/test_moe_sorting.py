"""Sorting choices by expert: by comparing all pairs where they are few, by a sort otherwise."""

import jax
import numpy as np
import pytest

from dasc_jax.models import moe

EXPERTS = 16
by_expert = jax.jit(moe.by_expert, static_argnums=1)


@pytest.mark.parametrize("count", [1, 8, 320, moe._FEW_CHOICES, moe._FEW_CHOICES + 1, 3000])
def test_choices_are_sorted_in_a_stable_order_that_can_be_undone(count):
    chosen = np.random.default_rng(count).integers(0, EXPERTS, count).astype(np.int32)
    order, place, sizes = (np.asarray(a) for a in by_expert(chosen, EXPERTS))
    np.testing.assert_array_equal(order, np.argsort(chosen, stable=True))
    np.testing.assert_array_equal(order[place], np.arange(count))
    np.testing.assert_array_equal(sizes, np.bincount(chosen, minlength=EXPERTS))
