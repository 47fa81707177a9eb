"""Packed prefill of the delta rule: one answer, however a batch is cut and whoever computes it."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pallas_kernels as pk
from tests.kernels import cases
from tests.kernels.cases import Segment

GOLDEN = Path(__file__).parent.parent / "golden"
GOLDEN_OPS = json.loads((GOLDEN / "ops_index.json").read_text())

every_impl = pytest.mark.parametrize("impl", cases.IMPLS)
every_kind = pytest.mark.parametrize("kind", cases.KINDS)


@every_impl
@pytest.mark.parametrize("case", GOLDEN_OPS, ids=lambda case: case["file"][4:-4])
def test_golden_outputs_and_states(case, impl):
    golden = np.load(GOLDEN / case["file"])
    batch, length = case["B"], case["T"]
    table = pk.chunk_table(
        [length] * batch,
        [0] * batch,
        [pk.SLOT] * batch,
        [],
        num_tokens=257,
        num_segments=2,
        num_chunks=5,
        num_boundaries=0,
    )
    packed = (golden[name] for name in cases.Inputs._fields)
    packed = cases.pad(cases.Inputs(*(x.reshape(-1, *x.shape[2:]) for x in packed)), 257)
    states = np.resize(golden["initial_state"], (2, *golden["initial_state"].shape[1:]))
    out = cases.prefill(*packed, states, table, impl=impl, num_boundaries=0)
    o = golden["o"].reshape(-1, *golden["o"].shape[2:])
    assert cases.distance(out.o[: len(o)], o) <= 1e-6
    assert cases.distance(out.final[:batch], golden["final_state"]) <= 2e-6


def segment_lists():
    modes = st.sampled_from([pk.ZERO, pk.SLOT, pk.MERGE])
    lengths = st.one_of(st.sampled_from([0, 1, 2, 63, 64, 65]), st.integers(0, 200))
    one = st.builds(Segment, lengths, st.integers(0, 200), modes)
    return (
        st.lists(one, min_size=1, max_size=cases.SEGMENTS)
        .filter(lambda segments: segments[0].mode != pk.MERGE)
        .map(_within_bucket)
    )


def _within_bucket(segments):
    room, kept = 200, []
    for segment in segments:
        kept.append(segment._replace(length=min(segment.length, room)))
        room -= kept[-1].length
    return kept


@every_impl
@every_kind
@given(segments=segment_lists(), seed=st.integers(0, 2**32 - 1), half=st.booleans())
def test_ragged_segments_follow_the_recurrence(kind, impl, segments, seed, half):
    rng = np.random.default_rng(seed)
    tokens = sum(segment.length for segment in segments)
    inputs = cases.random_inputs(rng, kind, tokens, jnp.bfloat16 if half else jnp.float32)
    initial = cases.random_states(rng, len(segments))
    keep = rng.random((cases.HEADS, cases.KEY)) < 0.5
    grid = [
        (index, position)
        for index, (length, start, _) in enumerate(segments)
        for position in range(start // 64 * 64 + 64, start + length + 1, 64)
    ][: cases.BOUNDARIES]
    # One compiled program serves both: a bfloat16 value is a float32 value.
    given_inputs = cases.Inputs(*(np.asarray(x, np.float32) for x in inputs))
    out = cases.run(impl, given_inputs, segments, initial, grid, keep)
    cases.assert_close(out, cases.oracle(inputs, segments, initial, grid, keep))


@every_impl
@every_kind
def test_bfloat16_inputs_are_upcast_first(kind, impl):
    rng = np.random.default_rng(1)
    inputs = cases.random_inputs(rng, kind, 150, jnp.bfloat16)
    upcast = cases.Inputs(*(np.asarray(x, np.float32) for x in inputs))
    initial, segments = cases.random_states(rng, 2), [Segment(70), Segment(80, 40)]
    for value, other in zip(
        cases.run(impl, inputs, segments, initial),
        cases.run(impl, upcast, segments, initial),
        strict=True,
    ):
        np.testing.assert_allclose(value, other, rtol=0, atol=1e-6)


@every_impl
@every_kind
def test_a_run_cut_off_the_grid_still_follows_the_recurrence(kind, impl):
    rng = np.random.default_rng(6)
    inputs, initial = cases.random_inputs(rng, kind, 150), cases.random_states(rng, 1)
    truth = cases.oracle(inputs, [Segment(150)], initial)
    for first in (1, 17, 63, 65, 100):
        head = cases.run(impl, cases.cut(inputs, 0, first), [Segment(first)], initial)
        tail = cases.run(
            impl, cases.cut(inputs, first, 150), [Segment(150 - first, first)], head.final[:1]
        )
        assert cases.distance(tail.final[:1], truth.final) <= cases.STATE_TOLERANCE
        assert cases.distance(tail.o[: 150 - first], truth.o[first:]) <= cases.O_TOLERANCE


@every_impl
@every_kind
def test_nearly_parallel_keys_stay_accurate(kind, impl):
    rng = np.random.default_rng(9)
    inputs = cases.random_inputs(rng, kind, 200, decays=(0.0, -1e-6, -1e-3))
    k = rng.normal(size=inputs.k[:1].shape) + 0.05 * inputs.k
    inputs = inputs._replace(k=k.astype(np.float32), beta=np.full_like(inputs.beta, 0.95))
    initial = cases.random_states(rng, 1)
    out = cases.run(impl, inputs, [Segment(200)], initial)
    cases.assert_close(out, cases.oracle(inputs, [Segment(200)], initial))


@every_impl
@every_kind
def test_a_log_decay_of_minus_infinity_forgets_everything(kind, impl):
    rng = np.random.default_rng(10)
    inputs, initial = cases.random_inputs(rng, kind, 100), cases.random_states(rng, 1)
    inputs.g[40] = -np.inf
    out = cases.run(impl, inputs, [Segment(100)], initial)
    cases.assert_close(out, cases.oracle(inputs, [Segment(100)], initial))


@every_kind
def test_the_chunked_form_has_the_gradients_of_the_recurrence(kind):
    rng = np.random.default_rng(11)
    inputs = cases.random_inputs(rng, kind, 150, decays=(0.0, -1e-6, -0.05, -1.0, -5.0, -30.0))
    initial = jnp.asarray(cases.random_states(rng))
    keep = jnp.asarray(rng.random((cases.HEADS, cases.KEY)) < 0.5)
    segments = [Segment(20, 50), Segment(90, 64, pk.MERGE), Segment(40, 3, pk.ZERO)]
    table = cases.table(segments, [(1, 128), (0, 64)])
    shapes = jax.eval_shape(
        lambda: cases.prefill(*cases.pad(inputs), initial, table, keep, impl="xla")
    )
    weights = [jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in shapes]

    def loss(args, impl):
        out = cases.prefill(*args, table, keep, impl=impl)
        return sum(jnp.sum(w * x) for w, x in zip(weights, out, strict=True))

    args = (*cases.pad(inputs), initial)
    gradients = {impl: jax.grad(loss)(args, impl) for impl in ("reference", "xla")}
    for value, truth in zip(gradients["xla"], gradients["reference"], strict=True):
        assert np.isfinite(truth).all()
        assert cases.distance(value, np.asarray(truth)) <= 1e-5


@every_kind
def test_heads_may_be_sharded(kind):
    rng = np.random.default_rng(12)
    inputs, initial = cases.random_inputs(rng, kind, 100), cases.random_states(rng)
    table = cases.table([Segment(60, 10), Segment(40, 0, pk.ZERO)], [(0, 64)])
    heads, states = jax.P(None, "tp"), jax.P(None, "tp")
    sharded = jax.shard_map(
        lambda *args: cases.prefill(*args, impl="xla"),
        mesh=jax.make_mesh((1,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,)),
        in_specs=(*[heads] * 5, states, jax.P(), jax.P("tp")),
        out_specs=pk.DeltaOut(heads, states, states),
    )
    keep = jnp.ones((cases.HEADS, cases.KEY), bool)
    args = (*(jnp.asarray(x) for x in cases.pad(inputs)), jnp.asarray(initial), table, keep)
    out = jax.jit(sharded)(*args)
    plain = cases.prefill(*args, impl="xla")
    for value, other in zip(out, plain, strict=True):
        np.testing.assert_allclose(value, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"v": np.zeros((8, 3, 16)), "beta": np.zeros((8, 3)), "g": np.zeros((8, 3))},
            "3 value heads",
        ),
        ({"g": np.zeros((8, 2))}, "log decay|parameter 'g'"),
        ({"g": np.zeros((8, 4, 7))}, "log decay|parameter 'g'"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, message):
    inputs = cases.random_inputs(np.random.default_rng(13), "gdn", 8)._replace(**change)
    table = cases.table([Segment(8)])
    heads = inputs.v.shape[1]
    states = jnp.zeros((cases.SEGMENTS, heads, cases.KEY, cases.VALUE))
    with pytest.raises((ValueError, TypeError), match=message):
        pk.delta_prefill(
            *(jnp.asarray(x, jnp.float32) for x in inputs), states, table, num_boundaries=1
        )
