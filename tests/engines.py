"""Engines and requests that several tests share: built once a session, flushed between uses."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from dasc_jax.config import DascConfig
from dasc_jax.engine.config import EngineConfig
from dasc_jax.engine.engine import Engine
from dasc_jax.engine.request import Request, RequestResult, SamplingParams
from dasc_jax.model import Model, _jitted, load_model
from dasc_jax.prefix_cache import check

GOLDEN = Path(__file__).parent / "golden"
MODELS = ("kimi_linear_a", "qwen3_next_a")
VOCABULARY = 256


@lru_cache
def golden_model(name: str, dtype: str = "float32") -> Model:
    """One of the two golden checkpoints."""
    return load_model(GOLDEN / name, dtype)


@lru_cache
def _engine(name: str, config: EngineConfig) -> Engine:
    return Engine(golden_model(name), config)


def forget() -> None:
    """Let go of every engine built so far, and of its compiled steps."""
    _engine.cache_clear()
    _jitted.cache_clear()


def engine(name: str, **options: object) -> Engine:
    """A flushed engine without a thread; options are fields of EngineConfig or of DascConfig."""
    dasc = {k: options.pop(k) for k in ("w_max", "policy", "quantization") if k in options}
    defaults = {"max_context": 512, "max_running": 4, "prefill_tokens": 256, "strict_compile": True}
    config = EngineConfig(dasc=DascConfig(**dasc), **{**defaults, **options})
    made = _engine(name, config)
    assert made.flush_cache()
    made.loop.residency.counters.clear()
    made.loop.counters.clear()
    return made


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Random token ids without the special ones."""
    return tuple(np.random.default_rng(seed).integers(3, VOCABULARY, length).tolist())


def request(key: str, tokens: Sequence[int], max_tokens: int = 3, **options: object) -> Request:
    """A greedy request that keeps the whole distribution of every generated token."""
    sampling = {
        k: options.pop(k) for k in ("temperature", "seed", "top_p", "top_k") if k in options
    }
    params = SamplingParams(max_tokens, ignore_eos=True, logprobs=VOCABULARY, **sampling)
    return Request(key, tuple(tokens), params, **options)


def run(engine: Engine, *requests: Request) -> list[RequestResult]:
    """Run requests together; afterwards the cache must be sound, with nothing left in use."""
    results = engine.generate(requests)
    check(engine.loop.residency.cache)
    assert engine.loop.residency.cache.counts.idle
    return results


def distribution(result: RequestResult) -> np.ndarray:
    """Log-probabilities `[generated, vocabulary]` of a request made by `request`."""
    return np.array([[top[t] for t in range(VOCABULARY)] for _, top in result.logprobs])
