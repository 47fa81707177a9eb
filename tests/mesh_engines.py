"""Engines on eight forced devices whose checkpoints really travel: for `test_parallel_engine`."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from dasc_jax.balance import Placement
from dasc_jax.config import DascConfig
from dasc_jax.engine.config import EngineConfig
from dasc_jax.engine.engine import Engine
from dasc_jax.engine.request import Request, RequestResult, SamplingParams
from dasc_jax.model import Model, shard_model
from dasc_jax.parallel import make_mesh
from dasc_jax.prefix_cache import check
from tests.many_devices import whole_model

W_MAX = 16
PREFIX = 128
"""Tokens that the prompts share, and what the second of them hits."""
ROUNDING = 2e-4
"""Of log-probabilities in float32: sums over ranks, and over chunks cut elsewhere."""


@lru_cache
def uneven_model(family: str) -> Model:
    """On one device, with two heavy heads a layer, the same in both: no order of heads makes ranks
    even at tp 8, and the released one does not at any."""
    model = whole_model(family)
    rng, delta = np.random.default_rng(2), model.config.delta
    horizons = np.full(delta.num_value_heads, 6.0)
    horizons[: delta.num_value_heads // 4] = 25.0
    params = dict(model.params)
    for layer in model.config.recurrent_layers:
        for name in ("A_log", "dt_bias"):
            path = f"layers.{layer}.mixer.decay.{name}"
            shape = params[path].shape
            # Eq. 2 and 3 at a gate input of -0.3, spread by what dt_bias adds to it.
            drawn = (
                np.log(-np.log(1e-3) / (np.log(2) * horizons))
                if name == "A_log"
                else 0.3 + 0.5 * rng.standard_normal(shape)
            )
            params[path] = jnp.asarray(drawn.reshape(shape), jnp.float32)
    return replace(model, params=params)


def config_of(placement: Placement = "hybrid", **options: object) -> EngineConfig:
    """Two requests at once, and the fewest steps to compile that `wr` lets be."""
    dasc = DascConfig(w_max=W_MAX, placement=placement)
    return EngineConfig(
        dasc=dasc,
        max_context=256,
        max_running=2,
        prefill_tokens=128,
        prefill_requests=1,
        strict_compile=True,
        **options,
    )


@lru_cache
def alone(family: str) -> Engine:
    """On one device."""
    return Engine(uneven_model(family), config_of())


@lru_cache(maxsize=3)
def over(family: str, tp: int, ordered: bool) -> Engine:
    """Over `tp` ranks, heads as released or in the order that balances them.

    The former takes `off` and `storage`; which of them, `adopt` says.
    """
    model = shard_model(uneven_model(family), make_mesh(tp))
    return Engine(model, config_of("hybrid" if ordered else "storage"))


def forget() -> None:
    """Let go of every engine built so far, and of its compiled steps."""
    alone.cache_clear()
    over.cache_clear()


def adopted(
    engine: Engine, policy: str, quantization: str | None = None, placement: str = "hybrid"
) -> Engine:
    """The engine with an empty cache in this form; `dense` keeps every unit."""
    dasc = DascConfig(W_MAX, policy=policy, quantization=quantization, placement=placement)  # type: ignore
    engine.adopt(None, dasc)
    return engine


def prompts(family: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two of a common prefix."""
    vocabulary = whole_model(family).config.vocab_size
    drawn = np.random.default_rng(3).integers(3, vocabulary, PREFIX + 44).tolist()
    return tuple(drawn[: PREFIX + 22]), tuple(drawn[:PREFIX] + drawn[PREFIX + 22 :])


def serve(engine: Engine, *wanted: Sequence[int], policy: str = "nr") -> list[RequestResult]:
    """One after the other, greedily, with the whole distribution of every token."""
    results = []
    for prompt in wanted:
        sampling = SamplingParams(3, ignore_eos=True, logprobs=engine.model.config.vocab_size)
        request = Request(f"r{len(results)}", tuple(prompt), sampling, state_policy=policy)
        results += engine.generate([request])
        check(engine.loop.residency.cache)
    assert engine.stats()["compiled_after_warmup"] == 0
    return results


def distribution(result: RequestResult) -> np.ndarray:
    """Log-probabilities `[generated, vocabulary]`."""
    return np.array([[top[t] for t in sorted(top)] for _, top in result.logprobs or ()])


def same(one: RequestResult, other: RequestResult) -> None:
    """The same tokens, as likely as in the other result."""
    assert one.tokens == other.tokens
    np.testing.assert_allclose(distribution(one), distribution(other), rtol=0, atol=ROUNDING)


def device_bytes(tree: object) -> list[int]:
    """Bytes of all arrays of a tree on every device that has a part of them."""
    held: dict[object, int] = {}
    for array in jax.tree.leaves(tree):
        for shard in array.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return list(held.values())
