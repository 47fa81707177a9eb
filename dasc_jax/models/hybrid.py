"""The hybrid decoder both families are: recurrent and attention layers, in the config's pattern.

x = embed[tokens];  x += mixer(norm(x));  x += ffn(norm(x));  logits = lm_head(norm(x))
"""

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int32

from dasc_jax.config import ModelConfig
from dasc_jax.models.attention import Attend, PagedMixer
from dasc_jax.models.batch import DecodeBatch, PrefillBatch, PrefillOut, State, stack_boundaries
from dasc_jax.models.delta import DeltaMixer
from dasc_jax.models.layers import Embedding, FeedForward, Linear, rms_norm
from dasc_jax.models.moe import MoE
from dasc_jax.parallel import gather_columns, local_config
from dasc_jax.types import RecurrentState
from pallas_kernels import next_windows


class Block(nnx.Module):
    """One decoder layer: a mixer and a feed-forward, each normed before and added to the stream."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        attention: type[PagedMixer],
        dtype: jnp.dtype,
        tp: int,
    ):
        width, eps, centred = config.hidden_size, config.norm_eps, config.zero_centred_norm
        kind = config.layer_kinds[index]
        row = config.layer_kinds[:index].count(kind)
        self.input_norm = rms_norm(width, eps, dtype, zero_centred=centred)
        self.mixer = (
            DeltaMixer(width, config.delta, row, dtype, tp)
            if kind == "delta"
            else attention(width, config.attention, row, dtype, tp)
        )
        self.post_norm = rms_norm(width, eps, dtype, zero_centred=centred)
        self.ffn = _feed_forward(config, index, dtype, tp)

    def feed(self, x: Float[Array, "T D"], live: Bool[Array, "T"]) -> Float[Array, "T D"]:
        """The feed-forward of the normed stream; tokens that are not `live` reach no expert."""
        h = self.post_norm(x)
        return self.ffn(h, live) if isinstance(self.ffn, MoE) else self.ffn(h)


def _feed_forward(config: ModelConfig, index: int, dtype: jnp.dtype, tp: int) -> MoE | FeedForward:
    if config.ffn_kinds[index] == "moe":
        assert config.moe is not None
        return MoE(config.hidden_size, config.moe, dtype, tp)
    assert config.dense_intermediate is not None
    return FeedForward(config.hidden_size, config.dense_intermediate, dtype, tp)


def _train_block(
    block: Block, x: Float[Array, "B T D"], attend: Attend
) -> tuple[Float[Array, "B T D"], tuple[jax.Array, ...]]:
    """A block over whole sequences: the stream, and balance loss and expert shares of a MoE."""
    h, mixer = block.input_norm(x), block.mixer
    if isinstance(mixer, DeltaMixer):
        x = x + mixer.train_forward(h)
    else:
        x = x + mixer.train_forward(h, attend)
    h = block.post_norm(x)
    if not isinstance(block.ffn, MoE):
        return x + block.ffn(h), ()
    y, *routing = block.ffn.train_forward(h.reshape(-1, h.shape[-1]))
    return x + y.reshape(x.shape), tuple(routing)


class TrainOut(NamedTuple):
    """Logits of every token, and of each layer with experts its balance loss and expert shares."""

    logits: Float32[Array, "B T vocab"]
    balance: Float32[Array, "M"]
    load: Float32[Array, "M E"]


class HybridModel(nnx.Module):
    """The whole decoder, or one of `tp` ranks of it for the inside of `jax.shard_map`.

    Used functionally: built abstractly, merged inside a jitted step.
    """

    attention: ClassVar[type[PagedMixer]]

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, tp: int = 1):
        self.vocab_size, self.tp = config.vocab_size, tp
        config = local_config(config, tp)
        self.embed = Embedding(config.vocab_size, config.hidden_size, dtype, tp)
        self.layers = nnx.List(
            [Block(config, i, self.attention, dtype, tp) for i in range(config.num_layers)]
        )
        self.norm = rms_norm(
            config.hidden_size, config.norm_eps, dtype, zero_centred=config.zero_centred_norm
        )
        self.tied = config.tie_word_embeddings
        if not self.tied:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype)

    def prefill(self, state: State, batch: PrefillBatch) -> tuple[State, PrefillOut]:
        """Run packed prompt tokens; logits of `batch.rows` and states at the wanted boundaries."""
        recurrent, pages = state
        x = self.embed(batch.tokens)
        live = jnp.arange(x.shape[0], dtype=jnp.int32) < batch.table.cu_seqlens[-1]
        temporal, conv = [], []
        for block in self.layers:
            h, mixer = block.input_norm(x), block.mixer
            if isinstance(mixer, DeltaMixer):
                y, recurrent, boundary = mixer.prefill(h, recurrent, batch)
                temporal.append(boundary.temporal)
                conv.append(boundary.conv)
            else:
                y, pages = mixer.prefill(h, pages, batch)
            x = x + y
            x = x + block.feed(x, live)
        out = PrefillOut(self.logits(x[batch.rows]), stack_boundaries(temporal, conv), x)
        return State(recurrent, pages), out

    def decode(self, state: State, batch: DecodeBatch) -> tuple[State, Float32[Array, "B vocab"]]:
        """One token of each request; logits of the next."""
        (temporal, conv), pages = state
        x, live = self.embed(batch.tokens), jnp.asarray(batch.slots) > 0
        # All windows at once, read here and written behind: layer by layer, XLA copies the pool.
        windows, moved_by = conv[:, batch.slots], []
        for block in self.layers:
            h, mixer = block.input_norm(x), block.mixer
            if isinstance(mixer, DeltaMixer):
                y, temporal, u = mixer.decode(h, temporal, windows[mixer.layer], batch)
                moved_by.append(u)
            else:
                y, pages = mixer.decode(h, pages, batch)
            x = x + y
            x = x + block.feed(x, live)
        conv = conv.at[:, batch.slots].set(next_windows(jnp.stack(moved_by), windows))
        recurrent = RecurrentState(temporal, conv)
        return State(recurrent, pages), self.logits(x)

    def train_forward(self, tokens: Int32[Array, "B T"], attend: Attend) -> TrainOut:
        """Whole sequences from nothing, T a multiple of 64; differentiable, rematerialised by
        block. `attend` is causal attention, see `PagedMixer.train_forward`."""
        x = self.embed(tokens)
        balances, loads = [], []
        for block in self.layers:
            graph, params = nnx.split(block)

            @jax.checkpoint
            def run(params: Any, x: jax.Array, graph=graph):
                return _train_block(nnx.merge(graph, params), x, attend)

            x, routing = run(params, x)
            if routing:
                balances.append(routing[0])
                loads.append(routing[1])
        return TrainOut(self.logits(x), jnp.stack(balances), jnp.stack(loads))

    def logits(self, x: Float[Array, "*R D"]) -> Float32[Array, "*R vocab"]:
        """Logits from the residual stream behind the last layer."""
        x = self.norm(x)
        logits = self.embed.unembed(x) if self.tied else self.lm_head(x)
        return gather_columns(logits, self.tp)[..., : self.vocab_size].astype(jnp.float32)
