"""What a step has to move and to compute, and models cut short."""

import math
from dataclasses import replace

import numpy as np

from dasc_jax.config import MLAConfig, ModelConfig
from dasc_jax.models import abstract_params
from pallas_kernels.bench.timing import floor_ms


def step_bytes(config: ModelConfig, batch: int, context: int) -> float:
    """Bytes a decode step has to move: weights read once, states read and written, pages read."""
    pages = len(config.attention_layers) * context * _row_bytes(config)
    return _weight_bytes(config, batch) + batch * (2 * _state_bytes(config) + pages)


def prefill_floor_ms(config: ModelConfig, requests: int, tokens: int) -> float:
    """Least milliseconds on an H200 of a prefill of `requests` prompts of `tokens` from nothing:
    the time of its FLOP or of its bytes, whichever is longer."""
    pages = len(config.attention_layers) * tokens * _row_bytes(config)
    written = requests * (_state_bytes(config) + pages)
    moved = _weight_bytes(config, requests * tokens) + written
    return floor_ms(moved, prefill_flop(config, requests, tokens))


def prefill_flop(config: ModelConfig, requests: int, tokens: int) -> float:
    """FLOP of the matrix products of a prefill, two a multiplication.

    Every weight once a token, experts as chosen, the head once a request; causal attention over
    expanded keys and values; the delta rule as a recurrence: decay, read, write and output.
    """
    total = 0.0
    head = "embed.weight" if config.tie_word_embeddings else "lm_head.kernel"
    for path, spec in abstract_params(config, config.dtype).items():
        share = 1.0
        if ".experts." in path and config.moe is not None:
            share = config.moe.top_k / config.moe.num_experts
        if path == head:
            share = 1.0 / tokens
        elif path == "embed.weight":
            share = 0.0
        total += 2.0 * share * math.prod(spec.shape)
    d, a = config.delta, config.attention
    total += 8.0 * len(config.recurrent_layers) * d.num_value_heads * d.key_dim * d.value_dim
    widths = a.nope_dim + a.shared_dim + a.value_dim if isinstance(a, MLAConfig) else 2 * a.head_dim
    seen = (tokens + 1) / 2
    total += 2.0 * len(config.attention_layers) * a.num_heads * widths * seen
    return requests * tokens * total


def _weight_bytes(config: ModelConfig, tokens: int) -> float:
    """Bytes of the weights that `tokens` tokens read, once each.

    Of the experts, those that they choose if every choice is equally likely.
    """
    touched = 1.0
    if config.moe is not None:
        touched = 1.0 - (1.0 - config.moe.top_k / config.moe.num_experts) ** tokens
    total = 0.0
    for path, spec in abstract_params(config, config.dtype).items():
        size = math.prod(spec.shape) * spec.dtype.itemsize
        if path == "embed.weight" and not config.tie_word_embeddings:
            size = tokens * config.hidden_size * spec.dtype.itemsize
        total += size * touched if ".experts." in path else size
    return total


def _state_bytes(config: ModelConfig) -> int:
    d = config.delta
    return 4 * len(config.recurrent_layers) * d.num_value_heads * d.key_dim * d.value_dim


def _row_bytes(config: ModelConfig) -> int:
    """Bytes of a token in the pages of an attention layer."""
    a = config.attention
    row = (
        a.latent_dim + a.shared_dim if isinstance(a, MLAConfig) else 2 * a.num_kv_heads * a.head_dim
    )
    return row * np.dtype(np.float16).itemsize


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
