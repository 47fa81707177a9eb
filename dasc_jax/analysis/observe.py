"""What the recurrent layers do with a prefix: decays, final state and final query (section 3.4).

The model's own modules run, unchanged; while the pass is traced, every recurrent mixer is given a
`prefill` that notes what the paper's hooks note before it does what it always does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Float64

from dasc_jax.config import ModelConfig
from dasc_jax.model import Model, init_recurrent
from dasc_jax.models import Params, PrefillBatch, PrefillOut, State, init_pages, merge
from dasc_jax.models.delta import DeltaMixer
from dasc_jax.models.packing import SLOT, ZERO, PrefillBucket, Segment, pack_segments
from dasc_jax.types import PAGE, RecurrentState
from pallas_kernels import l2norm, short_conv

CHUNK = 512
"""Tokens of a pass: longer prefixes take several, so that one compiled step serves any length."""


@dataclass(frozen=True)
class Observed:
    """One prefix as its L recurrent layers saw it, on the host.

    `log_decay` is the mean over the tokens, `[L, H]` (GDN) or `[L, H, K]` (KDA); `temporal` the
    state behind the last token; `query` what the last token reads it with, normalised and scaled,
    one a value head; `logits` those of the next token.
    """

    log_decay: Float64[np.ndarray, "L H *K"]
    temporal: Float32[np.ndarray, "L H K V"]
    query: Float32[np.ndarray, "L H K"]
    logits: Float32[np.ndarray, "vocab"]
    tokens: int


class Seen(NamedTuple):
    """What one pass shows of one layer: log decays summed over its tokens, and its last query."""

    log_decay: Float32[Array, "H *K"]
    query: Float32[Array, "H K"]


def observe(model: Model, prefix: Sequence[int], room: int | None = None) -> Observed:
    """Run the model over one prefix and note what its recurrent layers do.

    Args:
        prefix: token ids.
        room: tokens that the cache is made for, at least the prefix's; prefixes of several lengths
            share a compiled step when they share it. None: just enough.

    Raises:
        ValueError: an empty prefix, or one past `room` or past the model's context; a model on a
            mesh, or with its heads in another order.
    """
    if model.mesh is not None or model.order is not None:
        raise ValueError("observe takes a model on one device, its heads as released")
    tokens = np.asarray(prefix, np.int32)
    room = len(tokens) if room is None else room
    limit = min(room, model.config.max_context)
    if not 0 < len(tokens) <= limit:
        raise ValueError(f"a prefix of {len(tokens)} tokens; it must have 1 to {limit}")
    pages = -(-room // PAGE)
    dtype = jnp.dtype(model.dtype)
    state = State(
        init_recurrent(model.config, 2, model.dtype), init_pages(model.config, pages + 1, dtype)
    )
    total = 0.0
    for start in range(0, len(tokens), CHUNK):
        batch = _batch(model.config, tokens[start : start + CHUNK], start, pages)
        state, out, seen = _pass(model.config, model.dtype, model.params, state, batch)
        total = total + np.asarray(seen.log_decay, np.float64)
    return Observed(
        log_decay=np.asarray(total) / len(tokens),
        temporal=np.asarray(state.recurrent.temporal[:, 1]),
        query=np.asarray(seen.query),
        logits=np.asarray(out.logits[0]),
        tokens=len(tokens),
    )


def _batch(config: ModelConfig, tokens: np.ndarray, start: int, pages: int) -> PrefillBatch:
    mode = SLOT if start else ZERO
    segment = Segment(tokens, start, range(1, pages + 1), 1, 1, mode)
    d = config.delta
    keep = np.ones((len(config.recurrent_layers), d.num_value_heads, d.key_dim), bool)
    return pack_segments(
        [segment], [], [len(tokens) - 1], keep, PrefillBucket(CHUNK, 1, 0, pages, 1)
    )


@partial(jax.jit, static_argnums=(0, 1))
def _pass(
    config: ModelConfig, dtype: str, params: Params, state: State, batch: PrefillBatch
) -> tuple[State, PrefillOut, Seen]:
    """A prefill of one segment, and what was seen of its layers, stacked over them."""
    module, notes = merge(config, dtype, params), []
    for block in module.layers:
        if isinstance(block.mixer, DeltaMixer):
            # The module lives only while this function is traced: no other one gets the hook.
            vars(block.mixer)["prefill"] = _noting(block.mixer, notes)
    state, out = module.prefill(state, batch)
    return state, out, jax.tree.map(lambda *layers: jnp.stack(layers), *notes)


def _noting(mixer: DeltaMixer, notes: list[Seen]) -> Callable[..., Any]:
    """`mixer.prefill`, which also appends to `notes`."""
    prefill = mixer.prefill

    def hooked(h: jax.Array, state: RecurrentState, batch: PrefillBatch) -> Any:
        notes.append(_look(mixer, h, state, batch))
        return prefill(h, state, batch)

    return hooked


def _look(
    mixer: DeltaMixer, h: Float[Array, "T D"], state: RecurrentState, batch: PrefillBatch
) -> Seen:
    c = mixer.config
    cu = jnp.asarray(batch.table.cu_seqlens)
    g = mixer.decay(h)
    real = (jnp.arange(h.shape[0]) < cu[1]).reshape(-1, *(1,) * (g.ndim - 1))
    # The convolution is depthwise and its first channels are the query's.
    keys = c.num_key_heads * c.key_dim
    window = jnp.where(batch.fresh[:, None, None], 0, state.conv[mixer.layer, batch.slots])
    q = short_conv(mixer.q_proj(h), mixer.conv.weight[...][:keys], window[:, :keys], cu)
    last = l2norm(q[cu[1] - 1].reshape(c.num_key_heads, c.key_dim)) * c.key_dim**-0.5
    query = jnp.repeat(last, c.num_value_heads // c.num_key_heads, axis=0)
    return Seen(jnp.sum(jnp.where(real, g, 0), axis=0), query)
