"""The shape and dtype of every parameter, by path: what an audit holds a checkpoint against.

One flat dictionary keyed by dotted path; linear kernels are `[in, out]`. Parameters that decide
decays or expert choices stay float32 whatever dtype is asked for (`F32` below).
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dasc_jax.config import MLAConfig, ModelConfig

F32 = jnp.float32


def param_specs(config: ModelConfig, dtype: DTypeLike) -> dict[str, jax.ShapeDtypeStruct]:
    """Path -> shape and dtype of all parameters of `config`, in layer order, `dtype` where not
    float32."""
    dim, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple] = {"embed.weight": (vocab, dim)}
    for i, (mixer, ffn) in enumerate(zip(config.layer_kinds, config.ffn_kinds, strict=True)):
        shapes[f"layers.{i}.input_norm.weight"] = (dim,)
        mixers = _delta(config) if mixer == "delta" else _attention(config)
        shapes |= {f"layers.{i}.mixer.{name}": shape for name, shape in mixers.items()}
        shapes[f"layers.{i}.post_norm.weight"] = (dim,)
        blocks = _moe(config) if ffn == "moe" else _dense(config)
        shapes |= {f"layers.{i}.ffn.{name}": shape for name, shape in blocks.items()}
    shapes["norm.weight"] = (dim,)
    if not config.tie_word_embeddings:
        shapes["lm_head.kernel"] = (dim, vocab)
    return {path: _struct(shape, dtype) for path, shape in shapes.items()}


def _struct(shape: tuple, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    if shape[-1] is F32:
        return jax.ShapeDtypeStruct(shape[:-1], F32)
    return jax.ShapeDtypeStruct(shape, dtype)


def _delta(config: ModelConfig) -> dict[str, tuple]:
    delta, dim = config.delta, config.hidden_size
    heads, rank = delta.num_value_heads, delta.gate_rank
    keys, values = delta.num_key_heads * delta.key_dim, heads * delta.value_dim
    shapes = {
        "q_proj.kernel": (dim, keys),
        "k_proj.kernel": (dim, keys),
        "v_proj.kernel": (dim, values),
        "conv.weight": (delta.conv_channels, delta.conv_kernel),
        "b_proj.kernel": (dim, heads),
        "decay.A_log": (heads, F32),
        "o_norm.weight": (delta.value_dim,),
        "o_proj.kernel": (values, dim),
    }
    if delta.kind == "gdn":
        shapes |= {
            "decay.dt_bias": (heads, F32),
            "decay.up.kernel": (dim, heads),
            "gate.up.kernel": (dim, values),
        }
        return shapes
    return shapes | {
        "decay.dt_bias": (heads, delta.key_dim, F32),
        "decay.down.kernel": (dim, rank),
        "decay.up.kernel": (rank, heads * delta.key_dim),
        "gate.down.kernel": (dim, rank),
        "gate.up.kernel": (rank, values),
    }


def _attention(config: ModelConfig) -> dict[str, tuple]:
    attn, dim = config.attention, config.hidden_size
    if isinstance(attn, MLAConfig):
        return {
            "q_proj.kernel": (dim, attn.num_heads * (attn.nope_dim + attn.shared_dim)),
            "kv_a.kernel": (dim, attn.latent_dim + attn.shared_dim),
            "kv_norm.weight": (attn.latent_dim,),
            "k_up": (attn.num_heads, attn.nope_dim, attn.latent_dim),
            "v_up": (attn.num_heads, attn.value_dim, attn.latent_dim),
            "o_proj.kernel": (attn.num_heads * attn.value_dim, dim),
        }
    queries, keys = attn.num_heads * attn.head_dim, attn.num_kv_heads * attn.head_dim
    return {
        "q_proj.kernel": (dim, queries),
        "gate_proj.kernel": (dim, queries),
        "k_proj.kernel": (dim, keys),
        "v_proj.kernel": (dim, keys),
        "q_norm.weight": (attn.head_dim,),
        "k_norm.weight": (attn.head_dim,),
        "o_proj.kernel": (queries, dim),
    }


def _mlp(dim: int, inner: int) -> dict[str, tuple]:
    return {"gate.kernel": (dim, inner), "up.kernel": (dim, inner), "down.kernel": (inner, dim)}


def _dense(config: ModelConfig) -> dict[str, tuple]:
    assert config.dense_intermediate is not None
    return _mlp(config.hidden_size, config.dense_intermediate)


def _moe(config: ModelConfig) -> dict[str, tuple]:
    moe = config.moe
    assert moe is not None
    dim, experts = config.hidden_size, moe.num_experts
    # Kimi routes in float32 with a selection bias, Qwen in the model dtype without one.
    biased = config.family == "kimi_linear"
    shapes = {"router.kernel": (dim, experts, F32) if biased else (dim, experts)}
    if biased:
        shapes["router.bias"] = (experts, F32)
    shapes["experts.gate_up"] = (experts, dim, 2 * moe.intermediate)
    shapes["experts.down"] = (experts, moe.intermediate, dim)
    shared = _mlp(dim, moe.shared_intermediate)
    shapes |= {f"shared.{name}": shape for name, shape in shared.items()}
    if moe.shared_gate:
        shapes["shared_gate.kernel"] = (dim, 1)
    return shapes
