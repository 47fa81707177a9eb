"""The two demo models: every feature of the released architectures, some six million parameters."""

import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp

from dasc_jax.config import DeltaConfig, GQAConfig, MLAConfig, ModelConfig, MoEConfig
from dasc_jax.model import random_model
from dasc_jax.training.bpe import END_OF_TEXT, END_OF_TURN

VOCABULARY = 2048
CONTEXT = 4352
"""Tokens: the longest training rows plus room for an answer."""

KIMI = "kimi-linear-mini"
QWEN = "qwen3-next-mini"
MINIS = (KIMI, QWEN)

INTO_STREAM = re.compile(r"(mixer\.o_proj|ffn(\.shared)?\.down)\.kernel$|experts\.down$")

HYBRID = ("delta", "delta", "delta", "attention") * 2


def mini_config(name: str) -> ModelConfig:
    """The configuration of a mini by its name. Raises ValueError for another name."""
    if name not in MINIS:
        raise ValueError(f"unknown mini {name!r}; there are {', '.join(MINIS)}")
    kimi = name == KIMI
    config = ModelConfig(
        family="kimi_linear",
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_layers=len(HYBRID),
        layer_kinds=HYBRID,
        ffn_kinds=("dense", "moe", "moe", "moe", "moe", "moe", "moe", "moe"),
        norm_eps=1e-5,
        zero_centred_norm=False,
        dense_intermediate=512,
        delta=DeltaConfig("kda", 4, 4, 64, 64, gate_rank=64, norm_eps=1e-5),
        attention=MLAConfig(4, nope_dim=64, shared_dim=32, value_dim=64, latent_dim=96),
        moe=MoEConfig(
            num_experts=8,
            top_k=2,
            intermediate=56,
            shared_intermediate=56,
            scoring="sigmoid",
            renormalize=True,
            scaling=1.0,
            groups=1,
            top_groups=1,
            shared_gate=False,
        ),
        dtype="bfloat16",
        max_context=CONTEXT,
        bos_token_id=None,
        eos_token_ids=(END_OF_TEXT, END_OF_TURN),
        pad_token_id=END_OF_TEXT,
    )
    return config if kimi else _as_qwen(config)


def _as_qwen(config: ModelConfig) -> ModelConfig:
    assert config.moe is not None
    return replace(
        config,
        family="qwen3_next",
        ffn_kinds=("moe",) * len(HYBRID),
        norm_eps=1e-6,
        zero_centred_norm=True,
        dense_intermediate=None,
        delta=DeltaConfig("gdn", 2, 4, 64, 64, gate_rank=None, norm_eps=1e-6),
        attention=GQAConfig(4, 2, head_dim=64, rope_dim=16, rope_theta=1e5, norm_eps=1e-6),
        moe=replace(config.moe, scoring="softmax", shared_gate=True),
    )


def initial_params(config: ModelConfig, seed: int) -> dict[str, jax.Array]:
    """float32 parameters to train from: fan-in scaled, small embeddings, and projections into the
    residual stream divided by sqrt(2 layers). Horizons are spread from 3 to 3,000 tokens."""
    params = random_model(config, "float32", seed).params
    depth = math.sqrt(2 * config.num_layers)

    def start(name: str, value: jax.Array) -> jax.Array:
        if name == "embed.weight":
            return 0.02 * value
        if name.endswith("router.bias"):
            return jnp.zeros_like(value)
        return value / depth if INTO_STREAM.search(name) else value

    return {name: start(name, value) for name, value in params.items()}
