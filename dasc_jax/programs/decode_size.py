"""What a decode step has to move, and models cut short."""

import math
from dataclasses import replace

import numpy as np

from dasc_jax.config import MLAConfig, ModelConfig
from dasc_jax.models import abstract_params


def step_bytes(config: ModelConfig, batch: int, context: int) -> float:
    """Bytes a decode step has to move: weights read once, states read and written, pages read.

    Of the experts, those that `batch` tokens choose if every choice is equally likely.
    """
    touched = 1.0
    if config.moe is not None:
        touched = 1.0 - (1.0 - config.moe.top_k / config.moe.num_experts) ** batch
    total = 0.0
    for path, spec in abstract_params(config, config.dtype).items():
        size = math.prod(spec.shape) * spec.dtype.itemsize
        if path == "embed.weight" and not config.tie_word_embeddings:
            size = batch * config.hidden_size * spec.dtype.itemsize
        total += size * touched if ".experts." in path else size
    d, a = config.delta, config.attention
    state = 4 * d.num_value_heads * d.key_dim * d.value_dim
    row = (
        a.latent_dim + a.shared_dim if isinstance(a, MLAConfig) else 2 * a.num_kv_heads * a.head_dim
    )
    pages = len(config.attention_layers) * context * row * np.dtype(np.float16).itemsize
    return total + batch * (2 * len(config.recurrent_layers) * state + pages)


def shortened(config: ModelConfig, layers: int | None) -> ModelConfig:
    """The model with only its first layers.

    Raises:
        ConfigError: they do not make a model.
    """
    if layers is None:
        return config
    return replace(
        config,
        num_layers=layers,
        layer_kinds=config.layer_kinds[:layers],
        ffn_kinds=config.ffn_kinds[:layers],
    )
