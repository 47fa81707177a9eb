"""Horizons against known values and scipy; degenerate decays are named, never planned with."""

import types

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dasc_jax.horizons import (
    HorizonError,
    check_horizons,
    decay,
    empirical_horizons,
    horizons,
    readout_magnitude,
    retention_horizons,
    spearman,
    state_magnitude,
)
from dasc_jax.published import published_config, published_decay_weights


def test_decay_is_equation_2_in_both_granularities():
    A_log, dt_bias = np.array([0.0, 1.0]), np.array([[0.3, -2.0, 50.0], [0.3, 0.0, -50.0]])
    want = -np.exp(A_log)[:, None] * np.log1p(np.exp(dt_bias - 0.3))
    np.testing.assert_allclose(decay(A_log, dt_bias), want, rtol=1e-14)
    np.testing.assert_allclose(decay(A_log, dt_bias[:, 0]), want[:, 0], rtol=1e-14)


def test_decay_of_float32_weights_is_evaluated_in_float64():
    A_log, dt_bias = np.float32([0.1, 2.3]), np.float32([-7.1, 3.3])
    got = decay(A_log, dt_bias, a=-0.3)
    assert got.dtype == np.float64
    np.testing.assert_array_equal(got, decay(A_log.astype(float), dt_bias.astype(float), a=-0.3))


@pytest.mark.parametrize(
    ("tokens", "alpha"), [(16, 0.6494), (64, 0.8977), (128, 0.9475), (512, 0.9866), (1024, 0.9933)]
)
def test_a_horizon_of_w_tokens_is_the_alpha_that_reaches_eps_after_w(tokens, alpha):
    np.testing.assert_allclose(horizons(np.log([alpha])), tokens, rtol=6e-3)
    np.testing.assert_allclose(horizons(np.array([np.log(1e-3) / tokens])), tokens, rtol=1e-15)


def test_a_lower_gate_input_lengthens_every_horizon():
    A_log, dt_bias = published_decay_weights("qwen3-next-80b")[0]
    assert (horizons(decay(A_log, dt_bias, -0.3)) > horizons(decay(A_log, dt_bias, 0.0))).all()


@pytest.mark.parametrize("value", [0.0, -np.inf, np.nan, 0.5])
def test_degenerate_decay_names_layer_head_and_channel(value):
    g = np.full((3, 4), -1.0)
    g[2, 1] = value
    with pytest.raises(HorizonError, match=r"layer 7, head 2, channel 1: log decay g is"):
        horizons(g, layer=7)
    with pytest.raises(HorizonError, match=r"layer 7, head 1: log decay g is"):
        horizons(g[2], layer=7)


def test_error_counts_the_other_bad_units():
    with pytest.raises(HorizonError, match="and 5 more units"):
        horizons(np.zeros((2, 3)))


@pytest.mark.parametrize("bad", [0.0, np.inf, np.nan, -1.0])
def test_unusable_horizons_are_refused_by_layer_and_unit(bad):
    h = [np.ones(4), np.array([1.0, bad, 1.0, 1.0])]
    with pytest.raises(HorizonError, match="layer 1, head 1: horizon is"):
        check_horizons(h)


def test_layers_of_unequal_or_wrong_shape_are_refused():
    with pytest.raises(HorizonError, match=r"layer 1: horizons of shape \(3,\)"):
        check_horizons([np.ones(4), np.ones(3)])
    with pytest.raises(HorizonError, match="expected"):
        check_horizons([np.ones((2, 2, 2))])
    with pytest.raises(HorizonError, match="no recurrent layer"):
        check_horizons([])


@pytest.mark.parametrize("name", ["kimi-linear-48b", "qwen3-next-80b"])
def test_horizons_of_parameters_and_of_a_model_agree_with_the_equations(name):
    config, weights = published_config(name), published_decay_weights(name)
    params = {}
    for layer, (A_log, dt_bias) in zip(config.recurrent_layers, weights, strict=True):
        params[f"layers.{layer}.mixer.decay.A_log"] = A_log
        params[f"layers.{layer}.mixer.decay.dt_bias"] = dt_bias
    model = types.SimpleNamespace(params=params, config=config)
    for h in (retention_horizons(model), retention_horizons(params, config)):
        assert [x.shape for x in h] == [bias.shape for _, bias in weights]
        for x, (A_log, dt_bias) in zip(h, weights, strict=True):
            np.testing.assert_array_equal(x, np.log(1e-3) / decay(A_log, dt_bias))


def test_parameters_of_another_shape_or_without_a_config_are_refused():
    config = published_config("qwen3-next-80b")
    params = {
        f"layers.{i}.mixer.decay.{n}": np.zeros(31, np.float32)
        for i in config.recurrent_layers
        for n in ("A_log", "dt_bias")
    }
    with pytest.raises(ValueError, match=r"layer 0: A_log \(31,\).*\(32,\)"):
        retention_horizons(params, config)
    with pytest.raises(ValueError, match="need"):
        retention_horizons(params)
    with pytest.raises(KeyError, match="layers.0.mixer.decay.A_log"):
        retention_horizons({}, config)


def test_empirical_horizon_of_a_constant_decay_is_the_static_one_and_pads_do_not_count():
    g = np.tile(np.array([[-0.1, -2.0], [-0.01, -0.5]]), (6, 1, 1))
    np.testing.assert_allclose(empirical_horizons(g), horizons(g[0]))
    padded = np.concatenate([g, np.full((3, 2, 2), np.nan)])
    np.testing.assert_allclose(empirical_horizons(padded, np.arange(9) < 6), horizons(g[0]))
    with pytest.raises(HorizonError, match="without a valid token"):
        empirical_horizons(g, np.zeros(6, bool))


def test_empirical_horizon_averages_log_decay_not_alpha():
    g = np.array([[-1.0], [-3.0]])
    np.testing.assert_allclose(empirical_horizons(g), np.log(1e-3) / -2.0)


def test_state_and_readout_magnitudes_are_the_norms_of_equation_5():
    rng = np.random.default_rng(0)
    S, q = rng.normal(size=(2, 3, 4, 5)), rng.normal(size=(2, 3, 4))
    for b in range(2):
        for head in range(3):
            whole = np.linalg.norm(S[b, head])
            read = np.linalg.norm(S[b, head].T @ q[b, head])
            np.testing.assert_allclose(state_magnitude(S, "gdn")[b, head], whole)
            np.testing.assert_allclose(readout_magnitude(S, q, "gdn")[b, head], read)
            for k in range(4):
                row = np.linalg.norm(S[b, head, k])
                own = np.linalg.norm(S[b, head, k] * q[b, head, k])
                np.testing.assert_allclose(state_magnitude(S, "kda")[b, head, k], row)
                np.testing.assert_allclose(readout_magnitude(S, q, "kda")[b, head, k], own)


@given(
    arrays(np.float64, 12, elements=st.integers(-3, 3).map(float)),
    arrays(np.float64, 12, elements=st.integers(-3, 3).map(float)),
)
def test_spearman_with_ties_agrees_with_scipy(x, y):
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert np.isnan(spearman(x, y))
    else:
        np.testing.assert_allclose(
            spearman(x, y), scipy.stats.spearmanr(x, y).statistic, atol=1e-12
        )


def test_spearman_ranks_all_units_of_two_layers_alike():
    x = np.arange(12.0).reshape(3, 4)
    assert spearman(x, np.exp(x)) == pytest.approx(1)
    assert spearman(x, -(x**3)) == pytest.approx(-1)
    with pytest.raises(ValueError, match="cannot correlate"):
        spearman(x, x[0])
