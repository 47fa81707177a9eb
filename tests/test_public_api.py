"""The public names do what the readme shows, called as it shows them."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import dasc_jax as dj
from dasc_jax.weights import save_native
from tests.checkpoints import ROOT
from tests.engines import GOLDEN, MODELS, golden_model, prompt

DENSE = dj.DascConfig(policy="dense")
both = pytest.mark.parametrize("name", MODELS)


def test_every_public_name_exists():
    assert all(hasattr(dj, name) for name in dj.__all__)
    assert sorted(dj.__all__) == dj.__all__


@both
def test_models_load_from_released_and_native_directories(name, tmp_path):
    model = dj.load_model(GOLDEN / name)
    assert (model.dtype, model.tokenizer, model.mesh) == ("bfloat16", None, None)
    save_native(tmp_path / "native", model.config, dict(model.params))
    native = dj.load_model(str(tmp_path / "native"), dtype="bfloat16", mesh=None)
    assert native.config == model.config and native.params.keys() == model.params.keys()
    jax.tree.map(np.testing.assert_array_equal, dict(native.params), dict(model.params))


def test_a_mesh_holds_the_weights():
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    model = dj.load_model(GOLDEN / MODELS[0], dtype="float32", mesh=mesh)
    assert model.mesh is mesh
    assert all(value.sharding.mesh == mesh for value in model.params.values())


@both
def test_forward_goes_on_from_a_cache(name):
    model = golden_model(name)
    tokens = np.array([prompt(37), prompt(37, seed=1)], np.int32)
    cache = dj.init_state(model, 2)
    logits, cache = dj.forward(model, tokens, cache, lengths=np.array([37, 20]))
    assert (logits.shape, logits.dtype) == ((2, 37, 256), np.float32)
    logits, cache = dj.forward(model, tokens[:, :1], cache=cache)
    assert logits.shape == (2, 1, 256) and cache.lengths.tolist() == [38, 21]


@both
def test_a_plan_goes_from_horizons_to_disk_and_back(name, tmp_path):
    model = golden_model(name)
    h = dj.retention_horizons(model)
    d = model.config.delta
    shape = (d.num_value_heads, d.key_dim) if d.kind == "kda" else (d.num_value_heads,)
    assert [x.shape for x in h] == [shape] * len(model.config.recurrent_layers)
    w_max = int(np.median(np.concatenate([x.reshape(-1) for x in h])))
    plan = dj.make_plan(h, w_max=w_max)
    assert all((m == (x > w_max)).all() for m, x in zip(plan.retained, h, strict=True))
    control = dj.random_plan(h, w_max, 1234)
    assert control.counts == plan.counts and control.id != plan.id
    plan.save(tmp_path / "plan.npz")
    again = dj.load_plan(tmp_path / "plan.npz")
    assert (again, again.id, again.window) == (plan, plan.id, plan.window)


@pytest.mark.parametrize("profile", ["kimi-linear-48b", "qwen3-next-80b"])
def test_published_profiles_are_planned_and_accounted(profile):
    cfg, h = dj.published_profile(profile)
    plan = dj.make_plan(h, w_max=16)
    acc = dj.account(cfg, plan, tp=8, placement="hybrid", quantization=None)
    dense = dj.account(cfg, dj.make_plan(h, w_max=0), tp=8)
    assert acc.c_temp > 1 and 1 < acc.c_ckpt < acc.c_temp
    assert dense.c_ckpt == dense.c_temp == 1
    assert acc.bytes_per_slot < dense.bytes_per_slot
    budget = 8 << 30
    assert acc.slots(budget) == budget // acc.bytes_per_slot - 1 > dense.slots(budget)


@both
def test_states_pack_and_unpack(name):
    model = golden_model(name)
    _, cache = dj.forward(model, np.array([prompt(37), prompt(37, seed=1)], np.int32))
    h = dj.retention_horizons(model)
    exact = dj.make_plan(h, w_max=0)
    state = dj.unpack(exact, dj.pack(exact, cache))
    jax.tree.map(np.testing.assert_array_equal, state, cache.recurrent)
    bare = dj.pack(exact, state)
    jax.tree.map(np.testing.assert_array_equal, bare, dj.pack(exact, cache))
    w_max = int(np.median(np.concatenate([x.reshape(-1) for x in h])))
    lossy = dj.make_plan(h, w_max=w_max)
    state = dj.unpack(lossy, dj.pack(lossy, cache))
    key_dim = model.config.delta.key_dim
    for layer, temporal in enumerate(state.temporal):
        kept = lossy.mask(layer, key_dim)[..., None]
        expected = np.where(kept, cache.recurrent.temporal[layer], 0)
        np.testing.assert_array_equal(temporal, expected)
    np.testing.assert_array_equal(state.conv, cache.recurrent.conv)


def test_an_engine_generates_without_a_server():
    """Bare token ids; the second turn finds the first one's page and checkpoint."""
    model = golden_model(MODELS[0])
    sizes = dj.EngineConfig(dasc=DENSE, max_context=192, max_running=1, prefill_tokens=64)
    engine = dj.Engine(model, sizes)
    shared = list(prompt(100))
    (cold,) = engine.generate([shared])
    assert (cold.cached_tokens, cold.finish_reason) == (0, "length")
    assert cold.ttft > 0 and cold.latency >= cold.ttft and cold.prompt_tokens == 100
    again = dj.Request("again", tuple(shared), dj.SamplingParams(max_tokens=4))
    hit, other = engine.generate([again, list(prompt(9, seed=2))], dj.SamplingParams(max_tokens=2))
    assert hit.cached_tokens == 64 and len(other.tokens) == 2
    assert hit.tokens == cold.tokens[:4]
    assert hit.reason == hit.report.reason != cold.reason


IMPORTED = """
import sys
import dasc_jax as dj
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "import initialised a backend"
import numpy as np
model = dj.load_model(sys.argv[1], dtype="float32")
logits, _ = dj.forward(model, np.array([[5]]))
assert logits.shape == (1, 1, 256)
loaded = {name.split(".")[0] for name in sys.modules}
assert not loaded & {"torch", "tensorflow", "triton"}, loaded
"""


def test_import_touches_no_device_and_running_needs_no_torch():
    command = [sys.executable, "-c", IMPORTED, str(GOLDEN / MODELS[0])]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
