"""One token of several requests for `delta_decode` and `delta_step`: random, with hostile rows.

Row 1 is padding (slot 0) and holds NaN. Decays include 1, exp(-50) and 0 (a log decay of -inf).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.kernels import cases
from tests.kernels.cases import Inputs, Segment, assert_same_bits, distance

DIM, LAYERS = 128, 2
STATE_TOLERANCE = 2e-6
LOG_DECAYS = (0.0, -1e-4, -0.3, -5.0, -50.0, -np.inf)


class StepCase(NamedTuple):
    """Arguments of an op without its statics: its tokens, the pool `[L, S, H, K, V]`, the slots."""

    tokens: tuple[np.ndarray, ...]
    pool: np.ndarray
    slots: np.ndarray


def decode_case(
    rng: np.random.Generator,
    kind: str,
    heads: int = 32,
    batch: int = 5,
    group: int = 1,
    dtype=jnp.float32,
) -> StepCase:
    """Arguments of `delta_decode`; `group` value heads share a key head."""
    q, k = rng.normal(size=(2, batch, heads // group, DIM)) * np.exp(
        rng.normal(size=(2, batch, 1, 1))
    )
    v, beta = rng.normal(size=(batch, heads, DIM)), rng.random((batch, heads))
    g = rng.choice(LOG_DECAYS, size=(batch, heads, DIM) if kind == "kda" else (batch, heads))
    q, k, v = (np.array(jnp.asarray(x, dtype)) for x in (q, k, v))
    tokens = (q, k, v, g.astype(np.float32), beta.astype(np.float32))
    return StepCase(_poisoned(tokens), *_pool(rng, heads, batch))


def step_case(
    rng: np.random.Generator,
    kind: str,
    heads: int = 32,
    batch: int = 5,
    group: int = 1,
    dtype=jnp.float32,
) -> StepCase:
    """Arguments of `delta_step`, whose gates reach over both ends of softplus."""
    channels = (2 * (heads // group) + heads) * DIM
    units = (heads, DIM) if kind == "kda" else (heads,)
    qkv, gate = rng.normal(size=(batch, channels)), rng.normal(size=(batch, heads, DIM))
    raw = rng.choice([-40.0, -3.0, 0.0, 2.0, 30.0], size=(batch, *units))
    beta, weight = rng.normal(size=(batch, heads)), 1 + 0.1 * rng.normal(size=DIM)
    A_log, dt_bias = rng.normal(size=heads), rng.normal(size=units)
    qkv, raw, beta, gate, weight = (
        np.array(jnp.asarray(x, dtype)) for x in (qkv, raw, beta, gate, weight)
    )
    qkv, raw, beta, gate = _poisoned((qkv, raw, beta, gate))
    weights = (A_log.astype(np.float32), dt_bias.astype(np.float32))
    return StepCase((qkv, raw, beta, *weights, gate, weight), *_pool(rng, heads, batch))


def _poisoned(tokens: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    for x in tokens:
        if len(x) > 1:
            x[1] = np.nan
    return tokens


def _pool(rng: np.random.Generator, heads: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
    pool = rng.normal(size=(LAYERS, batch + 3, heads, DIM, DIM)).astype(np.float32)
    slots = 1 + rng.permutation(batch + 2)[:batch]
    if batch > 1:
        slots[1] = 0
    return pool, slots.astype(np.int32)


def check_decode(case: StepCase, pool, o, *, layer: int, o_tolerance: float = 2e-6) -> None:
    """Against float64: states, o to `o_tolerance`, and every slot without a request bit for bit."""
    truth = _check_tokens(case.tokens, case, np.asarray(pool), layer)
    assert distance(np.asarray(o), truth) <= o_tolerance
    assert not np.asarray(o)[case.slots == 0].any()


def check_states(case: StepCase, pool, *, layer: int) -> np.ndarray:
    """The same of the states behind `delta_step`. Returns the o that its norm is to be taken of."""
    qkv, raw, beta, A_log, dt_bias, _, _ = _finite(case.tokens)
    keys = (qkv.shape[1] - case.pool.shape[2] * DIM) // 2
    q, k, v = np.split(qkv, [keys, 2 * keys], axis=1)
    q, k, v = (x.reshape(len(x), -1, DIM) for x in (q, k, v))
    rate = np.exp(A_log)[:, None] if raw.ndim == 3 else np.exp(A_log)
    g = -rate * np.logaddexp(0.0, raw + dt_bias)
    return _check_tokens((q, k, v, g, _sigmoid(beta)), case, np.asarray(pool), layer)


def output(case: StepCase, o: np.ndarray, eps: float) -> np.ndarray:
    """The gated output norm in float64, from the casts that both families share."""
    *_, gate, weight = _finite(case.tokens)
    o = np.asarray(o, np.float64)
    o = o / np.sqrt((o**2).mean(-1, keepdims=True) + eps) * weight
    act = _sigmoid(gate) if case.tokens[1].ndim == 3 else gate * _sigmoid(gate)
    return np.where((case.slots > 0)[:, None, None], o * act, 0.0)


def _finite(tokens: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    return tuple(np.nan_to_num(np.asarray(x, np.float64)) for x in tokens)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _check_tokens(
    tokens: tuple[np.ndarray, ...], case: StepCase, pool: np.ndarray, layer: int
) -> np.ndarray:
    o = np.zeros((len(case.slots), *pool.shape[2:3], DIM))
    for row, slot in enumerate(case.slots):
        if slot:
            one = Inputs(*(np.asarray(x, np.float64)[row : row + 1] for x in tokens))
            truth = cases.oracle(one, [Segment(1)], case.pool[layer, slot][None])
            assert distance(pool[layer, slot], truth.final[0]) <= STATE_TOLERANCE
            o[row] = truth.o[0]
    check_untouched(case, pool, layer=layer)
    return o


def check_untouched(case: StepCase, pool: np.ndarray, *, layer: int) -> None:
    """Slots without a request, slot 0 and other layers keep their bits."""
    untouched = np.ones(pool.shape[:2], bool)
    untouched[layer, case.slots[case.slots > 0]] = False
    assert_same_bits(pool[untouched], case.pool[untouched])


def decode_specs(kind: str, heads: int, key_heads: int, batch: int, dtype=jnp.bfloat16):
    """Shapes of `delta_decode` on a pool of 20 layers and 128 slots."""
    shape, units = jax.ShapeDtypeStruct, (heads, DIM) if kind == "kda" else (heads,)
    keys = shape((batch, key_heads, DIM), dtype)
    gates = (shape((batch, *units), jnp.float32), shape((batch, heads), jnp.float32))
    return (keys, keys, shape((batch, heads, DIM), dtype), *gates, *_pool_specs(heads, batch))


def step_specs(kind: str, heads: int, key_heads: int, batch: int, dtype):
    """Shapes of `delta_step` on a pool of 20 layers and 128 slots."""
    shape, units = jax.ShapeDtypeStruct, (heads, DIM) if kind == "kda" else (heads,)
    return (
        shape((batch, (2 * key_heads + heads) * DIM), dtype),
        shape((batch, *units), dtype),
        shape((batch, heads), dtype),
        shape((heads,), jnp.float32),
        shape(units, jnp.float32),
        shape((batch, heads, DIM), dtype),
        shape((DIM,), dtype),
        *_pool_specs(heads, batch),
    )


def _pool_specs(heads: int, batch: int):
    pool = jax.ShapeDtypeStruct((20, 128, heads, DIM, DIM), jnp.float32)
    return pool, jax.ShapeDtypeStruct((batch,), jnp.int32)
