import dataclasses
import json
from pathlib import Path

import pytest
from jaxtyping import TypeCheckError

from dasc_jax.config import ConfigError, DascConfig, GQAConfig, MLAConfig, ModelConfig

ROOT = Path(__file__).resolve().parent.parent
KIMI = ROOT / "checkpoints" / "configs" / "kimi-linear-48b.json"
QWEN = ROOT / "checkpoints" / "configs" / "qwen3-next-80b.json"


def released(file: Path, **changes) -> dict:
    """A released configuration with some values changed; `...` removes the key."""
    values = json.loads(file.read_text())
    for name, value in changes.items():
        if value is ...:
            values.pop(name, None)
        else:
            values[name] = value
    return values


def kimi_layers(kda: list[int], full: list[int]) -> dict:
    values = released(KIMI)
    values["linear_attn_config"] |= {"kda_layers": kda, "full_attn_layers": full}
    return values


def test_released_kimi_config_has_the_published_numbers():
    config = ModelConfig.from_hf(KIMI)
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (163840, 2304, 27)
    assert config.attention_layers == (3, 7, 11, 15, 19, 23, 26)
    assert len(config.recurrent_layers) == 20
    assert config.ffn_kinds == ("dense",) + ("moe",) * 26
    assert config.attention == MLAConfig(32, 128, 64, 128, 512, latent_norm_eps=1e-6)
    delta = config.delta
    assert (delta.kind, delta.num_key_heads, delta.num_value_heads) == ("kda", 32, 32)
    assert (delta.key_dim, delta.value_dim, delta.gate_rank, delta.norm_eps) == (
        128,
        128,
        128,
        1e-5,
    )
    assert delta.conv_channels == 12288
    moe = config.moe
    assert (moe.num_experts, moe.top_k, moe.intermediate) == (256, 8, 1024)
    assert (moe.scoring, moe.scaling, moe.renormalize) == ("sigmoid", 2.446, True)
    assert (moe.shared_gate, moe.weights_use_bias, moe.groups) == (False, False, 1)
    assert config.max_context == 1048576
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (
        163584,
        (163586,),
        163839,
    )


def test_released_qwen_config_has_the_published_numbers():
    config = ModelConfig.from_hf(QWEN)
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (151936, 2048, 48)
    assert config.attention_layers == tuple(range(3, 48, 4))
    assert config.ffn_kinds == ("moe",) * 48
    assert config.attention == GQAConfig(16, 2, 256, 64, 1e7, 1e-6)
    delta = config.delta
    assert (delta.kind, delta.num_key_heads, delta.num_value_heads) == ("gdn", 16, 32)
    assert (delta.gate_rank, delta.conv_channels) == (None, 8192)
    moe = config.moe
    assert (moe.num_experts, moe.top_k, moe.intermediate) == (512, 10, 512)
    assert (moe.scoring, moe.scaling, moe.shared_gate) == ("softmax", 1.0, True)
    assert config.zero_centred_norm and config.dense_intermediate is None
    assert (config.eos_token_ids, config.pad_token_id) == ((151645,), None)


@pytest.mark.parametrize("file", [KIMI, QWEN])
def test_native_form_round_trips_through_json(file):
    config = ModelConfig.from_hf(file)
    again = ModelConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert hash(again) == hash(config)


@pytest.mark.parametrize("key", ["hidden_size", "rms_norm_eps", "num_hidden_layers"])
@pytest.mark.parametrize("file", [KIMI, QWEN])
def test_a_missing_field_is_named(file, key):
    with pytest.raises(ConfigError, match=key):
        ModelConfig.from_dict(released(file, **{key: ...}))


ONE_BASED = [i for i in range(1, 28) if i not in (4, 8, 12, 16, 20, 24, 27)]


@pytest.mark.parametrize(
    ("kda", "full", "message"),
    [
        pytest.param(
            [i - 1 for i in ONE_BASED],
            [3, 7, 11, 15, 19, 23, 26],
            r"kda_layers has 0, outside 1\.\.27",
            id="zero_based",
        ),
        pytest.param(ONE_BASED, [4, 8, 12, 16, 20, 24], r"layers \[27\] are in neither", id="gap"),
        pytest.param(
            ONE_BASED, [3, 4, 8, 12, 16, 20, 24, 27], "full_attn_layers repeats 3", id="overlap"
        ),
        pytest.param(
            ONE_BASED, [4, 8, 12, 16, 20, 24, 27, 28], "full_attn_layers has 28", id="out_of_range"
        ),
    ],
)
def test_kimi_layer_lists_must_partition_one_to_l(kda, full, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(kimi_layers(kda, full))


def test_top_level_head_dim_of_kimi_is_ignored():
    assert ModelConfig.from_dict(released(KIMI, head_dim=7)) == ModelConfig.from_hf(KIMI)


def test_layer_types_and_interval_of_qwen_agree():
    types = ["linear_attention"] * 3 + ["full_attention"]
    explicit = released(QWEN, layer_types=types * 12, full_attention_interval=...)
    assert ModelConfig.from_dict(explicit) == ModelConfig.from_hf(QWEN)
    with pytest.raises(ConfigError, match="layer_types has 4 entries, num_hidden_layers=48"):
        ModelConfig.from_dict(released(QWEN, layer_types=types))
    with pytest.raises(ConfigError, match="sliding_attention"):
        ModelConfig.from_dict(released(QWEN, layer_types=["sliding_attention"] * 48))


def test_new_and_old_key_generations_give_the_same_config():
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    new = released(
        QWEN,
        rope_parameters=rope,
        rope_theta=...,
        partial_rotary_factor=...,
        rope_scaling=...,
        torch_dtype=...,
        dtype="bfloat16",
    )
    assert ModelConfig.from_dict(new) == ModelConfig.from_hf(QWEN)


def test_dense_layers_follow_the_sparsity_fields():
    kimi = ModelConfig.from_dict(released(KIMI, first_k_dense_replace=2, moe_layer_freq=2))
    assert kimi.ffn_kinds[:5] == ("dense", "dense", "moe", "dense", "moe")
    qwen = ModelConfig.from_dict(released(QWEN, decoder_sparse_step=2, mlp_only_layers=[3]))
    assert qwen.ffn_kinds[:6] == ("dense", "moe", "dense", "dense", "dense", "moe")
    assert qwen.dense_intermediate == 5120


@pytest.mark.parametrize(
    ("file", "field", "value"),
    [
        (KIMI, "q_lora_rank", 1536),
        (KIMI, "mla_use_nope", False),
        (KIMI, "rope_scaling", {"type": "yarn"}),
        (KIMI, "hidden_act", "gelu"),
        (KIMI, "moe_router_activation_func", "softmax"),
        (KIMI, "num_nextn_predict_layers", 1),
        (KIMI, "num_shared_experts", 0),
        (KIMI, "quantization_config", {"bits": 4}),
        (QWEN, "attention_bias", True),
        (QWEN, "hidden_act", "gelu"),
        (QWEN, "rope_scaling", {"type": "yarn"}),
        (QWEN, "use_sliding_window", True),
        (QWEN, "linear_conv_kernel_dim", 3),
        (QWEN, "torch_dtype", "int8"),
    ],
)
def test_an_unsupported_feature_is_refused_by_name_and_value(file, field, value):
    name = {"linear_conv_kernel_dim": "conv_kernel", "torch_dtype": "dtype"}.get(field, field)
    with pytest.raises(ConfigError, match=name) as caught:
        ModelConfig.from_dict(released(file, **{field: value}))
    assert str(value) in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "bailing_hybrid", "architectures": ["BailingMoeV2_5ForCausalLM"]},
        {"architectures": ["KimiK3ForCausalLM"]},
        {"model_type": "qwen3_next"},
        {"model_type": ..., "architectures": ...},
    ],
)
def test_the_family_is_taken_from_names_not_from_keys(changes):
    with pytest.raises(ConfigError, match="architecture|model_type"):
        ModelConfig.from_dict(released(KIMI, **changes))


def test_eos_ids_are_merged_from_the_generation_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(released(QWEN)))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [151645, 151643]}')
    assert ModelConfig.from_hf(tmp_path).eos_token_ids == (151645, 151643)
    assert ModelConfig.from_hf(QWEN).eos_token_ids == (151645,)
    many = ModelConfig.from_dict(released(QWEN, eos_token_id=[3, 1]))
    assert many.eos_token_ids == (3, 1)


@pytest.mark.parametrize(("text", "error"), [("{", ConfigError), ("[]", ConfigError)])
def test_an_unreadable_config_is_a_clear_error(tmp_path, text, error):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(error, match=r"config\.json"):
        ModelConfig.from_hf(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"w_max": -1},
        {"eps": 0.0},
        {"eps": 1.0},
        {"a": float("nan")},
        {"a": float("inf")},
        {"policy": "lazy"},
        {"quantization": "int4"},
    ],
)
def test_a_bad_dasc_config_is_refused_by_field(changes):
    # Under test, jaxtyping sees a value outside a Literal before the constructor does.
    with pytest.raises((ConfigError, TypeCheckError), match=next(iter(changes))):
        DascConfig(**changes)


def test_dasc_config_defaults_are_those_of_the_paper():
    config = DascConfig()
    assert (config.w_max, config.eps, config.a, config.policy) == (16, 1e-3, -0.3, "nr")
    assert dataclasses.replace(config, w_max=0).w_max == 0
