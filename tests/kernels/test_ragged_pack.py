"""Pack and unpack against numpy: every bit of both pools, for all implementations and units."""

import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels as pk
from pallas_kernels.mgpu import ragged_pack as hopper
from pallas_kernels.mgpu.ragged_pack import Blocking
from tests.kernels import ragged_cases
from tests.kernels.ragged_cases import assert_same_bits

SHAPES = {"kda": (2, 2, 4), "gdn": (2, 8)}
RETAINED = (0, 7, 16)
SLOTS, STATES = [3, 0, 5, 9, -1, 0], [2, 0, 0, 1, 3, 7]
"""A plain one, padding, state 0, a slot past the pool, one before it, a state past the states."""

every_impl = pytest.mark.parametrize("impl", ["reference", "xla"])
every_kind = pytest.mark.parametrize("kind", SHAPES)
every_format = pytest.mark.parametrize("int8", [False, True], ids=["float32", "int8"])


@functools.partial(jax.jit, static_argnames="impl")
def pack(*args, impl):
    return pk.ragged_pack(*args, impl=impl)


@functools.partial(jax.jit, static_argnames="impl")
def unpack(*args, impl):
    return pk.ragged_unpack(*args, impl=impl)


def problem_of(seed, kind, retained, slots=SLOTS, states=STATES, **kwargs):
    rng = np.random.default_rng(seed)
    mask = np.zeros(SHAPES[kind], bool)
    mask.flat[rng.permutation(mask.size)[:retained]] = True
    return ragged_cases.problem(rng, mask, slots, states, **kwargs)


def to_pack(problem):
    """Sources are in bounds even where the slot is not."""
    return problem._replace(states=np.clip(problem.states, 0, problem.temporal.shape[1] - 1))


@every_impl
@every_kind
@every_format
@settings(max_examples=8)
@given(st.integers(0, 2**32 - 1), st.sampled_from(RETAINED))
def test_both_pools_are_what_numpy_makes_them_bit_for_bit(impl, kind, int8, seed, retained):
    problem = to_pack(problem_of(seed, kind, retained, int8=int8, value=16))
    for got, want in zip(
        pack(*problem.to_pack(), impl=impl), ragged_cases.packed(problem), strict=True
    ):
        assert_same_bits(got, want)
    problem = problem_of(seed, kind, retained, int8=int8, value=16)
    assert_same_bits(unpack(*problem.to_unpack(), impl=impl), ragged_cases.unpacked(problem))


@every_impl
@every_kind
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=5)
def test_what_is_packed_comes_back_and_the_rest_is_zero(impl, kind, seed):
    problem = problem_of(seed, kind, 7, [4, 2], [1, 3], int8=False, value=16)
    rows, _ = pack(*problem.to_pack(), impl=impl)
    back = unpack(*problem._replace(rows=np.asarray(rows)).to_unpack(), impl=impl)
    shape = (2, 2, 4, 16) if kind == "kda" else (2, 8, 4, 16)
    mask = (problem.inverse >= 0).reshape(*SHAPES[kind], *([1] * (4 - len(SHAPES[kind]))))
    for state in (1, 3):
        want = np.where(mask, problem.temporal[:, state], np.float32(0))
        assert want.shape == shape
        assert_same_bits(back[:, state], want)


HARD_ROWS = np.array(
    [
        np.zeros(128),
        np.full(128, 1e-12),
        np.full(128, 1e-44),
        np.linspace(-3e38, 3e38, 128),
        np.r_[127.0, np.arange(127) - 63 + 0.5],
        np.r_[-1.0, np.full(127, 0.5 / 127)],
        np.exp(np.linspace(-80, 3, 128)),
        np.r_[1e-8, np.full(127, -1e-8)],
    ],
    np.float32,
)


@every_impl
def test_int8_equals_numpy_for_ties_zeros_and_extremes(impl):
    problem = problem_of(0, "kda", 16, [1], [1], int8=True)
    problem.temporal[:, 1] = HARD_ROWS.reshape(2, 2, 2, 128).repeat(2, axis=2)
    for got, want in zip(
        pack(*problem.to_pack(), impl=impl), ragged_cases.packed(problem), strict=True
    ):
        assert_same_bits(got, want)


@every_kind
@every_format
def test_pools_are_updated_in_place(kind, int8):
    problem = problem_of(1, kind, 7, [1], [1], int8=int8, pool_slots=512, pool_states=256)
    args = problem.to_pack()
    memory = jax.jit(pk.ragged_pack, donate_argnums=(0, 1)).lower(*args).compile().memory_analysis()
    assert memory.temp_size_in_bytes < args[0].nbytes / 16 <= memory.alias_size_in_bytes
    args = problem.to_unpack()
    memory = jax.jit(pk.ragged_unpack, donate_argnums=0).lower(*args).compile().memory_analysis()
    assert memory.temp_size_in_bytes < args[0].nbytes / 16 <= memory.alias_size_in_bytes


def test_arrays_that_do_not_belong_together_are_refused():
    refused = pytest.raises((ValueError, jaxtyping.TypeCheckError))
    args = problem_of(0, "kda", 7, int8=False).to_pack()
    with refused:
        pk.ragged_pack(*args[:3], args[3][:6], *args[4:])
    with refused:
        pk.ragged_pack(args[0][..., :64], *args[1:])
    with pytest.raises(ValueError, match="float32 rows with scales"):
        pk.ragged_pack(args[0], jnp.zeros(args[0].shape[:-1]), *args[2:])
    args = problem_of(0, "kda", 7, int8=False).to_unpack()
    with pytest.raises(ValueError, match="a table of 15 units for states of 16"):
        pk.ragged_unpack(*args[:3], args[3][:15], *args[4:])


@every_kind
@every_format
@pytest.mark.parametrize(("blocking", "retained"), [(Blocking(8), 16), (Blocking(4), 7)], ids=str)
@pytest.mark.timeout(60)
def test_interpreted_kernels_equal_numpy_bit_for_bit(kind, int8, blocking, retained):
    interpret = plgpu.InterpretGPUParams()
    problem = problem_of(2, kind, retained, int8=int8)
    valid = to_pack(problem)
    new = hopper.pack(*valid.to_pack(), blocking, interpret)
    for got, want in zip(new, ragged_cases.packed(valid), strict=True):
        assert_same_bits(got, want)
    new = hopper.unpack(*problem.to_unpack(), blocking, interpret)
    assert_same_bits(new, ragged_cases.unpacked(problem))


@every_kind
@pytest.mark.timeout(60)
def test_blocks_of_the_interpreted_kernels_do_not_race(kind, races):
    problem = problem_of(3, kind, 16, [3, 1], [2, 1], int8=True)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    hopper.pack(*problem.to_pack(), Blocking(4), interpret)
    hopper.unpack(*problem.to_unpack(), Blocking(4), interpret)
    assert not races()


MODELS = {
    "kimi-linear": {"layers": 20, "mask": (32, 128), "retained": 30801},
    "qwen3-next": {"layers": 36, "mask": (32,), "retained": 433},
}


def specs(model, int8, slots=1000, states=257, checkpoints=4):
    """(arguments of pack, arguments of unpack) at a model's real sizes, in pools past 2**31
    elements."""
    layers, mask, retained = model["layers"], model["mask"], model["retained"]
    unit = (128,) if len(mask) == 2 else (128, 128)

    def array(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    rows = array(slots, retained, *unit, dtype=jnp.int8 if int8 else jnp.float32)
    scales = array(*rows.shape[:-1], dtype=jnp.float32) if int8 else None
    temporal = array(layers, states, 32, 128, 128, dtype=jnp.float32)
    pairs = (array(checkpoints), array(checkpoints))
    inverse = array(layers * int(np.prod(mask)))
    return (rows, scales, temporal, array(retained), *pairs), (
        temporal,
        rows,
        scales,
        inverse,
        *pairs,
    )


@every_format
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("blocking", [Blocking(), Blocking(64)], ids=str)
def test_kernels_lower_for_hopper_at_real_sizes_and_alias_their_pools(model, int8, blocking):
    to_pack, to_unpack = specs(MODELS[model], int8)
    pools = (0, 1) if int8 else (0,)
    assert hopper.unfit(*to_pack[:4]) is None
    for run, args, donated in ((hopper.pack, to_pack, pools), (hopper.unpack, to_unpack, (0,))):
        call = jax.jit(functools.partial(run, blocking=blocking), donate_argnums=donated)
        text = call.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("mosaic_gpu") and text.count("tf.aliasing_output") == len(donated)
        assert text.count("output_tuple_indices") == len(donated)


def test_kernels_refuse_what_they_were_not_built_for():
    kimi = MODELS["kimi-linear"]
    (rows, scales, temporal, table, *pairs), _ = specs(kimi, True)
    assert "NVIDIA Hopper" in (hopper.refuses_pack(rows, scales, temporal, table, *pairs) or "")
    assert "NVIDIA Hopper" in (hopper.refuses_unpack(temporal, rows, scales, table, *pairs) or "")
    assert "absent" in (hopper.unfit(rows, None, temporal, table) or "")
    narrow = jax.ShapeDtypeStruct((1, 1, 2, 4, 64), jnp.float32)
    assert "64 values" in (hopper.unfit(rows, scales, narrow, table) or "")
    (rows, scales, temporal, table, *_), _ = specs(kimi | {"retained": 3}, True)
    assert "3 packed rows" in (hopper.unfit(rows, scales, temporal, table) or "")
    (rows, scales, temporal, table, *_), _ = specs(kimi, True, slots=70_000)
    assert "32 bits" in (hopper.unfit(rows, scales, temporal, table) or "")
