"""One-token steps on a pool: what a prefill computes, written to the named slots and no other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from tests.kernels import cases
from tests.kernels.cases import Segment

LAYERS, SLOTS, BATCH = 2, 6, 4

every_impl = pytest.mark.parametrize("impl", cases.IMPLS)
every_kind = pytest.mark.parametrize("kind", cases.KINDS)


def random_pool(rng):
    shape = (LAYERS, SLOTS, cases.HEADS, cases.KEY, cases.VALUE)
    return rng.normal(size=shape).astype(np.float32)


@every_impl
@every_kind
def test_one_step_follows_the_recurrence_and_leaves_other_slots_alone(kind, impl):
    rng = np.random.default_rng(0)
    inputs, pool = cases.random_inputs(rng, kind, BATCH), random_pool(rng)
    slots = np.array([3, 0, 5, 1], np.int32)
    for x in inputs:
        x[1] = np.nan
    after, o = (np.asarray(x) for x in cases.decode(*inputs, pool, slots, layer=1, impl=impl))
    for row, slot in enumerate(slots):
        if slot:
            one = cases.cut(inputs, row, row + 1)
            truth = cases.oracle(one, [Segment(1)], pool[1, slot][None])
            assert cases.distance(o[row], truth.o[0]) <= 1e-6
            assert cases.distance(after[1, slot], truth.final[0]) <= 1e-6
    assert not o[1].any()
    cases.assert_same_bits(after[0], pool[0])
    cases.assert_same_bits(after[1, [0, 2, 4]], pool[1, [0, 2, 4]])


@every_impl
@every_kind
def test_chained_steps_equal_a_prefill(kind, impl):
    rng = np.random.default_rng(1)
    length = 70
    inputs, pool = cases.random_inputs(rng, kind, length), random_pool(rng)
    pool_after, o = jnp.asarray(pool), []
    for token in range(length):
        # The other rows are another request's and padding: neither may matter.
        rows = [token, (token + 7) % length, 0, 0]
        batch = cases.Inputs(*(x[rows] for x in inputs))
        slots = np.array([2, 4, 0, 0], np.int32)
        pool_after, step = cases.decode(*batch, pool_after, slots, layer=0, impl=impl)
        o.append(step[0])
    whole = cases.run(impl, inputs, [Segment(length)], pool[0, 2:3])
    assert cases.distance(np.stack(o), whole.o[:length]) <= cases.O_TOLERANCE
    assert cases.distance(pool_after[0, 2], whole.final[0]) <= cases.STATE_TOLERANCE


@every_kind
def test_a_donated_pool_is_updated_in_place(kind):
    rng = np.random.default_rng(2)
    inputs = tuple(jnp.asarray(x) for x in cases.random_inputs(rng, kind, BATCH))
    pool = jnp.zeros((LAYERS, 64, cases.HEADS, cases.KEY, cases.VALUE))
    slots = jnp.arange(BATCH, dtype=jnp.int32)

    def step(pool, *args):
        return pk.delta_decode(*args, pool, slots, layer=1)

    memory = jax.jit(step, donate_argnums=0).lower(pool, *inputs).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= pool.nbytes
    assert memory.temp_size_in_bytes < pool.nbytes
