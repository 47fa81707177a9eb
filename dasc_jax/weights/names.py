"""Where each parameter comes from in a released checkpoint: the table of names and transforms.

A `Piece` says: read this tensor, view it so, write it there. Several pieces may fill one parameter
(experts into a stack, three convolutions into one), several may read one tensor (interleaved
projections); none of the views copies. Names and shapes: the released checkpoints of
Kimi-Linear-48B-A3B and Qwen3-Next-80B-A3B.
"""

from collections.abc import Callable, Container, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from dasc_jax.config import GQAConfig, MLAConfig, ModelConfig, MoEConfig

SKIPPED_PREFIX = "mtp."
"""Multi-token-prediction heads: released with Qwen3-Next, used by nothing here."""

Shape = tuple[int, ...]


class Piece(NamedTuple):
    """`param[at] = read(tensor)`, for a file tensor of one of the accepted `shapes`."""

    param: str
    tensor: str
    shapes: tuple[Shape, ...]
    read: Callable[[np.ndarray], np.ndarray]
    at: tuple[int | slice, ...] = ()


def pieces(config: ModelConfig, present: Container[str]) -> Iterator[Piece]:
    """The table for `config`, in layer order.

    `present` holds the tensor names of the checkpoint: where two spellings or two layouts are
    accepted, the one that is there is chosen, else the released one (so that an audit reports it
    missing).
    """
    dim, vocab = config.hidden_size, config.vocab_size
    yield Piece("embed.weight", "model.embed_tokens.weight", ((vocab, dim),), _same)
    for i, (mixer, ffn) in enumerate(zip(config.layer_kinds, config.ffn_kinds, strict=True)):
        here, there = f"layers.{i}.", f"model.layers.{i}."
        yield _vector(here + "input_norm.weight", there + "input_layernorm.weight", dim)
        if mixer == "attention":
            mixers = _mla if isinstance(config.attention, MLAConfig) else _gqa
        else:
            mixers = _kda if config.delta.kind == "kda" else _gdn
        yield from mixers(config, here + "mixer.", there)
        yield _vector(here + "post_norm.weight", there + "post_attention_layernorm.weight", dim)
        ffns = _moe if ffn == "moe" else _dense
        yield from ffns(config, here + "ffn.", there, present)
    yield _vector("norm.weight", "model.norm.weight", dim)
    if not config.tie_word_embeddings:
        yield _linear("lm_head.kernel", "lm_head.weight", vocab, dim)


def skipped(config: ModelConfig, name: str) -> bool:
    """Whether a tensor of the checkpoint is left unread on purpose."""
    return name.startswith(SKIPPED_PREFIX) or (
        config.tie_word_embeddings and name == "lm_head.weight"
    )


def _same(x: np.ndarray) -> np.ndarray:
    return x


def _transposed(x: np.ndarray) -> np.ndarray:
    return x.swapaxes(-1, -2)


def _reshaped(x: np.ndarray, *, shape: Shape) -> np.ndarray:
    return x.reshape(shape)


def _squeezed(x: np.ndarray) -> np.ndarray:
    return x[:, 0, :]


def _group_rows(x: np.ndarray, *, groups: int, start: int, stop: int) -> np.ndarray:
    """Rows start..stop of each of `groups` equal runs of rows, as `[groups, stop - start,
    columns]`."""
    return x.reshape(groups, -1, x.shape[-1])[:, start:stop]


def _group_columns(x: np.ndarray, *, groups: int, start: int, stop: int) -> np.ndarray:
    """The same rows as kernel columns, `[columns, groups, stop - start]`."""
    return _group_rows(x, groups=groups, start=start, stop=stop).transpose(2, 0, 1)


def _vector(param: str, tensor: str, size: int) -> Piece:
    return Piece(param, tensor, ((size,),), _same)


def _linear(param: str, tensor: str, rows: int, columns: int) -> Piece:
    """A released linear weight `[out, in]` as a kernel `[in, out]`."""
    return Piece(param, tensor, ((rows, columns),), _transposed)


def _decay(config: ModelConfig, here: str, there: str) -> Iterator[Piece]:
    delta, heads = config.delta, config.delta.num_value_heads
    flat = partial(_reshaped, shape=(heads,))
    yield Piece(here + "decay.A_log", there + "A_log", ((heads,), (1, 1, heads, 1)), flat)
    if delta.kind == "gdn":
        yield _vector(here + "decay.dt_bias", there + "dt_bias", heads)
    else:
        split = partial(_reshaped, shape=(heads, delta.key_dim))
        yield Piece(here + "decay.dt_bias", there + "dt_bias", ((heads * delta.key_dim,),), split)


def _kda(config: ModelConfig, here: str, there: str) -> Iterator[Piece]:
    delta, dim, there = config.delta, config.hidden_size, there + "self_attn."
    heads, rank = delta.num_value_heads, delta.gate_rank
    assert rank is not None
    keys, values = heads * delta.key_dim, heads * delta.value_dim
    row = 0
    for name, width in (("q", keys), ("k", keys), ("v", values)):
        yield _linear(f"{here}{name}_proj.kernel", f"{there}{name}_proj.weight", width, dim)
        at = (slice(row, row + width),)
        shape = (width, 1, delta.conv_kernel)
        yield Piece(here + "conv.weight", f"{there}{name}_conv1d.weight", (shape,), _squeezed, at)
        row += width
    yield from _decay(config, here, there)
    yield _linear(here + "b_proj.kernel", there + "b_proj.weight", heads, dim)
    yield _linear(here + "decay.down.kernel", there + "f_a_proj.weight", rank, dim)
    yield _linear(here + "decay.up.kernel", there + "f_b_proj.weight", keys, rank)
    yield _linear(here + "gate.down.kernel", there + "g_a_proj.weight", rank, dim)
    yield _linear(here + "gate.up.kernel", there + "g_b_proj.weight", values, rank)
    yield _vector(here + "o_norm.weight", there + "o_norm.weight", delta.value_dim)
    yield _linear(here + "o_proj.kernel", there + "o_proj.weight", dim, values)


def _gdn(config: ModelConfig, here: str, there: str) -> Iterator[Piece]:
    """GDN projections come interleaved by key head: a group of rows holds q, k, v, z (and b, a) of
    one key head and of the value heads that it serves."""
    delta, dim, there = config.delta, config.hidden_size, there + "linear_attn."
    groups, ratio = delta.num_key_heads, delta.num_value_heads // delta.num_key_heads
    key, value = delta.key_dim, ratio * delta.value_dim
    parts = {
        "in_proj_qkvz.weight": (
            ("q_proj.kernel", key),
            ("k_proj.kernel", key),
            ("v_proj.kernel", value),
            ("gate.up.kernel", value),
        ),
        "in_proj_ba.weight": (("b_proj.kernel", ratio), ("decay.up.kernel", ratio)),
    }
    for tensor, names in parts.items():
        shape = (groups * sum(width for _, width in names), dim)
        start = 0
        for name, width in names:
            read = partial(_group_columns, groups=groups, start=start, stop=start + width)
            yield Piece(here + name, there + tensor, (shape,), read)
            start += width
    conv = (delta.conv_channels, 1, delta.conv_kernel)
    yield Piece(here + "conv.weight", there + "conv1d.weight", (conv,), _squeezed)
    yield from _decay(config, here, there)
    yield _vector(here + "o_norm.weight", there + "norm.weight", delta.value_dim)
    yield _linear(here + "o_proj.kernel", there + "out_proj.weight", dim, groups * value)


def _mla(config: ModelConfig, here: str, there: str) -> Iterator[Piece]:
    attn, dim, there = config.attention, config.hidden_size, there + "self_attn."
    assert isinstance(attn, MLAConfig)
    heads, nope, value, latent = attn.num_heads, attn.nope_dim, attn.value_dim, attn.latent_dim
    yield _linear(
        here + "q_proj.kernel", there + "q_proj.weight", heads * (nope + attn.shared_dim), dim
    )
    yield _linear(
        here + "kv_a.kernel", there + "kv_a_proj_with_mqa.weight", latent + attn.shared_dim, dim
    )
    yield _vector(here + "kv_norm.weight", there + "kv_a_layernorm.weight", latent)
    shape = (heads * (nope + value), latent)
    for name, start, stop in (("k_up", 0, nope), ("v_up", nope, nope + value)):
        read = partial(_group_rows, groups=heads, start=start, stop=stop)
        yield Piece(here + name, there + "kv_b_proj.weight", (shape,), read)
    yield _linear(here + "o_proj.kernel", there + "o_proj.weight", dim, heads * value)


def _gqa(config: ModelConfig, here: str, there: str) -> Iterator[Piece]:
    attn, dim, there = config.attention, config.hidden_size, there + "self_attn."
    assert isinstance(attn, GQAConfig)
    heads, width = attn.num_heads, attn.head_dim
    shape = (2 * heads * width, dim)
    for name, start in (("q_proj.kernel", 0), ("gate_proj.kernel", width)):
        read = partial(_group_columns, groups=heads, start=start, stop=start + width)
        yield Piece(here + name, there + "q_proj.weight", (shape,), read)
    for name in ("k_proj", "v_proj"):
        yield _linear(
            f"{here}{name}.kernel", f"{there}{name}.weight", attn.num_kv_heads * width, dim
        )
    for name in ("q_norm.weight", "k_norm.weight"):
        yield _vector(here + name, there + name, width)
    yield _linear(here + "o_proj.kernel", there + "o_proj.weight", dim, heads * width)


def _spelled(names: tuple[str, ...], present: Container[str]) -> str:
    return next((name for name in names if name in present), names[0])


def _dense(config: ModelConfig, here: str, there: str, present: Container[str]) -> Iterator[Piece]:
    # Kimi checkpoints re-saved by transformers spell the dense block like a sparse one.
    prefixes = (there + "mlp.", there + "block_sparse_moe.")
    assert config.dense_intermediate is not None
    yield from _mlp(here, prefixes, config.dense_intermediate, config.hidden_size, present)


def _mlp(
    here: str, prefixes: tuple[str, ...], inner: int, dim: int, present: Container[str]
) -> Iterator[Piece]:
    for name, rows, columns in (("gate", inner, dim), ("up", inner, dim), ("down", dim, inner)):
        tensor = _spelled(tuple(f"{prefix}{name}_proj.weight" for prefix in prefixes), present)
        yield _linear(f"{here}{name}.kernel", tensor, rows, columns)


def _moe(config: ModelConfig, here: str, there: str, present: Container[str]) -> Iterator[Piece]:
    moe, dim = config.moe, config.hidden_size
    assert moe is not None
    kimi = config.family == "kimi_linear"
    prefixes = (there + "block_sparse_moe.", there + "mlp.") if kimi else (there + "mlp.",)

    def spelled(name: str) -> str:
        return _spelled(tuple(prefix + name for prefix in prefixes), present)

    yield _linear(here + "router.kernel", spelled("gate.weight"), moe.num_experts, dim)
    if kimi:
        bias = spelled("gate.e_score_correction_bias")
        yield _vector(here + "router.bias", bias, moe.num_experts)
    stacked = spelled("experts.gate_up_proj"), spelled("experts.down_proj")
    if stacked[0] in present or stacked[1] in present:
        experts, inner = moe.num_experts, moe.intermediate
        shapes = (experts, 2 * inner, dim), (experts, dim, inner)
        yield Piece(here + "experts.gate_up", stacked[0], (shapes[0],), _transposed)
        yield Piece(here + "experts.down", stacked[1], (shapes[1],), _transposed)
    else:
        names = ("w1", "w3", "w2") if kimi else ("gate_proj", "up_proj", "down_proj")
        yield from _experts(
            moe, dim, here, [spelled(f"experts.{{}}.{name}.weight") for name in names]
        )
    shared = "shared_experts." if kimi else "shared_expert."
    owners = tuple(prefix + shared for prefix in prefixes)
    yield from _mlp(here + "shared.", owners, moe.shared_intermediate, dim, present)
    if moe.shared_gate:
        yield _linear(here + "shared_gate.kernel", spelled("shared_expert_gate.weight"), 1, dim)


def _experts(moe: MoEConfig, dim: int, here: str, templates: list[str]) -> Iterator[Piece]:
    """One tensor an expert and matrix; gate and up fill one stack, so its pieces come first."""
    inner = moe.intermediate
    gate, up, down = templates
    for expert in range(moe.num_experts):
        for template, columns in ((gate, slice(0, inner)), (up, slice(inner, None))):
            at = (expert, slice(None), columns)
            shapes = ((inner, dim),)
            yield Piece(here + "experts.gate_up", template.format(expert), shapes, _transposed, at)
    for expert in range(moe.num_experts):
        tensor = down.format(expert)
        yield Piece(here + "experts.down", tensor, ((dim, inner),), _transposed, (expert,))
