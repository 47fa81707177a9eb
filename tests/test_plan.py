"""A plan keeps exactly the long-lived units, is known by its contents, and knows its weights."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dasc_jax.horizons import HorizonError
from dasc_jax.plan import RANDOM_SEEDS, PlanError, load_plan, make_plan, random_plan

THRESHOLDS = (0, 4, 16, 64, 128, 512, 1024)


def draw(kind="kda", layers=3, seed=0):
    rng = np.random.default_rng(seed)
    shape = (4, 8) if kind == "kda" else (4,)
    return [np.exp(rng.uniform(0, 8, shape)) for _ in range(layers)]


KINDS = pytest.mark.parametrize("kind", ["kda", "gdn"])


@KINDS
@pytest.mark.parametrize("w_max", THRESHOLDS)
def test_a_unit_is_retained_iff_its_horizon_exceeds_w_max(kind, w_max):
    h = draw(kind)
    plan = make_plan(h, w_max)
    assert plan.kind == kind and plan.w_max == w_max
    for mask, x in zip(plan.retained, h, strict=True):
        np.testing.assert_array_equal(mask, x > w_max)


def test_a_horizon_equal_to_w_max_is_local():
    plan = make_plan([np.array([16.0, np.nextafter(16, 17)])], 16)
    assert plan.retained[0].tolist() == [False, True]


@given(st.integers(0, 2**32 - 1), st.integers(0, 2000), st.integers(0, 2000))
def test_a_larger_w_max_retains_a_subset_and_never_shortens_the_window(seed, one, other):
    h = draw(seed=seed)
    small, large = (make_plan(h, w) for w in sorted((one, other)))
    for a, b in zip(small.retained, large.retained, strict=True):
        assert not (b & ~a).any()
    assert small.window <= large.window


@KINDS
def test_w_max_0_is_dense_and_needs_no_refresh(kind):
    plan = make_plan(draw(kind), 0)
    assert plan.exact and plan.total == plan.units and plan.window == 0


def test_a_w_max_past_every_horizon_retains_nothing():
    plan = make_plan(draw(), 10**6)
    assert plan.total == 0 and not plan.exact and plan.counts == (0, 0, 0)
    assert plan.index.shape == (0,) and (plan.inverse == -1).all()


@pytest.mark.parametrize(
    ("local", "w_max", "window"),
    [(1.5, 16, 4), (4.0, 16, 4), (4.1, 16, 8), (9.0, 16, 16), (16.0, 16, 16), (65.0, 100, 100),
     (65.0, 128, 128), (0.3, 16, 4), (1.5, 2, 2)],
)  # fmt: skip
def test_window_is_the_longest_local_horizon_rounded_up_and_clamped(local, w_max, window):
    assert make_plan([np.array([1.1, local, 1e5])], w_max).window == window


@KINDS
@pytest.mark.parametrize("w_max", THRESHOLDS)
@pytest.mark.parametrize("seed", RANDOM_SEEDS)
def test_random_control_keeps_as_many_units_in_every_layer(kind, w_max, seed):
    h = draw(kind)
    plan, control = make_plan(h, w_max), random_plan(h, w_max, seed)
    assert control.counts == plan.counts and control.kind == plan.kind
    assert control == random_plan(h, w_max, seed)


def test_random_controls_differ_by_seed_and_by_layer_and_choose_evenly():
    h = [np.concatenate([np.full(50, 2.0), np.full(50, 100.0)])] * 2
    plans = [random_plan(h, 16, seed) for seed in range(200)]
    assert len({plan.id for plan in plans}) == 200
    assert any((p.retained[0] != p.retained[1]).any() for p in plans)
    share = np.mean([p.retained[0] for p in plans], axis=0)
    assert abs(share - 0.5).max() < 0.2


def test_random_control_that_drops_a_long_unit_refreshes_at_most_w_max():
    h = [np.array([1e4] * 5 + [2.0] * 5)]
    assert {random_plan(h, 64, seed).window for seed in range(5)} <= {4, 64}


@KINDS
@pytest.mark.parametrize("w_max", THRESHOLDS)
def test_index_table_lists_retained_units_layer_major_and_inverse_undoes_it(kind, w_max):
    plan = make_plan(draw(kind), w_max)
    flat = np.concatenate([mask.ravel() for mask in plan.retained])
    np.testing.assert_array_equal(plan.index, np.flatnonzero(flat))
    np.testing.assert_array_equal(plan.inverse[plan.index], np.arange(plan.total))
    assert (plan.inverse[~flat] == -1).all()
    assert plan.offsets == (0, *np.cumsum(plan.counts)) and plan.total == sum(plan.counts)


def test_mask_is_heads_by_key_channels_for_both_kinds():
    kda, gdn = make_plan(draw("kda"), 64), make_plan(draw("gdn"), 64)
    np.testing.assert_array_equal(kda.mask(1, 8), kda.retained[1])
    np.testing.assert_array_equal(gdn.mask(1, 8), np.tile(gdn.retained[1][:, None], 8))
    assert gdn.mask(1).shape == (4, 1)


def test_plans_are_equal_by_contents_and_immutable():
    h = draw()
    assert make_plan(h, 16) == make_plan(draw(), 16)
    assert hash(make_plan(h, 16)) == hash(make_plan(draw(), 16))
    others = [
        make_plan(h, 17), make_plan(h, 16, eps=1e-2), make_plan(h, 16, a=0.0),
        make_plan(draw(seed=1), 16), random_plan(h, 16, 1234), make_plan(draw("gdn"), 16),
    ]  # fmt: skip
    assert len({make_plan(h, 16).id, *(p.id for p in others)}) == 7
    with pytest.raises(ValueError, match="read-only"):
        make_plan(h, 16).retained[0][0, 0] = True
    with pytest.raises(ValueError, match="read-only"):
        make_plan(h, 16).index[0] = 1


def test_plan_does_not_change_when_its_horizons_are_overwritten():
    h = draw()
    plan = make_plan(h, 16)
    before = plan.id
    h[0][:] = 1.0
    assert plan.id == before == make_plan(draw(), 16).id


@pytest.mark.parametrize("w_max", [-1, 1.5, True, None, "16"])
def test_w_max_that_is_no_token_count_is_refused(w_max):
    with pytest.raises((PlanError, TypeError), match="w_max"):
        make_plan(draw(), w_max)


def test_unusable_horizons_never_become_a_plan():
    with pytest.raises(HorizonError, match="layer 0, head 1, channel 2"):
        make_plan([np.where(np.arange(12).reshape(3, 4) == 6, np.inf, 5.0)], 16)


@KINDS
@pytest.mark.parametrize("w_max", [0, 16, 10**6])
def test_a_saved_plan_loads_equal(kind, w_max, tmp_path):
    h = draw(kind)
    for plan in (make_plan(h, w_max), random_plan(h, w_max, 2027)):
        path = tmp_path / "deep" / "kimi.plan"
        plan.save(path)
        loaded = load_plan(path, h)
        assert loaded == plan and loaded.id == plan.id and loaded.window == plan.window
        assert (loaded.eps, loaded.a, loaded.w_max) == (plan.eps, plan.a, plan.w_max)
        assert [p.name for p in path.parent.iterdir()] == ["kimi.plan"]


def test_a_plan_of_other_weights_or_another_model_is_refused(tmp_path):
    h, path = draw(), tmp_path / "plan"
    make_plan(h, 16).save(path)
    changed = [x.copy() for x in h]
    changed[2][3, 7] *= 1.001
    with pytest.raises(PlanError, match="other decay weights"):
        load_plan(path, changed)
    with pytest.raises(PlanError, match=r"3 layers of units \(4, 8\).*2 of \(4, 8\)"):
        load_plan(path, h[:2])
    assert load_plan(path) == make_plan(h, 16)


def test_last_bit_differences_of_the_horizons_are_no_other_weights(tmp_path):
    h, path = draw(), tmp_path / "plan"
    make_plan(h, 16).save(path)
    assert load_plan(path, [x * (1 + 2**-52) for x in h]) == make_plan(h, 16)


def test_a_damaged_or_foreign_file_is_named(tmp_path):
    path = tmp_path / "plan"
    make_plan(draw(), 16).save(path)
    whole = path.read_bytes()
    for content in (b"", b"not a plan", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(PlanError, match=str(path)):
            load_plan(path)
    np.save(tmp_path / "array.npy", np.ones(3))
    with pytest.raises(PlanError, match="array.npy"):
        load_plan(tmp_path / "array.npy")
    with pytest.raises(FileNotFoundError):
        load_plan(tmp_path / "missing")


def test_an_edited_plan_is_detected(tmp_path):
    path = tmp_path / "plan"
    make_plan(draw(), 16).save(path)
    with np.load(path) as file:
        head, retained = file["head"], file["retained"]
    retained[0, 0, 0] ^= True
    with path.open("wb") as file:
        np.savez(file, head=head, retained=retained)
    with pytest.raises(PlanError, match="damaged"):
        load_plan(path)
