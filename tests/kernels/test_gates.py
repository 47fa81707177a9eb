"""Gates and normalisation against their golden values, and at the ends of their range."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk

GOLDEN = np.load(Path(__file__).parent.parent / "golden" / "ops_misc.npz")


def golden(*names):
    return tuple(jnp.asarray(GOLDEN[name], jnp.float32) for name in names)


def test_golden_kda_gate():
    raw, A_log, dt_bias = golden("kda_gate/f", "kda_gate/A_log", "kda_gate/dt_bias")
    g = pk.kda_gate(raw, A_log.reshape(-1), dt_bias.reshape(raw.shape[-2:]))
    np.testing.assert_allclose(g, GOLDEN["kda_gate/g"], rtol=1e-6, atol=1e-7)


def test_golden_gdn_gate():
    g = pk.gdn_gate(*golden("gdn_gate/a", "gdn_gate/A_log", "gdn_gate/dt_bias"))
    np.testing.assert_allclose(g, GOLDEN["gdn_gate/g"], rtol=1e-6, atol=1e-7)


def test_golden_l2norm():
    np.testing.assert_allclose(
        pk.l2norm(*golden("l2norm/x")), GOLDEN["l2norm/y"], rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("raw", [-1e30, -100.0, 0.0, 19.999, 20.001, 1e4])
def test_gates_and_their_gradients_are_finite_and_never_grow_the_state(raw):
    def gate(x):
        return pk.gdn_gate(x[None], jnp.zeros(1), jnp.zeros(1))[0]

    value, slope = jax.value_and_grad(gate)(jnp.float32(raw))
    assert np.isfinite(value) and value <= 0
    np.testing.assert_allclose(value, -np.logaddexp(0.0, raw), rtol=1e-6, atol=1e-40)
    np.testing.assert_allclose(slope, -1 / (1 + np.exp(min(-raw, 700))), rtol=1e-5, atol=1e-30)


def test_a_zero_vector_stays_zero_under_l2norm():
    assert not np.asarray(pk.l2norm(jnp.zeros((2, 8), jnp.bfloat16))).any()
