"""What a model is, and what a prefix cache keeps of it: frozen, hashable host values.

`ModelConfig.from_hf` reads the `config.json` of a released checkpoint (Kimi-Linear or Qwen3-Next)
or of a native Orbax directory. Everything that this library cannot compute is refused here, by name
and value, before any weight is touched.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, Literal

NATIVE_FORMAT = "dasc_jax/1"
"""Value of the key `format` in the `config.json` of a native Orbax directory."""

DTYPES = ("bfloat16", "float32", "float16")


class ConfigError(ValueError):
    """A configuration that is inconsistent or asks for something unsupported; names field and
    value."""


@dataclasses.dataclass(frozen=True)
class DeltaConfig:
    """A linear-attention mixer: KDA (a decay per key channel) or GDN (a decay per value head)."""

    kind: Literal["kda", "gdn"]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int = 4
    gate_rank: int | None = None
    norm_eps: float = 1e-6

    def __post_init__(self):
        _positive(
            self,
            "num_key_heads",
            "num_value_heads",
            "key_dim",
            "value_dim",
            "conv_kernel",
            "norm_eps",
        )
        if self.conv_kernel != 4:
            raise ConfigError(
                f"conv_kernel={self.conv_kernel}: the window is 3 inputs, so the kernel must be 4"
            )
        if self.num_value_heads % self.num_key_heads:
            raise ConfigError(
                f"num_value_heads={self.num_value_heads} is not a multiple of"
                f" num_key_heads={self.num_key_heads}"
            )
        if self.kind == "kda":
            if self.num_key_heads != self.num_value_heads:
                raise ConfigError(
                    f"KDA needs num_key_heads={self.num_key_heads} equal to"
                    f" num_value_heads={self.num_value_heads}"
                )
            _positive(self, "gate_rank")
        elif self.kind == "gdn":
            if self.gate_rank is not None:
                raise ConfigError(f"gate_rank={self.gate_rank}: GDN gates have full rank, use None")
        else:
            raise ConfigError(f"kind={self.kind!r}: expected 'kda' or 'gdn'")

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution, ordered q | k | v."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


@dataclasses.dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention without positions: `shared_dim` is called `qk_rope_head_dim` in
    released configurations, but is never rotated."""

    num_heads: int
    nope_dim: int
    shared_dim: int
    value_dim: int
    latent_dim: int
    latent_norm_eps: float = 1e-6

    def __post_init__(self):
        _positive(self, *(field.name for field in dataclasses.fields(self)))


@dataclasses.dataclass(frozen=True)
class GQAConfig:
    """Gated grouped-query attention with a partial rotary embedding over the first `rope_dim`
    dims."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_dim: int
    rope_theta: float
    norm_eps: float

    def __post_init__(self):
        _positive(self, *(field.name for field in dataclasses.fields(self)))
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.rope_dim % 2 or self.rope_dim > self.head_dim:
            raise ConfigError(
                f"rope_dim={self.rope_dim} must be even and at most head_dim={self.head_dim}"
            )


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """A sparse feed-forward block: routed experts and one shared expert.

    `weights_use_bias` reproduces Kimi-Linear's released remote code, whose routing weights contain
    the selection bias by aliasing; the default is what transformers and vLLM compute.
    """

    num_experts: int
    top_k: int
    intermediate: int
    shared_intermediate: int
    scoring: Literal["sigmoid", "softmax"]
    renormalize: bool
    scaling: float
    groups: int
    top_groups: int
    shared_gate: bool
    weights_use_bias: bool = False

    def __post_init__(self):
        _positive(self, "num_experts", "top_k", "intermediate", "shared_intermediate")
        _positive(self, "scaling", "groups", "top_groups")
        if self.scoring not in ("sigmoid", "softmax"):
            raise ConfigError(f"scoring={self.scoring!r}: expected 'sigmoid' or 'softmax'")
        if self.top_k > self.num_experts:
            raise ConfigError(f"top_k={self.top_k} exceeds num_experts={self.num_experts}")
        if self.num_experts % self.groups or self.top_groups > self.groups:
            raise ConfigError(
                f"groups={self.groups} must divide num_experts={self.num_experts}"
                f" and be at least top_groups={self.top_groups}"
            )
        eligible = self.num_experts // self.groups * self.top_groups
        if self.top_k > eligible:
            raise ConfigError(
                f"top_k={self.top_k} exceeds the {eligible} experts of"
                f" top_groups={self.top_groups} out of groups={self.groups}"
            )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A hybrid model: which mixer and which feed-forward block each layer has, and their sizes."""

    family: Literal["kimi_linear", "qwen3_next"]
    vocab_size: int
    hidden_size: int
    num_layers: int
    layer_kinds: tuple[Literal["delta", "attention"], ...]
    ffn_kinds: tuple[Literal["dense", "moe"], ...]
    norm_eps: float
    zero_centred_norm: bool
    dense_intermediate: int | None
    delta: DeltaConfig
    attention: MLAConfig | GQAConfig
    moe: MoEConfig | None
    dtype: str
    max_context: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    tie_word_embeddings: bool = False

    def __post_init__(self):
        _positive(self, "vocab_size", "hidden_size", "num_layers", "max_context", "norm_eps")
        for name, allowed in (
            ("layer_kinds", ("delta", "attention")),
            ("ffn_kinds", ("dense", "moe")),
        ):
            kinds = getattr(self, name)
            if len(kinds) != self.num_layers:
                raise ConfigError(f"{name} has {len(kinds)} entries, num_layers={self.num_layers}")
            if unknown := set(kinds) - set(allowed):
                raise ConfigError(f"{name} contains {sorted(unknown)}: expected {allowed}")
        if "delta" not in self.layer_kinds:
            raise ConfigError(
                "layer_kinds has no 'delta' layer: not a hybrid linear-attention model"
            )
        if "moe" in self.ffn_kinds and self.moe is None:
            raise ConfigError("ffn_kinds has 'moe' layers but moe is None")
        if "dense" in self.ffn_kinds:
            _positive(self, "dense_intermediate")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r}: expected one of {DTYPES}")
        for name in ("bos_token_id", "pad_token_id", "eos_token_ids"):
            value = getattr(self, name)
            for token in value if isinstance(value, tuple) else (value,):
                if token is not None and not 0 <= token < self.vocab_size:
                    raise ConfigError(f"{name}={token} is outside vocab_size={self.vocab_size}")

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """0-based indices of the linear-attention layers."""
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind == "delta")

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """0-based indices of the full-attention layers."""
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind == "attention")

    @classmethod
    def from_hf(cls, path: str | Path) -> "ModelConfig":
        """Reads `config.json` at `path` (the file, or the directory that holds it).

        The end-of-sequence ids of a `generation_config.json` beside it are merged in. Raises
        FileNotFoundError when there is no configuration, ConfigError when it cannot be honoured.
        """
        path = Path(path)
        file = path / "config.json" if path.is_dir() else path
        values = _read_json(file)
        generation = file.parent / "generation_config.json"
        config = cls.from_dict(values)
        if not generation.is_file() or values.get("format") == NATIVE_FORMAT:
            return config
        extra = _read_json(generation).get("eos_token_id")
        extra = () if extra is None else (extra,) if isinstance(extra, int) else tuple(extra)
        merged = tuple(dict.fromkeys(config.eos_token_ids + extra))
        return dataclasses.replace(config, eos_token_ids=merged)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ModelConfig":
        """A released configuration of either family, or what `to_dict` returned."""
        from dasc_jax import hf_config

        native = values.get("format") == NATIVE_FORMAT
        return hf_config.parse_native(values) if native else hf_config.parse(values)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` gives back an equal configuration."""
        return {"format": NATIVE_FORMAT, **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True)
class DascConfig:
    """Which units of a recurrent state a checkpoint keeps, and how (sections 3.3 to 4.3 of the DASC
    paper).

    `w_max` tokens: a unit whose retention horizon exceeds it is kept, 0 keeps all. `eps` is the
    decay factor that counts as forgotten, `a` the typical gate input at which horizons are
    evaluated. `placement` says which tensor-parallel rank stores what: `off` the units of its own
    heads, `storage` an even share, `hybrid` the same after heads were ordered so that little moves.
    """

    w_max: int = 16
    eps: float = 1e-3
    a: float = -0.3
    policy: Literal["dense", "nr", "wr"] = "nr"
    quantization: Literal["int8"] | None = None
    placement: Literal["off", "storage", "hybrid"] = "hybrid"

    def __post_init__(self):
        if isinstance(self.w_max, bool) or not isinstance(self.w_max, int) or self.w_max < 0:
            raise ConfigError(
                f"w_max={self.w_max!r} must be an integer >= 0 (tokens; 0 keeps every unit)"
            )
        if not 0.0 < self.eps < 1.0:
            raise ConfigError(f"eps={self.eps} must lie strictly between 0 and 1")
        if not math.isfinite(self.a):
            raise ConfigError(f"a={self.a} must be finite")
        choices = {
            "policy": ("dense", "nr", "wr"),
            "quantization": (None, "int8"),
            "placement": ("off", "storage", "hybrid"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected one of {allowed}")


def _positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is None or not math.isfinite(value) or value <= 0:
            raise ConfigError(f"{type(config).__name__}.{name}={value} must be positive")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text())
    except FileNotFoundError:
        raise FileNotFoundError(f"no model configuration at {file}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds a {type(values).__name__}, expected an object")
    return values
