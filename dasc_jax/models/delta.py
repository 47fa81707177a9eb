"""The delta-rule mixer: KDA and GDN are one layer with two kinds of decay and of output gate.

    q, k, v = silu(conv(W_qkv h));  beta = sigmoid(W_b h)
    g = -exp(A_log) softplus(W_a h + dt_bias)
    S' = diag(exp g) S;  u = beta (v - S'^T k);  S = S' + k u^T;  o = S^T q   (DASC Eq. 1, k-major)
    y = W_o (norm(o) * act(W_g h))

What differs is data: KDA has one decay a key channel from a low-rank projection and a sigmoid gate
of the same form; GDN has one decay a head, grouped key heads, and a full-rank silu gate.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32

from dasc_jax.config import DeltaConfig
from dasc_jax.models.batch import DecodeBatch, PrefillBatch
from dasc_jax.models.layers import Linear, RowParallel
from dasc_jax.types import RecurrentState
from pallas_kernels import (
    conv_windows,
    delta_prefill,
    delta_step,
    delta_train,
    gdn_gate,
    gdn_output,
    kda_gate,
    kda_output,
    short_conv,
    short_conv_step,
    whole_conv,
)
from pallas_kernels.composed import split_channels


class Projection(nnx.Module):
    """A projection that may pass through a low rank: up(down(h)), or up(h)."""

    def __init__(self, width: int, rank: int | None, outputs: int, dtype: jnp.dtype):
        if rank is not None:
            self.down = Linear(width, rank, dtype)
        self.up = Linear(rank or width, outputs, dtype)
        self.low_rank = rank is not None

    def __call__(self, h: Float[Array, "T D"]) -> Float[Array, "T O"]:
        return self.up(self.down(h) if self.low_rank else h)


class Decay(Projection):
    """Log decay g <= 0 in float32: `[T, H, K]` (KDA) or `[T, H]` (GDN)."""

    def __init__(self, width: int, config: DeltaConfig, dtype: jnp.dtype):
        heads, channels = config.num_value_heads, config.key_dim
        self.shape = (heads, channels) if config.kind == "kda" else (heads,)
        super().__init__(
            width, config.gate_rank, heads * channels if config.kind == "kda" else heads, dtype
        )
        self.gate = kda_gate if config.kind == "kda" else gdn_gate
        self.A_log = nnx.Param(jnp.zeros((heads,), jnp.float32))
        self.dt_bias = nnx.Param(jnp.zeros(self.shape, jnp.float32))

    def __call__(self, h: Float[Array, "T D"]) -> Float32[Array, "T *units"]:
        return self.gate(self.raw(h), self.A_log[...], self.dt_bias[...])

    def raw(self, h: Float[Array, "T D"]) -> Float[Array, "T *units"]:
        """What the gate is a function of, beside its weights."""
        return super().__call__(h).reshape(h.shape[0], *self.shape)


class OutputNorm(nnx.Module):
    """Gated norm over the value dimension of a head: norm first, then the gate's activation."""

    def __init__(self, config: DeltaConfig, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.ones((config.value_dim,), dtype))
        self.eps = config.norm_eps
        self.gated = kda_output if config.kind == "kda" else gdn_output

    def __call__(
        self, o: Float[Array, "T H V"], gate: Float[Array, "T H V"]
    ) -> Float[Array, "T H V"]:
        return self.gated(o, gate, self.weight[...], self.eps)


class ShortConv(nnx.Module):
    """Weights of the depthwise causal convolution over q | k | v: `[C, 4]`, oldest tap first."""

    def __init__(self, config: DeltaConfig, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.zeros((config.conv_channels, config.conv_kernel), dtype))


class Split(NamedTuple):
    """q, k `[T, Hk, K]`, v `[T, H, V]`: the convolved channels by role."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


class DeltaMixer(nnx.Module):
    """One recurrent layer. `layer` counts recurrent layers only: its row in the state."""

    def __init__(self, width: int, config: DeltaConfig, layer: int, dtype: jnp.dtype, tp: int = 1):
        keys = config.num_key_heads * config.key_dim
        values = config.num_value_heads * config.value_dim
        self.config, self.layer = config, layer
        self.q_proj = Linear(width, keys, dtype)
        self.k_proj = Linear(width, keys, dtype)
        self.v_proj = Linear(width, values, dtype)
        self.conv = ShortConv(config, dtype)
        self.b_proj = Linear(width, config.num_value_heads, dtype)
        self.decay = Decay(width, config, dtype)
        self.gate = Projection(width, config.gate_rank, values, dtype)
        self.o_norm = OutputNorm(config, dtype)
        self.o_proj = RowParallel(values, width, dtype, tp)

    def prefill(
        self, h: Float[Array, "T D"], state: RecurrentState, batch: PrefillBatch
    ) -> tuple[Float[Array, "T D"], RecurrentState, RecurrentState]:
        """Mix packed tokens; returns (y, state, this layer's boundary states `[NB, ...]`)."""
        u, at = self._conv_input(h), self.layer
        window = jnp.where(batch.fresh[:, None, None], 0, state.conv[at, batch.slots])
        cu = jnp.asarray(batch.table.cu_seqlens)
        split = self._split(short_conv(u, self.conv.weight[...], window, cu))
        out = delta_prefill(
            *split,
            self.decay(h),
            self._beta(h),
            state.temporal[at, batch.slots],
            batch.table,
            keep=batch.keep[at],
            num_boundaries=batch.boundary_end.shape[0],
        )
        segments = jnp.arange(cu.shape[0] - 1, dtype=jnp.int32)
        tail = conv_windows(u, window, cu, segments, cu[1:])
        owner, end = jnp.asarray(batch.boundary_segment), jnp.asarray(batch.boundary_end)
        boundary = RecurrentState(out.boundary, conv_windows(u, window, cu, owner, end))
        state = RecurrentState(
            state.temporal.at[at, batch.final_slots].set(out.final),
            state.conv.at[at, batch.final_slots].set(tail),
        )
        return self._output(out.o, h), state, boundary

    def decode(
        self,
        h: Float[Array, "B D"],
        temporal: Float32[Array, "L S H K V"],
        window: Float[Array, "B C 3"],
        batch: DecodeBatch,
    ) -> tuple[Float[Array, "B D"], Float32[Array, "L S H K V"], Float[Array, "B C"]]:
        """Mix one token of each request, its temporal state read and written in place.

        Returns (y, the temporal states, what the convolution windows move on by).
        """
        u = self._conv_input(h)
        y = short_conv_step(u, self.conv.weight[...], window)
        temporal, o = delta_step(
            y,
            self.decay.raw(h),
            self.b_proj(h),
            self.decay.A_log[...],
            self.decay.dt_bias[...],
            self.gate(h).reshape(-1, self.config.num_value_heads, self.config.value_dim),
            self.o_norm.weight[...],
            temporal,
            jnp.asarray(batch.slots),
            layer=self.layer,
            eps=self.o_norm.eps,
        )
        return self.o_proj(o.reshape(h.shape[0], -1)), temporal, u

    def train_forward(self, h: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Mix whole sequences from a zero state; differentiable."""
        flat = h.reshape(-1, h.shape[-1])
        u, rows = self._conv_input(flat), h.shape[:2]
        y = whole_conv(u.reshape(*rows, -1), self.conv.weight[...]).reshape(u.shape)
        inputs = (*self._split(y), self.decay(flat), self._beta(flat))
        o = delta_train(*(x.reshape(*rows, *x.shape[1:]) for x in inputs))
        return self._output(o.reshape(-1, *o.shape[2:]), flat).reshape(h.shape)

    def _conv_input(self, h: Float[Array, "T D"]) -> Float[Array, "T C"]:
        return jnp.concatenate([self.q_proj(h), self.k_proj(h), self.v_proj(h)], axis=-1)

    def _split(self, y: Float[Array, "T C"]) -> Split:
        c = self.config
        return Split(*split_channels(y, c.num_value_heads, c.key_dim, c.value_dim))

    def _beta(self, h: Float[Array, "T D"]) -> Float32[Array, "T H"]:
        return jax.nn.sigmoid(self.b_proj(h).astype(jnp.float32))

    def _output(self, o: Float32[Array, "T H V"], h: Float[Array, "T D"]) -> Float[Array, "T D"]:
        gate = self.gate(h).reshape(o.shape)
        return self.o_proj(self.o_norm(o.astype(h.dtype), gate).reshape(h.shape[0], -1))
