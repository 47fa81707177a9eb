"""Profiles of the two released models that the DASC paper measured, without their weights.

The configurations are the released ones. The decay weights are *synthetic*: deterministic numbers
of the real shapes, fitted to the statistics that the paper prints, so that plans, layouts and
capacities can be studied (and tested against the paper) on a laptop. Nothing else about them is
meaningful.

Fitted, for both models: the pooled median and quartiles of alpha = exp(g) (section 3.3), the units
retained at `w_max` 16 and 512 (from the compression ratios of section 5.3), and the units of the
most loaded of 8 ranks at 16, 64, 128 and 512 (from the block counts of appendix C.2, read as
floor(12032 / ceil(N_off / 0.85))). For Kimi also: 144 units past 512 tokens, 113 of them in one
head; 90.6 % of heads mixed at 16; a layer median of 0.360 retained, block 21 (0.374) nearest to it.

One published number cannot be met: 4 blocks for Kimi at 512 would need N_off <= 2556, but with 144
retained units in all even a single rank that holds all of them gives 2691 (12032 / 3166 = 3.8
blocks). The profile puts all 144 on one rank, which is as near as the paper's own 28.04x allows.

Not fitted, because not published: the units retained at 64 and 128 in all (interpolated), which
layers, heads and channels are slow, horizons past 1024 tokens, and A_log and dt_bias apart from
their decay.
"""

import dataclasses
from functools import lru_cache

import numpy as np
from jaxtyping import Float32, Float64

from dasc_jax.config import DeltaConfig, GQAConfig, MLAConfig, ModelConfig, MoEConfig
from dasc_jax.horizons import EPSILON, GATE_INPUT, decay, horizons

THRESHOLDS = (512, 128, 64, 16)
RANKS = 8


@dataclasses.dataclass(frozen=True)
class _Fit:
    """Units past each of THRESHOLDS, in all and on the most loaded rank, and quantiles of alpha.

    `alphas` are (fraction of units below, alpha). `layer_spread` and `head_spread` scale how much
    layers and heads differ, relative to the channels of one head. `rank` of 8 is the loaded one;
    `longest_head` units past 512 tokens share a head of it. `seed` shuffles.
    """

    totals: tuple[int, ...]
    loaded_rank: tuple[int, ...]
    alphas: tuple[tuple[float, float], ...]
    layer_spread: float
    head_spread: float
    rank: int
    longest_head: int = 0
    seed: int = 0


_FITS = {
    "kimi-linear-48b": _Fit(
        totals=(144, 2680, 7900, 29364),
        loaded_rank=(144, 735, 1790, 4430),
        alphas=((0.0, 0.01), (0.25, 0.170), (0.5, 0.471), (0.75, 0.774), (1.0, 0.9985)),
        layer_spread=0.4,
        head_spread=1.65,
        rank=5,
        longest_head=113,
        seed=22,
    ),
    "qwen3-next-80b": _Fit(
        totals=(448, 659, 858, 1045),
        loaded_rank=(67, 106, 127, 136),
        alphas=((0.0, 0.02), (0.25, 0.894), (0.5, 0.969), (0.75, 0.997), (1.0, 0.9999)),
        layer_spread=0.5,
        head_spread=1.0,
        rank=2,
    ),
}

PUBLISHED = tuple(_FITS)


def published_profile(
    name: str, *, a: float = GATE_INPUT, eps: float = EPSILON
) -> tuple[ModelConfig, list[Float64[np.ndarray, "H *K"]]]:
    """The released configuration of `name`, and the horizons of its synthetic decay weights.

    Horizons are float64 tokens at `a` and `eps`, one array per recurrent layer: [H, K] for
    Kimi-Linear, [H] for Qwen3-Next. The module docstring says what is fitted and what is not.
    Raises ValueError for a name that is not in PUBLISHED.
    """
    config = published_config(name)
    return config, [
        horizons(decay(A_log, dt_bias, a), eps, layer)
        for layer, (A_log, dt_bias) in zip(
            config.recurrent_layers, published_decay_weights(name), strict=True
        )
    ]


def published_config(name: str) -> ModelConfig:
    """The released configuration of `name`; ValueError for a name that is not in PUBLISHED."""
    if name not in _FITS:
        raise ValueError(f"no published profile {name!r}; there are {', '.join(PUBLISHED)}")
    return _kimi() if name == "kimi-linear-48b" else _qwen()


def published_decay_weights(
    name: str,
) -> list[tuple[Float32[np.ndarray, "H"], Float32[np.ndarray, "H *K"]]]:
    """Synthetic (A_log [H], dt_bias [H, K] or [H]) of every recurrent layer, float32."""
    alpha = _alphas(name)
    layers, heads = alpha.shape[:2]
    A_log = np.log(1 + 15 * _spread(0, layers, heads)).astype(np.float32)
    y = -np.log(alpha) / np.exp(A_log.astype(np.float64)).reshape(layers, heads, 1)
    dt_bias = (y + np.log(-np.expm1(-y)) - GATE_INPUT).astype(np.float32)
    if published_config(name).delta.kind == "gdn":
        dt_bias = dt_bias[..., 0]
    return list(zip(A_log, dt_bias, strict=True))


@lru_cache(maxsize=len(_FITS))
def _alphas(name: str) -> np.ndarray:
    """alpha of every unit, [L, H, K] (K = 1 for GDN).

    The units of the loaded rank and those of the others are each put in the order of a score; then
    both lists are dealt the sorted alphas, between every two thresholds in the proportion that the
    fit asks.
    """
    config, fit = published_config(name), _FITS[name]
    delta = config.delta
    shape = (
        len(config.recurrent_layers),
        delta.num_value_heads,
        delta.key_dim if delta.kind == "kda" else 1,
    )
    score = _scores(shape, fit)
    alphas = _quantiles(fit, score.size)
    loaded = np.zeros(shape, bool)
    width = shape[1] // RANKS
    loaded[:, fit.rank * width : (fit.rank + 1) * width] = True
    ours, theirs = (
        np.flatnonzero(mask)[np.argsort(-score[mask], kind="stable")] for mask in (loaded, ~loaded)
    )
    result = np.empty(score.size)
    bounds = zip((0, *fit.totals), (*fit.totals, score.size), strict=True)
    counts = np.diff((0, *fit.loaded_rank, ours.size))
    for (first, last), count in zip(bounds, counts, strict=True):
        own = np.zeros(last - first, bool)
        own[((np.arange(count) + 0.5) * own.size / max(count, 1)).astype(int)] = True
        result[ours[:count]], result[theirs[: own.size - count]] = (
            alphas[first:last][own],
            alphas[first:last][~own],
        )
        ours, theirs = ours[count:], theirs[own.size - count :]
    return result.reshape(shape)


def _scores(shape: tuple[int, int, int], fit: _Fit) -> np.ndarray:
    """How slow a unit is, up to order: effects of layer and head, and the place within the head."""
    layers, heads, channels = shape
    layer = fit.layer_spread * _logit(_spread(fit.seed, layers))[:, None, None]
    head = fit.head_spread * _logit(_spread(fit.seed, layers * heads)).reshape(layers, heads, 1)
    score = layer + head + _logit(_spread(fit.seed, *shape))
    if fit.longest_head:
        width = heads // RANKS
        group = score[:, fit.rank * width : (fit.rank + 1) * width]
        slowest = group[np.unravel_index(group.sum(axis=2).argmax(), group.shape[:2])]
        slowest[np.argsort(-slowest, kind="stable")[: fit.longest_head]] += 100
    return score


def _quantiles(fit: _Fit, units: int) -> np.ndarray:
    """`units` alphas in descending order, with exactly `fit.totals` of them past each threshold."""
    totals = zip(fit.totals, THRESHOLDS, strict=True)
    cuts = [(1 - n / units, EPSILON ** (1 / w)) for n, w in totals]
    fractions, alphas = zip(*sorted([*fit.alphas, *cuts]), strict=True)
    at = (np.arange(units)[::-1] + 0.5) / units
    return 1 / (1 + np.exp(-np.interp(at, fractions, _logit(np.array(alphas)))))


def _spread(seed: int, *shape: int) -> np.ndarray:
    """The midpoints of an even grid over (0, 1) along the last axis, shuffled alike on any machine.

    The order is that of splitmix64 hashes: numpy's own generators may change between versions.
    """
    first = (seed << 32) + 1
    x = np.arange(first, first + np.prod(shape), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return (x.reshape(shape).argsort(-1).argsort(-1) + 0.5) / shape[-1]


def _logit(p: np.ndarray) -> np.ndarray:
    return np.log(p / (1 - p))


def _kimi() -> ModelConfig:
    """Kimi-Linear-48B-A3B-Instruct."""
    attention = (3, 7, 11, 15, 19, 23, 26)
    return ModelConfig(
        family="kimi_linear",
        vocab_size=163840,
        hidden_size=2304,
        num_layers=27,
        layer_kinds=tuple("attention" if i in attention else "delta" for i in range(27)),
        ffn_kinds=("dense",) + ("moe",) * 26,
        norm_eps=1e-5,
        zero_centred_norm=False,
        dense_intermediate=9216,
        delta=DeltaConfig("kda", 32, 32, 128, 128, gate_rank=128, norm_eps=1e-5),
        attention=MLAConfig(
            num_heads=32, nope_dim=128, shared_dim=64, value_dim=128, latent_dim=512
        ),
        moe=MoEConfig(256, 8, 1024, 1024, "sigmoid", True, 2.446, 1, 1, shared_gate=False),
        dtype="bfloat16",
        max_context=1048576,
        bos_token_id=163584,
        eos_token_ids=(163586,),
        pad_token_id=163839,
    )


def _qwen() -> ModelConfig:
    """Qwen3-Next-80B-A3B-Instruct."""
    return ModelConfig(
        family="qwen3_next",
        vocab_size=151936,
        hidden_size=2048,
        num_layers=48,
        layer_kinds=("delta", "delta", "delta", "attention") * 12,
        ffn_kinds=("moe",) * 48,
        norm_eps=1e-6,
        zero_centred_norm=True,
        dense_intermediate=None,
        delta=DeltaConfig("gdn", 16, 32, 128, 128, norm_eps=1e-6),
        attention=GQAConfig(
            num_heads=16, num_kv_heads=2, head_dim=256, rope_dim=64, rope_theta=1e7, norm_eps=1e-6
        ),
        moe=MoEConfig(512, 10, 512, 512, "softmax", True, 1.0, 1, 1, shared_gate=True),
        dtype="bfloat16",
        max_context=262144,
        bos_token_id=151643,
        eos_token_ids=(151645,),
        pad_token_id=None,
    )
