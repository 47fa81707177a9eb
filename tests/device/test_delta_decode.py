"""The decode kernel on a Hopper GPU: right, in place, the same every time, whatever the tiling."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels.bench import delta_decode as bench
from pallas_kernels.mgpu import delta_decode as kernel
from tests.kernels import step_cases
from tests.kernels.cases import KINDS, assert_same_bits, distance

pytestmark = pytest.mark.device
every_kind = pytest.mark.parametrize("kind", KINDS)
GROUP = {"kda": 1, "gdn": 2}
TILINGS = sorted({*bench.SMALL, *bench.LARGE}, key=str)
DTYPES = [jnp.float32, jnp.bfloat16]
LAYER, EPS, REPEATS = 1, 1e-5, 1000


@pytest.fixture
def rng():
    return np.random.default_rng()


def compiled(op, case, **static):
    """The op for this case's shapes, its pool donated."""
    function = partial(op, **static)
    donated = len(case.tokens)
    args = (*case.tokens, case.pool, case.slots)
    return jax.jit(function, donate_argnums=donated).lower(*args).compile()


def on_device(case):
    return tuple(jnp.array(x) for x in (*case.tokens, case.pool, case.slots))


def decode(tiling):
    return partial(kernel.decode, layer=LAYER, tiling=tiling)


def step(tiling):
    return partial(kernel.step, layer=LAYER, eps=EPS, tiling=tiling)


@every_kind
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_every_tiling_equals_the_oracle_and_leaves_other_slots_alone(kind, tiling, rng):
    case = step_cases.decode_case(rng, kind, heads=32, batch=13, group=GROUP[kind])
    pool, o = compiled(decode(tiling), case)(*on_device(case))
    step_cases.check_decode(case, pool, o, layer=LAYER)


@every_kind
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "batch"), [(32, 1), (32, 12), (4, 70), (32, 66)])
def test_decode_equals_the_oracle_at_every_batch(kind, dtype, heads, batch, rng):
    case = step_cases.decode_case(rng, kind, heads, batch, GROUP[kind], dtype)
    pool, o = compiled(pk.delta_decode, case, layer=LAYER, impl="mosaic")(*on_device(case))
    step_cases.check_decode(case, pool, o, layer=LAYER)


@every_kind
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "batch"), [(32, 1), (32, 12), (4, 70), (32, 66)])
def test_a_step_equals_the_oracle_at_every_batch(kind, dtype, heads, batch, rng):
    case = step_cases.step_case(rng, kind, heads, batch, GROUP[kind], dtype)
    pool, y = compiled(pk.delta_step, case, layer=LAYER, eps=EPS, impl="mosaic")(*on_device(case))
    o = step_cases.check_states(case, pool, layer=LAYER)
    truth = step_cases.output(case, o.astype(dtype), EPS)
    assert y.dtype == dtype
    assert distance(np.asarray(y), truth) <= (4e-6 if dtype == jnp.float32 else 1e-2)


@every_kind
@pytest.mark.parametrize("tiling", bench.STEP, ids=str)
def test_every_tiling_of_a_step_gives_nearly_what_its_parts_give(kind, tiling, rng):
    case = step_cases.step_case(rng, kind, heads=32, batch=13, group=GROUP[kind])
    pool, y = compiled(step(tiling), case)(*on_device(case))
    parts = compiled(pk.delta_step, case, layer=LAYER, eps=EPS, impl="reference")
    expected, y_expected = parts(*on_device(case))
    assert distance(np.asarray(pool), np.asarray(expected)) <= 2e-6
    assert distance(np.asarray(y), np.asarray(y_expected)) <= 4e-6


def test_512_steps_in_a_row_stay_with_the_reference(rng):
    case = step_cases.decode_case(rng, "kda", heads=4, batch=3)
    mosaic, reference = (
        compiled(pk.delta_decode, case, layer=LAYER, impl=impl) for impl in ("mosaic", "reference")
    )
    *_, slots = on_device(case)
    pools = [jnp.array(case.pool), jnp.array(case.pool)]
    for _ in range(512):
        fresh = step_cases.decode_case(rng, "kda", heads=4, batch=3).tokens
        tokens = tuple(jnp.asarray(x) for x in fresh)
        pools[0], o = mosaic(*tokens, pools[0], slots)
        pools[1], expected = reference(*tokens, pools[1], slots)
    live = case.slots[case.slots > 0]
    assert distance(np.asarray(o), np.asarray(expected)) <= 1e-4
    final = np.asarray(pools[1])[LAYER, live]
    assert distance(np.asarray(pools[0])[LAYER, live], final) <= 1e-4


@every_kind
@pytest.mark.parametrize("batch", [2, 12])
def test_a_donated_pool_is_updated_where_it_lies(kind, batch, rng):
    case = step_cases.step_case(rng, kind, 32, batch, GROUP[kind])
    run = compiled(pk.delta_step, case, layer=LAYER, eps=EPS, impl="mosaic")
    memory = run.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= case.pool.nbytes
    assert memory.temp_size_in_bytes < 2**20
    *tokens, pool, slots = on_device(case)
    address = pool.unsafe_buffer_pointer()
    after, _ = run(*tokens, pool, slots)
    assert after.unsafe_buffer_pointer() == address


@every_kind
@pytest.mark.parametrize("batch", [2, 12])
def test_a_thousand_repeats_give_the_same_bits(kind, batch, rng):
    case = step_cases.step_case(rng, kind, 32, batch, GROUP[kind], jnp.bfloat16)
    run = compiled(pk.delta_step, case, layer=LAYER, eps=EPS, impl="mosaic")
    same = jax.jit(lambda a, b: jnp.array_equal(a.view(jnp.uint32), b.view(jnp.uint32)))
    *tokens, start, slots = on_device(case)
    first, y_first = run(*tokens, jnp.copy(start), slots)
    for _ in range(REPEATS):
        pool, y = run(*tokens, jnp.copy(start), slots)
        assert same(pool, first)
        assert_same_bits(y, y_first)


@every_kind
@pytest.mark.parametrize("batch", [4, 40, 66])
def test_what_else_is_in_the_batch_changes_no_bit(kind, batch, rng):
    case = step_cases.decode_case(rng, kind, 32, batch, GROUP[kind])
    whole_pool, whole = compiled(pk.delta_decode, case, layer=LAYER, impl="mosaic")(
        *on_device(case)
    )
    order = rng.permutation(batch)
    mixed = case._replace(tokens=tuple(x[order] for x in case.tokens), slots=case.slots[order])
    pool, o = compiled(pk.delta_decode, mixed, layer=LAYER, impl="mosaic")(*on_device(mixed))
    assert_same_bits(o, np.asarray(whole)[order])
    assert_same_bits(pool, whole_pool)
