"""Choosing tokens on the device: greedy, temperature, top-k, top-p, one random stream a request.

A request's draw depends on its seed and the position it fills only, so it is the same whatever else
is in the batch and however often the engine was restarted.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32, UInt32

from dasc_jax.engine.request import MOST_PROMPT_LOGPROBS, SamplingParams
from dasc_jax.types import AnyArray


class SamplingBatch(NamedTuple):
    """`SamplingParams` of a batch as arrays. `top_k` 0 and `top_p` 1 keep the whole vocabulary."""

    temperature: Float32[AnyArray, "B"]
    top_p: Float32[AnyArray, "B"]
    top_k: Int32[AnyArray, "B"]
    seed: UInt32[AnyArray, "B 2"]
    position: Int32[AnyArray, "B"]


class Sampled(NamedTuple):
    """Chosen tokens and what they were chosen from."""

    tokens: Int32[Array, "B"]
    logits: Float32[Array, "B vocab"]


class Scores(NamedTuple):
    """Log-probabilities of given tokens, and of the most likely ones at the same rows."""

    chosen: Float32[AnyArray, "R"]
    top: Float32[AnyArray, "R k"]
    top_tokens: Int32[AnyArray, "R k"]


def sampling_batch(
    params: Sequence[SamplingParams], positions: Sequence[int], rows: int
) -> SamplingBatch:
    """Host arrays padded to `rows`; `positions` are those the new tokens will have."""
    batch = SamplingBatch(
        np.zeros(rows, np.float32),
        np.ones(rows, np.float32),
        np.zeros(rows, np.int32),
        np.zeros((rows, 2), np.uint32),
        np.zeros(rows, np.int32),
    )
    for row, (p, position) in enumerate(zip(params, positions, strict=True)):
        batch.temperature[row], batch.top_p[row], batch.top_k[row] = p.temperature, p.top_p, p.top_k
        batch.seed[row] = p.seed & 0xFFFFFFFF, p.seed >> 32
        batch.position[row] = position
    return batch


def _restrict(scaled: Float32[Array, "B vocab"], batch: SamplingBatch) -> Float32[Array, "B vocab"]:
    """Drop what top-k and top-p exclude; the most likely token always stays."""
    ordered = jnp.sort(scaled, axis=-1, descending=True)
    vocab = scaled.shape[-1]
    top_k = jnp.where(batch.top_k > 0, jnp.minimum(batch.top_k, vocab), vocab)
    kth = jnp.take_along_axis(ordered, top_k[:, None] - 1, axis=-1)
    ordered = jnp.where(ordered >= kth, ordered, -jnp.inf)
    probability = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    # A top_p of 1 drops nothing, however the sum rounds: a draw depends on no other row's limits.
    top_p = jnp.where(batch.top_p < 1.0, batch.top_p, jnp.inf)
    top_p = jnp.maximum(top_p, jnp.finfo(jnp.float32).tiny)[:, None]
    kept = jnp.where((before < top_p) & jnp.isfinite(ordered), ordered, jnp.inf)
    lowest = jnp.min(kept, axis=-1, keepdims=True)
    return jnp.where(scaled >= lowest, scaled, -jnp.inf)


def greedy(logits: Float32[Array, "B vocab"]) -> Int32[Array, "B"]:
    """The most likely token of each row."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def sample(logits: Float32[Array, "B vocab"], batch: SamplingBatch) -> Int32[Array, "B"]:
    """One token a row. Rows with temperature 0 take the most likely one, as `greedy` does."""
    scaled = logits / jnp.maximum(batch.temperature, 1e-6)[:, None]
    limited = jnp.any((batch.top_k > 0) | (batch.top_p < 1.0))
    scaled = jax.lax.cond(limited, lambda s: _restrict(s, batch), lambda s: s, scaled)

    def noise(seed: AnyArray, position: AnyArray) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed[0]), seed[1]), position)
        return jax.random.gumbel(key, scaled.shape[-1:], jnp.float32)

    drawn = jnp.argmax(scaled + jax.vmap(noise)(batch.seed, batch.position), axis=-1)
    return jnp.where(batch.temperature > 0, drawn.astype(jnp.int32), greedy(logits))


def log_probabilities(logits: Float32[Array, "B vocab"]) -> Float32[Array, "B vocab"]:
    """Of the unmodified distribution."""
    return jax.nn.log_softmax(logits, axis=-1)


def score(logits: Float32[Array, "R vocab"], targets: Int32[Array, "R"]) -> Scores:
    """Log-probability of one given token a row, and the row's most likely tokens, best first."""
    logprobs = log_probabilities(logits)
    chosen = jnp.take_along_axis(logprobs, targets[:, None], axis=-1)[:, 0]
    top, tokens = jax.lax.top_k(logprobs, min(MOST_PROMPT_LOGPROBS, logits.shape[-1]))
    return Scores(chosen, top, tokens.astype(jnp.int32))
