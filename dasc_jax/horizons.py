"""Retention horizons: how long a unit of recurrent state remembers, read from the weights alone.

Section 3.3 and 3.4 of the DASC paper. A unit is a head (GDN) or a (head, key channel) pair (KDA).
Everything here runs on the host in float64: it is done once per checkpoint, and a plan hangs on it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Bool, Float, Float64, Shaped

from dasc_jax.config import ModelConfig

GATE_INPUT = -0.3
"""`a` of Eq. 2: the gate input at which static horizons are taken."""

EPSILON = 1e-3
"""`eps` of Eq. 3: the decay factor that counts as forgotten."""


class HorizonError(ValueError):
    """A decay or a horizon that is zero, infinite or not a number; names the layer and the unit."""


def decay(
    A_log: Shaped[np.ndarray, "H"], dt_bias: Shaped[np.ndarray, "H *K"], a: float = GATE_INPUT
) -> Float64[np.ndarray, "H *K"]:
    """Log decay per token, g = -exp(A_log) softplus(a + dt_bias) (Eq. 2).

    `A_log` has one value a head; `dt_bias`, [H] (GDN) or [H, K] (KDA), gives the result its shape.
    """
    x = a + np.asarray(dt_bias, np.float64)
    rate = np.exp(np.asarray(A_log, np.float64))
    return -rate.reshape(rate.shape + (1,) * (x.ndim - 1)) * np.logaddexp(0.0, x)


def horizons(
    g: Float64[np.ndarray, "H *K"], eps: float = EPSILON, layer: int | str = "?"
) -> Float64[np.ndarray, "H *K"]:
    """Tokens until the decay factor exp(g n) falls to `eps`: H = ln(eps) / g (Eq. 3).

    Raises HorizonError, naming `layer` and the unit, where g is zero, positive, infinite or NaN.
    """
    if not 0.0 < eps < 1.0:
        raise HorizonError(f"eps={eps} must lie strictly between 0 and 1")
    bad = ~(np.isfinite(g) & (g < 0))
    if bad.any():
        raise HorizonError(_complaint("log decay g", g, bad, layer))
    with np.errstate(over="ignore"):
        h = np.log(eps) / g
    return check_horizons([h], [layer])[0]


def retention_horizons(
    source: Any,
    config: ModelConfig | None = None,
    *,
    a: float = GATE_INPUT,
    eps: float = EPSILON,
) -> list[Float64[np.ndarray, "H *K"]]:
    """Static horizons H_s of a model: one array per recurrent layer, [H] (GDN) or [H, K] (KDA).

    Heads stand in the released order, whatever order the model computes them in.

    `source` is a model (anything with `.params` and `.config`), or the flat parameter mapping
    together with its `config`; only `layers.{i}.mixer.decay.A_log` and `.dt_bias` are read.
    Raises HorizonError for a degenerate decay, KeyError for a missing tensor, ValueError for a
    wrong shape.
    """
    params: Mapping[str, Any] = getattr(source, "params", source)
    config = config if config is not None else getattr(source, "config", None)
    if config is None:
        raise ValueError("retention_horizons of bare parameters needs their config")
    heads, key_dim = config.delta.num_value_heads, config.delta.key_dim
    shape = (heads, key_dim) if config.delta.kind == "kda" else (heads,)
    order = getattr(source, "order", None)
    result = []
    for row, layer in enumerate(config.recurrent_layers):
        prefix = f"layers.{layer}.mixer.decay."
        A_log, dt_bias = (_whole(params[prefix + name]) for name in ("A_log", "dt_bias"))
        if A_log.shape != (heads,) or dt_bias.shape != shape:
            raise ValueError(
                f"layer {layer}: A_log {A_log.shape} and dt_bias {dt_bias.shape}"
                f" should be {(heads,)} and {shape}"
            )
        if order is not None:
            back = np.argsort(order.value_heads(row))
            A_log, dt_bias = A_log[back], dt_bias[back]
        result.append(horizons(decay(A_log, dt_bias, a), eps, layer))
    return result


def _whole(value: Any) -> np.ndarray:
    """A tensor on the host; where its parts lie with several processes, each gets all of it."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        value = multihost_utils.process_allgather(value, tiled=True)
    return np.asarray(value)


def check_horizons(
    h: Sequence[np.ndarray], layers: Sequence[int | str] | None = None
) -> list[Float64[np.ndarray, "H *K"]]:
    """`h` as float64 arrays, after checking that they can be planned with.

    Raises HorizonError when there is no layer, when layers differ in shape, when an array is
    neither [H] nor [H, K], or when a horizon is not positive and finite (naming layer and unit).
    """
    arrays = [np.asarray(x, np.float64) for x in h]
    if not arrays:
        raise HorizonError("no recurrent layer: there is nothing to select")
    for layer, x in zip(layers or range(len(arrays)), arrays, strict=True):
        if x.ndim not in (1, 2) or x.shape != arrays[0].shape or not x.size:
            raise HorizonError(
                f"layer {layer}: horizons of shape {x.shape}; expected [H] or [H, K],"
                f" the same in every layer (the first has {arrays[0].shape})"
            )
        bad = ~(np.isfinite(x) & (x > 0))
        if bad.any():
            raise HorizonError(_complaint("horizon", x, bad, layer))
    return arrays


def empirical_horizons(
    g: Float[np.ndarray, "T H *K"],
    valid: Bool[np.ndarray, "T"] | None = None,
    eps: float = EPSILON,
) -> Float64[np.ndarray, "H *K"]:
    """Horizon of the mean observed log decay over the tokens of a prefix, H_e (Eq. 4).

    `g` are observed log decays; `valid` marks the tokens that are no padding.
    """
    g = np.asarray(g, np.float64)
    g = g if valid is None else g[valid]
    if not len(g):
        raise HorizonError("empirical horizons of a prefix without a valid token")
    return horizons(g.mean(axis=0), eps)


def state_magnitude(
    temporal: Float[np.ndarray, "*B H K V"], kind: str
) -> Float64[np.ndarray, "*B H"] | Float64[np.ndarray, "*B H K"]:
    """M_S (Eq. 5): Frobenius norm of a head's state (GDN), 2-norm of a channel's row (KDA)."""
    rows = np.linalg.norm(np.asarray(temporal, np.float64), axis=-1)
    return rows if kind == "kda" else np.linalg.norm(rows, axis=-1)


def readout_magnitude(
    temporal: Float[np.ndarray, "*B H K V"], query: Float[np.ndarray, "*B H K"], kind: str
) -> Float64[np.ndarray, "*B H"] | Float64[np.ndarray, "*B H K"]:
    """M_R (Eq. 5): 2-norm of what the final query reads from each unit.

    GDN: of S_h^T q_h. KDA: of the row S_{h,k} q_{h,k}, a channel's activity rather than its net
    share of the sum. `query` is normalised and scaled as the recurrence uses it, one a value head.
    """
    temporal, query = np.asarray(temporal, np.float64), np.asarray(query, np.float64)
    if kind == "kda":
        return np.abs(query) * np.linalg.norm(temporal, axis=-1)
    return np.linalg.norm(np.einsum("...kv,...k->...v", temporal, query), axis=-1)


def spearman(x: Shaped[np.ndarray, "..."], y: Shaped[np.ndarray, "..."]) -> float:
    """Spearman's rank correlation over all units of two equally shaped arrays.

    Ties share their mean rank. NaN when either side is constant: there is no order to compare.
    """
    if x.shape != y.shape:
        raise ValueError(f"cannot correlate shapes {x.shape} and {y.shape}")
    rx, ry = (_ranks(np.ravel(v)) for v in (x, y))
    rx, ry = rx - rx.mean(), ry - ry.mean()
    scale = np.sqrt((rx @ rx) * (ry @ ry))
    return float(rx @ ry / scale) if scale > 0 else float("nan")


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def _complaint(what: str, values: np.ndarray, bad: np.ndarray, layer: int | str) -> str:
    first = tuple(int(i) for i in np.argwhere(bad)[0])
    unit = f"head {first[0]}" + (f", channel {first[1]}" if len(first) == 2 else "")
    more = int(bad.sum()) - 1
    return (
        f"layer {layer}, {unit}: {what} is {values[first]}"
        + (f" (and {more} more units of this layer)" if more else "")
        + "; retention horizons need finite decays below zero"
    )
