"""The attention layers: NoPE-MLA, absorbed (Kimi-Linear), and gated grouped-query (Qwen3-Next).

Both write the new tokens' rows to their pages, then attend over the pages; `layer` counts attention
layers only. Replayed and padding tokens write to page 0, the sink, and read what the cache holds.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int32

from dasc_jax.config import GQAConfig, MLAConfig, ModelConfig
from dasc_jax.models.batch import DecodeBatch, PrefillBatch
from dasc_jax.models.layers import Linear, RMSNorm, RowParallel, ZeroCentredRMSNorm, rotate
from dasc_jax.parallel import page_specs, rank_count, stored_kv_heads
from dasc_jax.types import PAGE, AnyArray, AttentionPages
from pallas_kernels import PagedRows, paged_attention_decode, paged_attention_prefill

Attend = Callable[..., Array]


def _write(
    pages: jax.Array,
    layer: int,
    rows: jax.Array,
    page: Int32[AnyArray, "T"],
    position: Int32[AnyArray, "T"],
) -> jax.Array:
    return pages.at[layer, page, position % PAGE].set(rows.astype(pages.dtype))


class PagedMixer(nnx.Module):
    """What both attention layers share: where rows are written and which keys a query sees."""

    layer: int
    scale: float  # of the scores
    value_width: int  # leading columns of the last cached row that are the value

    def __init__(
        self,
        width: int,
        config: MLAConfig | GQAConfig,
        layer: int,
        dtype: jnp.dtype,
        tp: int = 1,
    ):
        raise NotImplementedError

    def prefill(
        self, h: Float[Array, "T D"], pages: AttentionPages, batch: PrefillBatch
    ) -> tuple[Float[Array, "T D"], AttentionPages]:
        """Mix packed prompt tokens."""

        def attend(q: jax.Array, cache: PagedRows, scale: float) -> jax.Array:
            return paged_attention_prefill(
                q, cache, batch.page_table, batch.positions, batch.table, scale=scale
            )

        return self.mix(h, pages, batch.write_pages, batch.positions, attend)

    def decode(
        self, h: Float[Array, "B D"], pages: AttentionPages, batch: DecodeBatch
    ) -> tuple[Float[Array, "B D"], AttentionPages]:
        """Mix one token of each request."""
        column = (batch.positions // PAGE)[:, None]
        page = jnp.take_along_axis(batch.page_table, column, axis=1)[:, 0]

        def attend(q: jax.Array, cache: PagedRows, scale: float) -> jax.Array:
            return paged_attention_decode(
                q, cache, batch.page_table, batch.positions + 1, scale=scale
            )

        return self.mix(h, pages, page, batch.positions, attend)

    def train_forward(self, h: Float[Array, "B T D"], attend: Attend) -> Float[Array, "B T D"]:
        """Mix whole sequences without pages; differentiable.

        `attend(q [B, T, Hq, Dk], keys [B, T, Hkv, Dk], values [B, T, Hkv, Dv], scale)` is causal.
        """
        batch, length, width = h.shape
        flat = h.reshape(-1, width)
        positions = jnp.tile(jnp.arange(length, dtype=jnp.int32), batch)
        query, rows = self.project(flat, positions)
        query, keys, values = (
            x.reshape(batch, length, -1, x.shape[-1])
            for x in (query, rows[0], rows[-1][..., : self.value_width])
        )
        mixed = attend(query, keys, values, self.scale).astype(h.dtype)
        return self.output(mixed.reshape(batch * length, *mixed.shape[2:]), flat).reshape(h.shape)

    def mix(
        self,
        h: Float[Array, "T D"],
        pages: AttentionPages,
        page: Int32[AnyArray, "T"],
        position: Int32[AnyArray, "T"],
        attend: Attend,
    ) -> tuple[Float[Array, "T D"], AttentionPages]:
        """Project, write rows to (`page`, `position` mod 64), attend, project back."""
        query, rows = self.project(h, position)
        arrays = tuple(
            _write(old, self.layer, row, page, position)
            for old, row in zip(pages.arrays, rows, strict=True)
        )
        paged = PagedRows(arrays[0], arrays[-1], self.layer, self.value_width)
        mixed = attend(query, paged, self.scale).astype(h.dtype)
        return self.output(mixed, h), AttentionPages(arrays)

    def project(
        self, h: Float[Array, "T D"], position: Int32[AnyArray, "T"]
    ) -> tuple[Float[Array, "T Hq Dk"], tuple[Float[Array, "T *row"], ...]]:
        """Queries, and what is cached of each token: one row an array of the pages."""
        raise NotImplementedError

    def output(self, mixed: Float[Array, "T Hq Dv"], h: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """The attended values, back in the residual stream's width."""
        raise NotImplementedError


class LatentAttention(PagedMixer):
    """Latent attention without positions, absorbed: heads read the cached latent directly.

    score_h = ((W_k,h^T q_nope,h) . latent + q_shared,h . shared) / sqrt(nope + shared);
    out_h = W_v,h (sum_s p_s latent_s). Equal to the expanded form, and one row of latent + shared
    values a token is all that is cached.
    """

    def __init__(self, width: int, config: MLAConfig, layer: int, dtype: jnp.dtype, tp: int = 1):
        c = config
        self.config, self.layer = c, layer
        self.scale, self.value_width = (c.nope_dim + c.shared_dim) ** -0.5, c.latent_dim
        self.q_proj = Linear(width, c.num_heads * (c.nope_dim + c.shared_dim), dtype)
        self.kv_a = Linear(width, c.latent_dim + c.shared_dim, dtype)
        self.kv_norm = RMSNorm(c.latent_dim, c.latent_norm_eps, dtype)
        self.k_up = nnx.Param(jnp.zeros((c.num_heads, c.nope_dim, c.latent_dim), dtype))
        self.v_up = nnx.Param(jnp.zeros((c.num_heads, c.value_dim, c.latent_dim), dtype))
        self.o_proj = RowParallel(c.num_heads * c.value_dim, width, dtype, tp)

    def project(
        self, h: Float[Array, "T D"], position: Int32[AnyArray, "T"]
    ) -> tuple[Float[Array, "T Hq Dk"], tuple[Float[Array, "T *row"], ...]]:
        c = self.config
        latent, shared = jnp.split(self.kv_a(h), [c.latent_dim], axis=-1)
        row = jnp.concatenate([self.kv_norm(latent), shared], axis=-1)
        q = self.q_proj(h).reshape(h.shape[0], c.num_heads, -1)
        absorbed = jnp.einsum("thn,hnl->thl", q[..., : c.nope_dim], self.k_up[...])
        return jnp.concatenate([absorbed, q[..., c.nope_dim :]], axis=-1), (row,)

    def output(self, mixed: Float[Array, "T Hq Dv"], h: Float[Array, "T D"]) -> Float[Array, "T D"]:
        out = jnp.einsum("thl,hvl->thv", mixed, self.v_up[...])
        return self.o_proj(out.reshape(h.shape[0], -1))


class GatedAttention(PagedMixer):
    """Grouped-query attention: normed, partly rotated queries and keys, a sigmoid output gate."""

    def __init__(self, width: int, config: GQAConfig, layer: int, dtype: jnp.dtype, tp: int = 1):
        c = config
        self.config, self.layer = c, layer
        self.scale, self.value_width = c.head_dim**-0.5, c.head_dim
        self.q_proj = Linear(width, c.num_heads * c.head_dim, dtype)
        self.gate_proj = Linear(width, c.num_heads * c.head_dim, dtype)
        self.k_proj = Linear(width, c.num_kv_heads * c.head_dim, dtype)
        self.v_proj = Linear(width, c.num_kv_heads * c.head_dim, dtype)
        self.q_norm = ZeroCentredRMSNorm(c.head_dim, c.norm_eps, dtype)
        self.k_norm = ZeroCentredRMSNorm(c.head_dim, c.norm_eps, dtype)
        self.o_proj = RowParallel(c.num_heads * c.head_dim, width, dtype, tp)

    def project(
        self, h: Float[Array, "T D"], position: Int32[AnyArray, "T"]
    ) -> tuple[Float[Array, "T Hq Dk"], tuple[Float[Array, "T *row"], ...]]:
        c, rows = self.config, h.shape[0]
        q = self.q_norm(self.q_proj(h).reshape(rows, c.num_heads, -1))
        k = self.k_norm(self.k_proj(h).reshape(rows, c.num_kv_heads, -1))
        q = rotate(q, position, c.rope_dim, c.rope_theta)
        k = rotate(k, position, c.rope_dim, c.rope_theta)
        return q, (k, self.v_proj(h).reshape(rows, c.num_kv_heads, -1))

    def output(self, mixed: Float[Array, "T Hq Dv"], h: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return self.o_proj(mixed.reshape(h.shape[0], -1) * jax.nn.sigmoid(self.gate_proj(h)))


def init_pages(
    config: ModelConfig, pages: int, dtype: jnp.dtype, mesh: Mesh | None = None
) -> AttentionPages:
    """Zeroed pages `[F, pages, 64, ...]` of all attention layers; page 0 is the sink.

    On a mesh every rank holds latents whole, and the key-value heads that its queries read: where
    there are fewer heads than ranks, the global array repeats them, one a rank.
    """
    lead = (len(config.attention_layers), pages, PAGE)
    a = config.attention
    if isinstance(a, MLAConfig):
        shape = (*lead, a.latent_dim + a.shared_dim)
    else:
        shape = (*lead, stored_kv_heads(a, rank_count(mesh)), a.head_dim)
    return AttentionPages(
        tuple(
            jnp.zeros(shape, dtype, device=mesh and NamedSharding(mesh, spec))
            for spec in page_specs(config)
        )
    )
