"""The Hopper kernels of `ragged_pack` and `ragged_unpack` against numpy, at the models' sizes."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels.mgpu import ragged_pack as hopper
from pallas_kernels.mgpu.ragged_pack import Blocking
from tests.kernels import ragged_cases
from tests.kernels.ragged_cases import assert_same_bits
from tests.kernels.test_ragged_pack import HARD_ROWS

pytestmark = pytest.mark.device

MASKS = {"kda": (20, 32, 128), "gdn": (36, 32)}
SMALL = {"kda": (2, 4, 128), "gdn": (3, 8)}
SEED = time.time_ns() % 2**32

every_kind = pytest.mark.parametrize("kind", MASKS)
every_format = pytest.mark.parametrize("int8", [False, True], ids=["float32", "int8"])


@pytest.fixture(autouse=True)
def seed():
    """Fresh data in every session; shown where a test fails."""
    print(f"seed {SEED}")


def problem_of(shape, retained, slots, states, **kwargs):
    """`retained` units, chosen uniformly; a number below 1 is a share."""
    rng = np.random.default_rng(SEED)
    mask = np.zeros(shape, bool)
    count = int(retained * mask.size) if isinstance(retained, float) else retained
    mask.flat[rng.permutation(mask.size)[:count]] = True
    return ragged_cases.problem(rng, mask, slots, states, key=128, **kwargs)


@functools.partial(jax.jit, static_argnames="impl")
def pack(*args, impl="mosaic"):
    return pk.ragged_pack(*args, impl=impl)


@functools.partial(jax.jit, static_argnames="impl")
def unpack(*args, impl="mosaic"):
    return pk.ragged_unpack(*args, impl=impl)


def check_pack(got, problem):
    for pool, want in zip(got, ragged_cases.packed(problem), strict=True):
        assert_same_bits(pool, want)


def check(problem, *, impl="mosaic"):
    """Both ops; a state outside of them is none to pack from."""
    last = problem.temporal.shape[1] - 1
    inside = problem._replace(states=np.clip(problem.states, 0, last))
    check_pack(pack(*inside.to_pack(), impl=impl), inside)
    new = unpack(*problem.to_unpack(), impl=impl)
    assert_same_bits(new, ragged_cases.unpacked(problem))


@every_kind
@every_format
def test_donated_pools_are_updated_in_place(kind, int8):
    problem = problem_of(SMALL[kind], 0.4, [2], [1], int8=int8, pool_slots=64, pool_states=64)
    donating = jax.jit(functools.partial(pk.ragged_pack, impl="mosaic"), donate_argnums=(0, 1))
    args = problem.to_pack()
    memory = donating.lower(*args).compile().memory_analysis()
    assert memory.temp_size_in_bytes < args[0].nbytes / 16 < memory.alias_size_in_bytes
    check_pack(donating(*args), problem)
    donating = jax.jit(functools.partial(pk.ragged_unpack, impl="mosaic"), donate_argnums=0)
    args = problem.to_unpack()
    memory = donating.lower(*args).compile().memory_analysis()
    assert memory.temp_size_in_bytes < args[0].nbytes / 16 < memory.alias_size_in_bytes
    assert_same_bits(donating(*args), ragged_cases.unpacked(problem))


@every_kind
@every_format
def test_a_whole_checkpoint_and_no_other_slot(kind, int8):
    check(problem_of(MASKS[kind], 0.376, [2], [1], int8=int8, pool_slots=4, pool_states=3))


@every_kind
@every_format
@pytest.mark.parametrize("retained", [4, 37, 0.999])
def test_few_units_an_odd_number_and_nearly_all(kind, int8, retained):
    shape = SMALL[kind]
    count = min(retained, int(np.prod(shape)) - 1) if isinstance(retained, int) else retained
    check(problem_of(shape, count, [1, 3], [2, 0], int8=int8))


@every_kind
@every_format
def test_everything_retained(kind, int8):
    check(problem_of(SMALL[kind], int(np.prod(SMALL[kind])), [5, 4], [1, 3], int8=int8))


@every_kind
@every_format
def test_several_checkpoints_with_padding_and_slots_outside_the_pool(kind, int8):
    slots, states = [3, 0, 5, 9, -1, 0, 1], [2, 0, 0, 1, 3, 9, -1]
    check(problem_of(SMALL[kind], 0.4, slots, states, int8=int8))


def test_nothing_retained_falls_to_xla():
    check(problem_of(SMALL["kda"], 0, [1, 0], [2, 0], int8=False), impl="auto")


def test_poison_in_what_is_overwritten_and_in_what_is_dropped_reaches_nothing():
    problem = problem_of(SMALL["kda"], 0.4, [2], [1], int8=False)
    problem.rows[0], problem.rows[2] = np.nan, np.nan
    dropped = problem.inverse.reshape(SMALL["kda"]) < 0
    problem.temporal[:, 1][dropped] = np.nan
    rows, _ = pack(*problem.to_pack())
    problem = problem._replace(rows=np.asarray(rows))
    new = np.asarray(unpack(*problem.to_unpack()))
    assert np.isfinite(new).all() and not new[:, 1][dropped].any()
    assert_same_bits(new, ragged_cases.unpacked(problem))
    zeros = problem._replace(slots=np.array([0], np.int32))
    assert not np.asarray(unpack(*zeros.to_unpack()))[:, 1].any()


def test_retained_nan_infinity_and_negative_zero_survive():
    problem = problem_of(SMALL["kda"], 0.4, [2], [1], int8=False)
    special = np.array([np.nan, np.inf, -np.inf, -0.0], np.float32)
    problem.temporal[:, 1] = np.resize(special, problem.temporal[:, 1].shape)
    rows, _ = pack(*problem.to_pack())
    assert_same_bits(rows, ragged_cases.packed(problem)[0])


def test_int8_equals_numpy_for_ties_zeros_and_extremes():
    problem = problem_of(SMALL["kda"], 1024, [1], [1], int8=True)
    problem.temporal[:, 1] = HARD_ROWS.repeat(128, axis=0).reshape(2, 4, 128, 128)
    check(problem)


@pytest.mark.parametrize("exponent", range(-6, 7, 3))
def test_int8_equals_numpy_for_ten_million_values_of_any_size(exponent):
    problem = problem_of((20, 32, 128), 1.0, [1], [1], int8=True, pool_slots=2, pool_states=2)
    scale = np.exp(exponent * ragged_cases.normal(np.random.default_rng(SEED), (32, 128, 1)))
    problem.temporal[:] *= scale.astype(np.float32)
    check_pack(pack(*problem.to_pack()), problem)


@every_format
@pytest.mark.parametrize("blocking", [Blocking(4), Blocking(8), Blocking(64)], ids=str)
def test_every_blocking_gives_the_same_bits(int8, blocking):
    problem = problem_of((4, 32, 128), 6159, [2, 3], [1, 2], int8=int8)
    got = jax.jit(functools.partial(hopper.pack, blocking=blocking))(*problem.to_pack())
    check_pack(got, problem)
    new = jax.jit(functools.partial(hopper.unpack, blocking=blocking))(*problem.to_unpack())
    assert_same_bits(new, ragged_cases.unpacked(problem))


@every_format
def test_a_thousand_repeats_give_the_same_bits(int8):
    problem = problem_of(MASKS["kda"], 0.376, [1], [1], int8=int8, pool_slots=2, pool_states=2)
    args = problem.to_pack()
    first = pack(*args)
    scales = None if first[1] is None else np.asarray(first[1])
    back = problem._replace(rows=np.asarray(first[0]), scales=scales).to_unpack()
    state = unpack(*back)

    def same(a, b):
        integer = {1: jnp.int8, 4: jnp.int32}[a.dtype.itemsize]
        a, b = (jax.lax.bitcast_convert_type(x, integer) for x in (a, b))
        return jnp.all(a == b)

    @jax.jit
    def repeat(args, back, want):
        got = (*pk.ragged_pack(*args, impl="mosaic"), pk.ragged_unpack(*back, impl="mosaic"))
        pairs = [(x, y) for x, y in zip(got, want, strict=True) if x is not None]
        return jnp.all(jnp.stack([same(x, y) for x, y in pairs]))

    outcomes = [repeat(args, back, (*first, state)) for _ in range(1000)]
    assert all(bool(ok) for ok in outcomes)


def test_rows_past_four_gibibytes_are_addressed():
    kept, slots = 30801, 300
    rows = jnp.zeros((slots, kept, 128), jnp.float32)
    temporal = jax.random.normal(jax.random.key(SEED), (20, 1, 32, 128, 128))
    index = jnp.arange(kept, dtype=jnp.int32) * 2
    at = jnp.array([slots - 1], jnp.int32)
    donating = jax.jit(functools.partial(pk.ragged_pack, impl="mosaic"), donate_argnums=0)
    rows, _ = donating(rows, None, temporal, index, at, jnp.zeros(1, jnp.int32))
    want = np.asarray(temporal).reshape(-1, 128)[::2][:kept]
    assert_same_bits(rows[-1], want)
    assert not bool(jnp.any(rows[:-1]))
    inverse = jnp.full(20 * 32 * 128, -1, jnp.int32).at[index].set(jnp.arange(kept))
    state = unpack(temporal, rows, None, inverse, at, jnp.zeros(1, jnp.int32))
    dense = np.zeros((20 * 32 * 128, 128), np.float32)
    dense[::2][:kept] = want
    assert_same_bits(state.reshape(-1, 128), dense)
