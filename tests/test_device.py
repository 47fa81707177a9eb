"""The same promises on a GPU, where XLA compiles other code: references, exact hits, bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dasc_jax.model import forward
from pallas_kernels.packing import quantize
from tests.engines import GOLDEN, MODELS, distribution, engine, golden_model, prompt, request, run

pytestmark = pytest.mark.device


@pytest.fixture(autouse=True)
def full_float32():
    """Parity in float32 needs it: a GPU multiplies in TF32 unless told otherwise."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("group", ["t3", "t37", "t130"])
def test_logits_and_states_match_the_reference(name, group):
    model, golden = golden_model(name), np.load(GOLDEN / name / "golden.npz")
    logits, cache = forward(model, golden[f"{group}/input_ids"])
    np.testing.assert_allclose(logits, golden[f"{group}/logits"], atol=3e-4)
    for row, layer in enumerate(model.config.recurrent_layers):
        state = golden[f"{group}/prefill/layer{layer}/recurrent_state"]
        np.testing.assert_allclose(cache.recurrent.temporal[row], state, atol=1e-4)
    token = np.asarray(logits)[:, -1].argmax(-1)
    for step in range(8):
        assert (token == golden[f"{group}/greedy_tokens"][:, step]).all()
        logits, cache = forward(model, token[:, None], cache)
        token = np.asarray(logits)[:, 0].argmax(-1)


@pytest.mark.parametrize("name", MODELS)
def test_a_dense_hit_is_the_cold_run_bit_for_bit(name):
    made = engine(name, policy="dense", prefill_tokens=64)
    shared = prompt(128)
    for tail in (1, 2, 15, 16, 17, 63, 64, 65, 130):
        tokens = shared + prompt(tail, seed=tail)
        made.flush_cache()
        cold = run(made, request("cold", tokens))[0]
        made.flush_cache()
        run(made, request("warm", (*shared, 7), max_tokens=1))
        hit = run(made, request("hit", tokens))[0]
        assert (hit.cached_tokens, hit.tokens) == (128, cold.tokens)
        np.testing.assert_array_equal(distribution(hit), distribution(cold))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", ["nr", "wr"])
def test_lossy_hits_stay_finite_and_give_everything_back(name, policy):
    made = engine(name, policy=policy, w_max=64, quantization="int8")
    shared = prompt(192)
    run(made, request("warm", (*shared, 7), max_tokens=1))
    hits = run(made, *[request(f"r{i}", shared + prompt(9, seed=i)) for i in range(4)])
    assert all(hit.cached_tokens == 192 and hit.report.lineage == 1 for hit in hits)
    assert all(np.isfinite(distribution(hit)).all() for hit in hits)


def test_int8_bytes_equal_a_numpy_reference():
    rows = np.random.default_rng(0).standard_normal((4096, 128)).astype(np.float32)
    rows[0], rows[1] = 0.0, 1e-12
    scale = np.maximum(np.abs(rows).max(-1), np.float32(1e-8)) / np.float32(127)
    expected = np.clip(np.rint(rows / scale[:, None]), -127, 127).astype(np.int8)
    packed, scales = jax.jit(quantize)(jnp.asarray(rows))
    np.testing.assert_array_equal(packed, expected)
    # XLA's float32 division on a GPU may miss the nearest value by one place.
    np.testing.assert_array_max_ulp(np.asarray(scales), scale, maxulp=1)
