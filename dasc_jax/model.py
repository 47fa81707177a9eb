"""A loaded model, and what a notebook does with it: run it over tokens, continue, generate.

model = load_model(path)
logits, cache = forward(model, tokens)
logits, cache = forward(model, more_tokens, cache)
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float32, Int

from dasc_jax import checkpoint_state
from dasc_jax.checkpoint_state import Packed
from dasc_jax.config import ModelConfig
from dasc_jax.engine.request import SamplingParams
from dasc_jax.engine.sampling import sample, sampling_batch
from dasc_jax.head_order import HeadOrder
from dasc_jax.models import Params, State, abstract_params, init_pages, serving_functions
from dasc_jax.models.batch import DecodeBatch, PrefillBatch
from dasc_jax.models.packing import SLOT, ZERO, PrefillBucket, Segment, pack_segments
from dasc_jax.parallel import STATE_SPEC, rank_count, split_ranks, tensor_mesh
from dasc_jax.plan import SelectionPlan
from dasc_jax.tokenizer import load_tokenizer
from dasc_jax.types import PAGE, AttentionPages, RecurrentState
from dasc_jax.weights import load_params
from dasc_jax.weights.permute import permute, shard_params
from dasc_jax.weights.random import random_params


@dataclass(frozen=True)
class Model:
    """Weights and what is needed to read them. `params` is a flat dict keyed by dotted path.

    On a `mesh` they lie as `dasc_jax.parallel` cuts a model over its ranks, heads in this `order`.
    """

    config: ModelConfig
    params: Params
    tokenizer: Any | None
    dtype: str
    mesh: Mesh | None = None
    order: HeadOrder | None = None


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


def load_model(
    path: str | Path,
    dtype: str = "bfloat16",
    mesh: Mesh | None = None,
    order: HeadOrder | None = None,
) -> Model:
    """Load an HF directory (safetensors) or a native Orbax directory.

    Args:
        path: the directory, with its `config.json`.
        dtype: the model dtype; decay parameters and Kimi's router stay float32.
        mesh: cut the model over the axis `tp` of this mesh; None is the default device.
        order: put the head bundles of recurrent layers, decays and states included, in this order.

    Raises:
        ConfigError, WeightError: what is unsupported, missing, extra or misshapen, all of it
            listed; ranks that do not divide it.
        ValueError: an order of other layers or heads.
    """
    config, mesh = ModelConfig.from_hf(path), mesh and tensor_mesh(mesh)
    params = load_params(path, config, dtype, mesh, orders=order and order.bundles)
    return Model(config, params, load_tokenizer(path), dtype, mesh, order)


def random_model(
    config: ModelConfig, dtype: str = "bfloat16", seed: int = 0, mesh: Mesh | None = None
) -> Model:
    """A model with random weights of the right scale and a wide spread of retention horizons."""
    params = random_params(abstract_params(config, dtype), seed, config.zero_centred_norm)
    whole = Model(config, params, None, dtype)
    return whole if mesh is None else shard_model(whole, mesh)


def shard_model(model: Model, mesh: Mesh, order: HeadOrder | None = None) -> Model:
    """A model of one device, cut over the ranks of a mesh; see `load_model`.

    Raises ValueError for a model that is cut or ordered already, and what `load_model` raises.
    """
    if model.mesh is not None or model.order is not None:
        raise ValueError("the model is cut over ranks or its heads are ordered already")
    mesh = tensor_mesh(mesh)
    params = shard_params(model.params, model.config, mesh, order and order.bundles)
    return replace(model, params=params, mesh=mesh, order=order)


def order_heads(model: Model, order: HeadOrder) -> Model:
    """A model in the released order with its heads in another, on the ranks it lies on.

    Raises ValueError for a model whose heads are ordered already, or an order of other layers.
    """
    if model.order is not None:
        raise ValueError("the model's heads are ordered already")
    params = permute(model.params, model.config, order.bundles, rank_count(model.mesh))
    return replace(model, params=params, order=order)


def init_recurrent(
    config: ModelConfig, slots: int, dtype: str, mesh: Mesh | None = None
) -> RecurrentState:
    """Zeroed recurrent states of `slots` slots (slot 0 included).

    On a mesh both arrays are split: by head, and by channel in the order of
    `dasc_jax.weights.permute.channel_order`.
    """
    d, device = config.delta, mesh and NamedSharding(mesh, STATE_SPEC)
    lead = (len(config.recurrent_layers), slots)
    shape = (*lead, d.num_value_heads, d.key_dim, d.value_dim)
    return RecurrentState(
        jnp.zeros(shape, jnp.float32, device=device),
        jnp.zeros((*lead, d.conv_channels, 3), dtype, device=device),
    )


def init_state(model: Model, batch: int) -> Cache:
    """An empty cache for `batch` sequences; it grows by pages as `forward` needs."""
    if batch < 1:
        raise ValueError(f"batch is {batch}; it must be at least 1")
    state = State(
        init_recurrent(model.config, batch + 1, model.dtype, model.mesh),
        init_pages(model.config, batch + 1, jnp.dtype(model.dtype), model.mesh),
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
    """`checkpoint_state.pack` of a cache's sequences, or of a recurrent state `[L, B, ...]`.

    Raises ValueError for a state that lies over ranks.
    """
    recurrent = state.recurrent if isinstance(state, Cache) else state
    if (ranks := split_ranks(recurrent.temporal)) > 1:
        raise ValueError(
            f"the state lies over {ranks} ranks, in an order of their own:"
            " dasc_jax.checkpoint_shards packs such states"
        )
    return checkpoint_state.pack(plan, recurrent, quantization=quantization)


@lru_cache(maxsize=16)
def _jitted(config: ModelConfig, dtype: str, mesh: Mesh | None = None) -> tuple[Any, Any]:
    model = serving_functions(config, dtype, mesh)
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
    prefill, decode = _jitted(model.config, model.dtype, model.mesh)
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
