import dataclasses
import json
import math
import shutil
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from dasc_jax.config import ModelConfig
from dasc_jax.weights import WeightError, audit, load_params, param_specs
from dasc_jax.weights.names import pieces
from tests.checkpoints import FAMILIES, ROOT, assert_same, load, rewritten, tensors_of


@pytest.mark.parametrize(
    ("name", "count"),
    [("kimi-linear-48b", 49_122_681_728), ("qwen3-next-80b", 79_674_391_296)],
)
def test_specs_of_the_released_configs_count_the_published_parameters(name, count):
    config = ModelConfig.from_hf(ROOT / "checkpoints" / "configs" / f"{name}.json")
    specs = param_specs(config, "bfloat16")
    assert sum(math.prod(spec.shape) for spec in specs.values()) == count


@pytest.mark.parametrize(
    ("name", "count"), [("kimi-linear-48b", 20_493), ("qwen3-next-80b", 74_391)]
)
def test_the_name_table_covers_the_published_number_of_tensors(name, count):
    config = ModelConfig.from_hf(ROOT / "checkpoints" / "configs" / f"{name}.json")
    table = list(pieces(config, ()))
    shapes = {piece.tensor: piece.shapes[0] for piece in table}
    assert len(shapes) == count
    assert {piece.param for piece in table} == set(param_specs(config, "bfloat16"))
    total = sum(math.prod(spec.shape) for spec in param_specs(config, "bfloat16").values())
    assert sum(map(math.prod, shapes.values())) == total


def test_a_released_checkpoint_loads_into_exactly_the_specified_shapes(released):
    specs = param_specs(ModelConfig.from_hf(released), "float32")
    params = load(released)
    assert list(params) == list(specs)
    for name, spec in specs.items():
        assert (params[name].shape, params[name].dtype) == (spec.shape, spec.dtype), name


def test_kimi_values_land_where_the_equations_expect_them(golden_dir):
    source, params = tensors_of(golden_dir / FAMILIES[0]), load(golden_dir / FAMILIES[0])
    expect = np.testing.assert_array_equal
    attn, mixer = "model.layers.0.self_attn.", "layers.0.mixer."
    expect(params["embed.weight"], source["model.embed_tokens.weight"])
    expect(params["lm_head.kernel"], source["lm_head.weight"].T)
    expect(params[mixer + "q_proj.kernel"], source[attn + "q_proj.weight"].T)
    expect(params[mixer + "decay.up.kernel"], source[attn + "f_b_proj.weight"].T)
    expect(params[mixer + "gate.up.kernel"], source[attn + "g_b_proj.weight"].T)
    conv = np.concatenate([source[f"{attn}{name}_conv1d.weight"][:, 0] for name in "qkv"])
    expect(params[mixer + "conv.weight"], conv)
    expect(params[mixer + "decay.A_log"], source[attn + "A_log"].reshape(-1))
    expect(params[mixer + "decay.dt_bias"][1, 5], source[attn + "dt_bias"][32 + 5])
    # Per head: 16 rows that make keys without position, then 16 that make values.
    up = source["model.layers.3.self_attn.kv_b_proj.weight"]
    expect(params["layers.3.mixer.k_up"][2], up[64:80])
    expect(params["layers.3.mixer.v_up"][2], up[80:96])
    sparse = "model.layers.1.block_sparse_moe."
    gate_up = params["layers.1.ffn.experts.gate_up"]
    expect(gate_up[7, :, :32], source[sparse + "experts.7.w1.weight"].T)
    expect(gate_up[7, :, 32:], source[sparse + "experts.7.w3.weight"].T)
    expect(params["layers.1.ffn.experts.down"][7], source[sparse + "experts.7.w2.weight"].T)
    expect(params["layers.1.ffn.router.bias"], source[sparse + "gate.e_score_correction_bias"])


def test_interleaved_qwen_projections_are_taken_apart_by_key_head(golden_dir):
    """2 key heads serve 2 value heads each, all 32 wide: row groups of q 32, k 32, v 64, z 64."""
    source, params = tensors_of(golden_dir / FAMILIES[1]), load(golden_dir / FAMILIES[1])
    expect = np.testing.assert_array_equal
    groups = source["model.layers.0.linear_attn.in_proj_qkvz.weight"].reshape(2, 192, 64)
    mixer = "layers.0.mixer."
    bounds = {"q_proj": (0, 32), "k_proj": (32, 64), "v_proj": (64, 128), "gate.up": (128, 192)}
    for name, (start, stop) in bounds.items():
        rows = np.concatenate([groups[0, start:stop], groups[1, start:stop]])
        expect(params[f"{mixer}{name}.kernel"], rows.T)
    pairs = source["model.layers.0.linear_attn.in_proj_ba.weight"]
    expect(params[mixer + "b_proj.kernel"], pairs[[0, 1, 4, 5]].T)
    expect(params[mixer + "decay.up.kernel"], pairs[[2, 3, 6, 7]].T)
    heads = source["model.layers.3.self_attn.q_proj.weight"].reshape(4, 64, 64)
    expect(params["layers.3.mixer.q_proj.kernel"], heads[:, :32].reshape(128, 64).T)
    expect(params["layers.3.mixer.gate_proj.kernel"], heads[:, 32:].reshape(128, 64).T)
    expect(
        params["layers.0.ffn.shared_gate.kernel"],
        source["model.layers.0.mlp.shared_expert_gate.weight"].T,
    )


def test_bfloat16_keeps_the_float32_parameters_exact(released):
    exact, rounded = load(released), load(released, "bfloat16")
    kept = {name for name, value in rounded.items() if value.dtype == jnp.float32}
    assert any(name.endswith("decay.A_log") for name in kept)
    assert any(name.endswith("decay.dt_bias") for name in kept)
    kimi = ModelConfig.from_hf(released).family == "kimi_linear"
    assert any(name.endswith("router.bias") for name in kept) == kimi
    assert any(name.endswith("router.kernel") for name in kept) == kimi
    for name, value in rounded.items():
        expected = exact[name] if name in kept else exact[name].astype(jnp.bfloat16)
        np.testing.assert_array_equal(np.asarray(value), np.asarray(expected), name)


def test_all_that_is_wrong_is_listed_in_one_error(released, tmp_path):
    tensors = tensors_of(released)
    dropped = "model.layers.3.self_attn.o_proj.weight"
    del tensors[dropped]
    tensors["model.final_norm.weight"] = tensors.pop("model.norm.weight")
    tensors["model.layers.9.input_layernorm.weight"] = np.zeros(64, np.float32)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:, :32]
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].astype(np.int32)
    path = rewritten(released, tmp_path / "broken", tensors)
    with pytest.raises(WeightError) as caught:
        load(path)
    error = caught.value
    assert set(error.missing) == {dropped, "model.norm.weight"}
    assert set(error.extra) == {"model.final_norm.weight", "model.layers.9.input_layernorm.weight"}
    assert any("lm_head.weight [256, 32] instead of [256, 64]" in text for text in error.misshapen)
    assert any("model.embed_tokens.weight of type I32" in text for text in error.misshapen)
    for name in (*error.missing, *error.extra, *error.misshapen):
        assert name in str(error)


def test_multi_token_prediction_tensors_are_skipped_and_named(released, tmp_path):
    tensors = tensors_of(released) | {"mtp.norm.weight": np.ones(64, np.float32)}
    path = rewritten(released, tmp_path / "mtp", tensors)
    without = {name: value for name, value in tensors.items() if not name.startswith("mtp.")}
    assert_same(load(path), load(rewritten(released, tmp_path / "without", without)))
    skipped = audit(path, ModelConfig.from_hf(path), "float32").skipped
    assert set(skipped) == tensors.keys() - without.keys()


def stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same checkpoint with the experts of a layer in two tensors."""
    tensors = dict(tensors)
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts."
        old = next(
            (n for n in tensors if n.startswith(f"model.layers.{layer}.") and ".0.w1" in n), ""
        )
        there = old.removesuffix("0.w1.weight") or prefix
        names = ("w1", "w3", "w2") if old else ("gate_proj", "up_proj", "down_proj")
        if f"{there}0.{names[0]}.weight" not in tensors:
            continue
        gate, up, down = (
            np.stack([tensors.pop(f"{there}{expert}.{name}.weight") for expert in range(16)])
            for name in names
        )
        tensors[prefix + "gate_up_proj"] = np.concatenate([gate, up], axis=1)
        tensors[prefix + "down_proj"] = down
    return tensors


def test_stacked_and_per_expert_checkpoints_give_identical_trees(released, tmp_path):
    tensors = stacked(tensors_of(released))
    assert not any(".experts.0." in name for name in tensors if not name.startswith("mtp."))
    assert_same(load(rewritten(released, tmp_path / "stacked", tensors)), load(released))


def test_spellings_of_resaved_kimi_checkpoints_load_alike(golden_dir, tmp_path):
    source = golden_dir / FAMILIES[0]
    tensors = {
        name.replace("layers.0.mlp.", "layers.0.block_sparse_moe."): value.reshape(-1)
        if name.endswith("A_log")
        else value
        for name, value in tensors_of(source).items()
    }
    assert any("layers.0.block_sparse_moe.gate_proj" in name for name in tensors)
    assert_same(load(rewritten(source, tmp_path / "resaved", tensors)), load(source))


def test_bfloat16_decay_parameters_are_upcast(released, tmp_path):
    tensors = tensors_of(released)
    for name in tensors:
        if name.endswith(("A_log", "dt_bias", "e_score_correction_bias")):
            tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)
    params = load(rewritten(released, tmp_path / "low", tensors), "bfloat16")
    assert params["layers.0.mixer.decay.A_log"].dtype == jnp.float32
    low = [name for name in tensors if name.endswith("layers.0.self_attn.A_log")] or [
        "model.layers.0.linear_attn.A_log"
    ]
    expected = tensors[low[0]].astype(np.float32).reshape(-1)
    np.testing.assert_array_equal(params["layers.0.mixer.decay.A_log"], expected)


def sharded(source: Path, target: Path) -> Path:
    """The checkpoint in two shards, the tensors of each layer spread over both, and an index."""
    tensors = tensors_of(source)
    target.mkdir()
    shutil.copy(source / "config.json", target)
    placed = {}
    for part in (0, 1):
        file = f"model-0000{part + 1}-of-00002.safetensors"
        names = sorted(tensors)[part::2]
        save_file({name: tensors[name] for name in names}, target / file)
        placed |= dict.fromkeys(names, file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return target


def test_shards_with_an_index_load_like_a_single_file(released, tmp_path):
    path = sharded(released, tmp_path / "sharded")
    assert_same(load(path), load(released))
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(WeightError, match="model-00002-of-00002"):
        load(path)


def test_a_truncated_file_is_refused_before_loading(released, tmp_path):
    path = rewritten(released, tmp_path / "cut", tensors_of(released))
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(content[:-100])
    with pytest.raises(WeightError, match=f"truncated: {len(content) - 100} bytes"):
        load(path)


def test_a_directory_without_weights_is_refused(released, tmp_path):
    shutil.copy(released / "config.json", tmp_path)
    with pytest.raises(WeightError, match=r"neither .*safetensors nor a native"):
        load(tmp_path)


def test_tied_embeddings_have_no_head(released, tmp_path):
    config = dataclasses.replace(ModelConfig.from_hf(released), tie_word_embeddings=True)
    assert "lm_head.kernel" not in param_specs(config, "float32")
    params = load_params(released, config, "float32")
    assert list(params) == list(param_specs(config, "float32"))
