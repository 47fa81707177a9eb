"""A loaded model, and what a notebook does with it: run it over tokens, continue, generate.

model = load_model(path)
logits, cache = forward(model, tokens)
logits, cache = forward(model, more_tokens, cache)
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float32, Int

from dasc_jax import checkpoint_state
from dasc_jax.checkpoint_state import Packed
from dasc_jax.config import ModelConfig
from dasc_jax.engine.request import SamplingParams
from dasc_jax.engine.sampling import sample, sampling_batch
from dasc_jax.models import Params, State, abstract_params, functions, init_pages
from dasc_jax.models.batch import DecodeBatch, PrefillBatch
from dasc_jax.models.packing import SLOT, ZERO, PrefillBucket, Segment, pack_segments
from dasc_jax.plan import SelectionPlan
from dasc_jax.tokenizer import load_tokenizer
from dasc_jax.types import PAGE, AttentionPages, RecurrentState
from dasc_jax.weights import load_params


@dataclass(frozen=True)
class Model:
    """Weights and what is needed to read them. `params` is a flat dict keyed by dotted path."""

    config: ModelConfig
    params: Params
    tokenizer: Any | None
    dtype: str
    mesh: Mesh | None = None


@dataclass(frozen=True)
class Cache:
    """Everything a model remembers of `B` sequences; a value, so an old one stays usable.

    `state` has `B + 1` recurrent slots and pages in row-major order behind the sink; `lengths [B]`
    counts the tokens seen. `recurrent` is the state without the sink: `[L, B, ...]`.
    """

    state: State
    lengths: np.ndarray

    @property
    def recurrent(self) -> RecurrentState:
        """The recurrent state of the `B` sequences."""
        temporal, conv = self.state.recurrent
        return RecurrentState(temporal[:, 1:], conv[:, 1:])

    @property
    def pages_each(self) -> int:
        """Pages every sequence has room in."""
        return (self.state.pages.arrays[0].shape[1] - 1) // len(self.lengths)


def load_model(path: str | Path, dtype: str = "bfloat16", mesh: Mesh | None = None) -> Model:
    """Load an HF directory (safetensors) or a native Orbax directory.

    Args:
        path: the directory, with its `config.json`.
        dtype: the model dtype; decay parameters and Kimi's router stay float32.
        mesh: replicate over this mesh; None is the default device.

    Raises:
        ConfigError, WeightError: what is unsupported, missing, extra or misshapen, all of it
            listed.
    """
    config = ModelConfig.from_hf(path)
    return Model(
        config, load_params(path, config, dtype, mesh=mesh), load_tokenizer(path), dtype, mesh
    )


def random_model(config: ModelConfig, dtype: str = "bfloat16", seed: int = 0) -> Model:
    """A model with random weights of the right scale and a wide spread of retention horizons."""
    specs = abstract_params(config, dtype)
    keys = jax.random.split(jax.random.key(seed), len(specs))
    params = {
        path: _initial(path, spec, key)
        for (path, spec), key in zip(specs.items(), keys, strict=True)
    }
    if config.zero_centred_norm:
        centred = [
            p for p in params if p.endswith(("_norm.weight", "norm.weight")) and ".o_norm" not in p
        ]
        params |= {p: jnp.zeros_like(params[p]) for p in centred}
    return Model(config, params, None, dtype)


def _initial(path: str, spec: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
    """Norms 1, horizons log-uniform over about 1 to 3,000 tokens, the rest fan-in scaled."""
    if path.endswith("norm.weight"):
        return jnp.ones(spec.shape, spec.dtype)
    if path.endswith("A_log"):
        rate = jax.random.uniform(key, spec.shape, minval=0.5, maxval=2.0)
        return jnp.log(rate).astype(spec.dtype)
    if path.endswith("dt_bias"):
        low, high = math.log(2e-3), math.log(3.0)
        step = jnp.exp(jax.random.uniform(key, spec.shape, minval=low, maxval=high))
        return (step + jnp.log(-jnp.expm1(-step))).astype(spec.dtype)
    if path.endswith("router.bias"):
        return (0.01 * jax.random.normal(key, spec.shape)).astype(spec.dtype)
    fan_in = spec.shape[-1] if path.endswith(("k_up", "v_up", "conv.weight")) else spec.shape[-2]
    scale = 1.0 if path == "embed.weight" else fan_in**-0.5
    return (scale * jax.random.normal(key, spec.shape)).astype(spec.dtype)


def init_recurrent(config: ModelConfig, slots: int, dtype: str) -> RecurrentState:
    """Zeroed recurrent states of `slots` slots (slot 0 included)."""
    d = config.delta
    lead = (len(config.recurrent_layers), slots)
    temporal = jnp.zeros((*lead, d.num_value_heads, d.key_dim, d.value_dim), jnp.float32)
    return RecurrentState(temporal, jnp.zeros((*lead, d.conv_channels, 3), dtype))


def init_state(model: Model, batch: int) -> Cache:
    """An empty cache for `batch` sequences; it grows by pages as `forward` needs."""
    if batch < 1:
        raise ValueError(f"batch is {batch}; it must be at least 1")
    state = State(
        init_recurrent(model.config, batch + 1, model.dtype),
        init_pages(model.config, batch + 1, jnp.dtype(model.dtype)),
    )
    return Cache(state, np.zeros(batch, np.int64))


def _grown(cache: Cache, tokens: int) -> Cache:
    """Room for `tokens` tokens a sequence, in powers of two of pages so that few shapes compile."""
    need, have, batch = -(-tokens // PAGE), cache.pages_each, len(cache.lengths)
    if need <= have:
        return cache
    each = 1 << (need - 1).bit_length()

    def grow(pages: jax.Array) -> jax.Array:
        rows = pages[:, 1:].reshape(pages.shape[0], batch, have, *pages.shape[2:])
        pad = [(0, 0)] * rows.ndim
        pad[2] = (0, each - have)
        rows = jnp.pad(rows, pad).reshape(pages.shape[0], batch * each, *pages.shape[2:])
        return jnp.concatenate([pages[:, :1], rows], axis=1)

    pages = AttentionPages(tuple(grow(a) for a in cache.state.pages.arrays))
    return replace(cache, state=State(cache.state.recurrent, pages))


def pack(
    plan: SelectionPlan,
    state: RecurrentState | Cache,
    *,
    quantization: Literal["int8"] | None = None,
) -> Packed:
    """The checkpoints of the sequences of a cache, or of a bare recurrent state `[L, B, ...]`.

    See `dasc_jax.checkpoint_state.pack`.
    """
    recurrent = state.recurrent if isinstance(state, Cache) else state
    return checkpoint_state.pack(plan, recurrent, quantization=quantization)


@lru_cache(maxsize=16)
def _jitted(config: ModelConfig, dtype: str) -> tuple[Any, Any]:
    model = functions(config, dtype)
    return jax.jit(model.prefill), jax.jit(model.decode)


def forward(
    model: Model,
    tokens: Int[Any, "B T"],
    cache: Cache | None = None,
    lengths: Int[Any, "B"] | None = None,
) -> tuple[Float32[Array, "B T vocab"], Cache]:
    """Logits at every position, and the cache that continues behind the last real token.

    Args:
        tokens: int `[B, T]`, right-padded.
        cache: where to continue from; None starts anew.
        lengths: real tokens of each row, 0..T; None means all T. Logits of padding are unspecified.

    Raises:
        ValueError: shapes that do not fit, a token outside the vocabulary, a sequence past the
            context.
    """
    tokens = np.asarray(tokens, np.int32)
    if tokens.ndim != 2 or tokens.shape[1] == 0:
        raise ValueError(f"tokens has shape {tokens.shape}; it must be [B, T] with T >= 1")
    batch, width = tokens.shape
    lengths = np.full(batch, width) if lengths is None else np.asarray(lengths)
    cache = init_state(model, batch) if cache is None else cache
    _check_forward(model, tokens, cache, lengths)
    cache = _grown(cache, int((cache.lengths + lengths).max()))
    prefill, decode = _jitted(model.config, model.dtype)
    if width == 1 and (lengths == 1).all():
        state, logits = decode(model.params, cache.state, _decode_batch(cache, tokens[:, 0]))
        return logits[:, None], Cache(state, cache.lengths + 1)
    packed = _prefill_batch(model, cache, tokens, lengths)
    state, out = prefill(model.params, cache.state, packed)
    logits = out.logits.reshape(batch, width, -1)
    return logits, Cache(state, cache.lengths + lengths)


def _check_forward(model: Model, tokens: np.ndarray, cache: Cache, lengths: np.ndarray) -> None:
    batch, width = tokens.shape
    if len(cache.lengths) != batch or lengths.shape != (batch,):
        raise ValueError(
            f"{batch} rows of tokens, {lengths.shape} lengths,"
            f" a cache of {len(cache.lengths)} sequences"
        )
    if (lengths < 0).any() or (lengths > width).any():
        raise ValueError(f"lengths {lengths.tolist()} must lie in 0..{width}")
    if tokens.min() < 0 or tokens.max() >= model.config.vocab_size:
        raise ValueError(
            f"token ids span {tokens.min()}..{tokens.max()};"
            f" the vocabulary has {model.config.vocab_size}"
        )
    longest = int((cache.lengths + lengths).max())
    if longest > model.config.max_context:
        raise ValueError(f"{longest} tokens exceed the context of {model.config.max_context}")


def _pages_of(cache: Cache, row: int) -> list[int]:
    each = cache.pages_each
    return list(range(1 + row * each, 1 + (row + 1) * each))


def _decode_batch(cache: Cache, tokens: np.ndarray) -> DecodeBatch:
    batch = len(tokens)
    table = np.array([_pages_of(cache, b) for b in range(batch)], np.int32)
    slots = np.arange(1, batch + 1, dtype=np.int32)
    return DecodeBatch(tokens, cache.lengths.astype(np.int32), slots, table)


def _prefill_batch(
    model: Model, cache: Cache, tokens: np.ndarray, lengths: np.ndarray
) -> PrefillBatch:
    batch, width = tokens.shape
    segments = [
        Segment(
            tokens[b, : lengths[b]],
            int(cache.lengths[b]),
            _pages_of(cache, b),
            b + 1,
            b + 1,
            SLOT if cache.lengths[b] else ZERO,
        )
        for b in range(batch)
    ]
    starts = np.concatenate([[0], np.cumsum(lengths)])[:batch]
    inside = np.minimum(np.arange(width)[None], np.maximum(lengths[:, None] - 1, 0))
    rows = (starts[:, None] + inside).reshape(-1)
    padded = -(-batch * width // PAGE) * PAGE
    rows = np.minimum(rows, padded - 1)
    d = model.config.delta
    keep = np.ones((len(model.config.recurrent_layers), d.num_value_heads, d.key_dim), bool)
    bucket = PrefillBucket(padded, batch, 0, cache.pages_each, batch * width)
    return pack_segments(segments, [], rows.tolist(), keep, bucket)


def generate(
    model: Model,
    prompt_ids: Any,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[int]:
    """Continue one prompt (token ids) by up to `max_new_tokens`; stops behind an eos token.

    Raises:
        ValueError: an empty prompt, bad sampling values, or a prompt past the context.
    """
    params = SamplingParams(max_tokens=max_new_tokens, temperature=temperature, seed=seed)
    prompt = np.asarray(prompt_ids, np.int32).reshape(1, -1)
    if prompt.shape[1] == 0:
        raise ValueError("the prompt is empty; it must have at least 1 token")
    total, limit = prompt.shape[1] + max_new_tokens, model.config.max_context
    if total > limit:
        raise ValueError(
            f"{prompt.shape[1]} prompt tokens and {max_new_tokens} new ones make {total};"
            f" the context is {limit}"
        )
    logits, cache = forward(model, prompt)
    out: list[int] = []
    while True:
        position = int(cache.lengths[0])
        chosen = sample(logits[:, -1], sampling_batch([params], [position], 1))
        out.append(int(chosen[0]))
        if len(out) == max_new_tokens or out[-1] in model.config.eos_token_ids:
            return out
        logits, cache = forward(model, np.array([[out[-1]]]), cache)
