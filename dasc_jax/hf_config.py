"""Released `config.json` files to `ModelConfig`: Kimi-Linear and Qwen3-Next, both key
generations."""

from collections.abc import Iterable
from typing import Any, Literal

from dasc_jax.config import (
    NATIVE_FORMAT,
    ConfigError,
    DeltaConfig,
    GQAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
)


def parse(values: dict[str, Any]) -> ModelConfig:
    """The configuration of a released checkpoint. Raises ConfigError naming every offending
    field."""
    family = _family(values)
    _refuse(values, "quantization_config", None)
    _refuse(values, "hidden_act", "silu")
    _refuse(values, "attention_bias", False)
    return {"kimi_linear": _kimi, "qwen3_next": _qwen}[family](values)


def parse_native(values: dict[str, Any]) -> ModelConfig:
    """The configuration that `ModelConfig.to_dict` wrote."""
    values = {key: value for key, value in values.items() if key != "format"}
    try:
        attention = MLAConfig if values["family"] == "kimi_linear" else GQAConfig
        nested = {
            "delta": DeltaConfig(**values["delta"]),
            "attention": attention(**values["attention"]),
            "moe": MoEConfig(**values["moe"]) if values["moe"] is not None else None,
        }
        for name in ("layer_kinds", "ffn_kinds", "eos_token_ids"):
            nested[name] = tuple(values[name])
        return ModelConfig(**{**values, **nested})
    except (KeyError, TypeError) as error:
        raise ConfigError(f"not a complete {NATIVE_FORMAT} configuration: {error}") from None


_ARCHITECTURES = {"KimiLinearForCausalLM": "kimi_linear", "Qwen3NextForCausalLM": "qwen3_next"}


def _family(values: dict[str, Any]) -> Literal["kimi_linear", "qwen3_next"]:
    # Key presence cannot tell families apart (several ship linear_attn_config), only the names do.
    model_type = values.get("model_type")
    names = values.get("architectures") or []
    known = f"supported: {', '.join(f'{a} ({t})' for a, t in _ARCHITECTURES.items())}"
    for name in names:
        if name not in _ARCHITECTURES:
            raise ConfigError(f"unknown architecture {name!r} (model_type {model_type!r}); {known}")
        if model_type is not None and _ARCHITECTURES[name] != model_type:
            raise ConfigError(f"architecture {name!r} contradicts model_type {model_type!r}")
    family = _ARCHITECTURES[names[0]] if model_type is None and names else model_type
    if family == "kimi_linear":
        return "kimi_linear"
    if family == "qwen3_next":
        return "qwen3_next"
    raise ConfigError(f"unknown model_type {family!r}; {known}")


def _kimi(values: dict[str, Any]) -> ModelConfig:
    _refuse(values, "q_lora_rank", None)
    _refuse(values, "mla_use_nope", True, required=True)
    _refuse(values, "rope_scaling", None)
    _refuse(values, "num_nextn_predict_layers", 0)
    linear, layers = _get(values, "linear_attn_config"), _get(values, "num_hidden_layers")
    delta = DeltaConfig(
        kind="kda",
        num_key_heads=_get(linear, "num_heads", "linear_attn_config."),
        num_value_heads=linear["num_heads"],
        key_dim=_get(linear, "head_dim", "linear_attn_config."),
        value_dim=linear["head_dim"],
        conv_kernel=linear.get("short_conv_kernel_size", 4),
        gate_rank=linear["head_dim"],
        norm_eps=_get(values, "rms_norm_eps"),
    )
    attention = MLAConfig(
        num_heads=_get(values, "num_attention_heads"),
        nope_dim=_get(values, "qk_nope_head_dim"),
        shared_dim=_get(values, "qk_rope_head_dim"),
        value_dim=_get(values, "v_head_dim"),
        latent_dim=_get(values, "kv_lora_rank"),
    )
    first, freq = values.get("first_k_dense_replace", 0), values.get("moe_layer_freq", 1)
    sparse = bool(values.get("num_experts"))
    if freq < 1:
        raise ConfigError(f"moe_layer_freq={freq} must be at least 1")
    return _model(
        "kimi_linear",
        values,
        layer_kinds=_kimi_layers(linear, layers),
        ffn_kinds=(
            "moe" if sparse and i >= first and i % freq == 0 else "dense" for i in range(layers)
        ),
        delta=delta,
        attention=attention,
        moe=_kimi_moe(values) if sparse else None,
        max_context=values.get("model_max_length") or values.get("max_position_embeddings"),
    )


def _kimi_layers(linear: dict[str, Any], layers: int) -> tuple[str, ...]:
    """Layer kinds from the two 1-based lists, which must partition 1..layers."""
    kinds: dict[int, str] = {}
    problems = []
    for field, kind in (("kda_layers", "delta"), ("full_attn_layers", "attention")):
        for number in _get(linear, field, "linear_attn_config."):
            if not 1 <= number <= layers:
                problems.append(
                    f"{field} has {number}, outside 1..{layers} (the lists are 1-based)"
                )
            elif number in kinds:
                problems.append(f"{field} repeats {number}, already a {kinds[number]} layer")
            else:
                kinds[number] = kind
    if missing := sorted(set(range(1, layers + 1)) - kinds.keys()):
        problems.append(f"layers {missing} are in neither kda_layers nor full_attn_layers")
    if problems:
        raise ConfigError(
            f"linear_attn_config.kda_layers and full_attn_layers must partition 1..{layers}"
            f" (num_hidden_layers): {'; '.join(problems)}"
        )
    return tuple(kinds[number] for number in range(1, layers + 1))


def _kimi_moe(values: dict[str, Any]) -> MoEConfig:
    _refuse(values, "moe_router_activation_func", "sigmoid")
    shared = values.get("num_shared_experts") or 0
    if shared < 1:
        raise ConfigError(f"num_shared_experts={shared}: a shared expert is required")
    grouped = values.get("use_grouped_topk", True)
    return MoEConfig(
        num_experts=values["num_experts"],
        top_k=_get(values, "num_experts_per_token"),
        intermediate=_get(values, "moe_intermediate_size"),
        shared_intermediate=values["moe_intermediate_size"] * shared,
        scoring="sigmoid",
        renormalize=_get(values, "moe_renormalize"),
        scaling=_get(values, "routed_scaling_factor"),
        groups=values.get("num_expert_group", 1) if grouped else 1,
        top_groups=values.get("topk_group", 1) if grouped else 1,
        shared_gate=False,
        weights_use_bias=values.get("router_weights_use_bias", False),
    )


def _qwen(values: dict[str, Any]) -> ModelConfig:
    _refuse(values, "use_sliding_window", False)
    layers = _get(values, "num_hidden_layers")
    delta = DeltaConfig(
        kind="gdn",
        num_key_heads=_get(values, "linear_num_key_heads"),
        num_value_heads=_get(values, "linear_num_value_heads"),
        key_dim=_get(values, "linear_key_head_dim"),
        value_dim=_get(values, "linear_value_head_dim"),
        conv_kernel=values.get("linear_conv_kernel_dim", 4),
        norm_eps=_get(values, "rms_norm_eps"),
    )
    sparse, step = bool(values.get("num_experts")), values.get("decoder_sparse_step", 1)
    dense = frozenset(values.get("mlp_only_layers") or ())
    if step < 1 or not dense <= frozenset(range(layers)):
        raise ConfigError(
            f"decoder_sparse_step={step} must be at least 1 and mlp_only_layers={sorted(dense)}"
            f" inside 0..{layers - 1}"
        )
    return _model(
        "qwen3_next",
        values,
        layer_kinds=_qwen_layers(values, layers),
        ffn_kinds=(
            "moe" if sparse and i not in dense and (i + 1) % step == 0 else "dense"
            for i in range(layers)
        ),
        delta=delta,
        attention=_qwen_attention(values),
        moe=_qwen_moe(values) if sparse else None,
        max_context=_get(values, "max_position_embeddings"),
    )


def _qwen_layers(values: dict[str, Any], layers: int) -> tuple[str, ...]:
    types = values.get("layer_types")
    if types is None:
        interval = values.get("full_attention_interval", 4)
        if interval < 1:
            raise ConfigError(f"full_attention_interval={interval} must be at least 1")
        return tuple("delta" if (i + 1) % interval else "attention" for i in range(layers))
    kinds = {"linear_attention": "delta", "full_attention": "attention"}
    if len(types) != layers:
        raise ConfigError(f"layer_types has {len(types)} entries, num_hidden_layers={layers}")
    if unknown := sorted(set(types) - kinds.keys()):
        raise ConfigError(f"layer_types contains {unknown}: expected {sorted(kinds)}")
    return tuple(kinds[name] for name in types)


def _qwen_attention(values: dict[str, Any]) -> GQAConfig:
    # transformers 5 folds the old top-level rope keys into rope_parameters.
    rope = {**values, **(values.get("rope_parameters") or {})}
    _refuse(values, "rope_scaling", None)
    _refuse(rope, "rope_type", "default", label="rope_parameters.rope_type")
    heads = _get(values, "num_attention_heads")
    head_dim = values.get("head_dim") or _get(values, "hidden_size") // heads
    return GQAConfig(
        num_heads=heads,
        num_kv_heads=_get(values, "num_key_value_heads"),
        head_dim=head_dim,
        rope_dim=int(head_dim * rope.get("partial_rotary_factor", 0.25)),
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        norm_eps=_get(values, "rms_norm_eps"),
    )


def _qwen_moe(values: dict[str, Any]) -> MoEConfig:
    return MoEConfig(
        num_experts=values["num_experts"],
        top_k=_get(values, "num_experts_per_tok"),
        intermediate=_get(values, "moe_intermediate_size"),
        shared_intermediate=_get(values, "shared_expert_intermediate_size"),
        scoring="softmax",
        renormalize=_get(values, "norm_topk_prob"),
        scaling=1.0,
        groups=1,
        top_groups=1,
        shared_gate=True,
    )


def _model(
    family: Literal["kimi_linear", "qwen3_next"],
    values: dict[str, Any],
    *,
    ffn_kinds: Iterable[Literal["dense", "moe"]],
    max_context: int | None,
    **parts: Any,
) -> ModelConfig:
    eos = values.get("eos_token_id")
    ffn_kinds = tuple(ffn_kinds)
    if not max_context:
        raise ConfigError("config.json lacks model_max_length / max_position_embeddings")
    return ModelConfig(
        family=family,
        vocab_size=_get(values, "vocab_size"),
        hidden_size=_get(values, "hidden_size"),
        num_layers=values["num_hidden_layers"],
        ffn_kinds=ffn_kinds,
        norm_eps=_get(values, "rms_norm_eps"),
        zero_centred_norm=family == "qwen3_next",
        dense_intermediate=_get(values, "intermediate_size") if "dense" in ffn_kinds else None,
        dtype=str(values.get("dtype") or values.get("torch_dtype") or "bfloat16").removeprefix(
            "torch."
        ),
        max_context=max_context,
        bos_token_id=values.get("bos_token_id"),
        eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        pad_token_id=values.get("pad_token_id"),
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
        **parts,
    )


def _get(values: dict[str, Any], name: str, prefix: str = "") -> Any:
    if values.get(name) is None:
        raise ConfigError(f"config.json lacks {prefix}{name}")
    return values[name]


def _refuse(
    values: dict[str, Any], name: str, supported: Any, *, required: bool = False, label: str = ""
) -> None:
    if required and name not in values:
        raise ConfigError(f"config.json lacks {label or name}, only {supported!r} is supported")
    value = values.get(name, supported)
    if value != supported and not (value is None and not required):
        raise ConfigError(f"{label or name}={value!r} is not supported, only {supported!r}")
