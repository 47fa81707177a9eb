"""Models that eight ranks can share, for tests that need eight devices."""

import dataclasses
from functools import lru_cache

import jax
import numpy as np
import pytest

from dasc_jax.config import GQAConfig, ModelConfig
from dasc_jax.model import Model, shard_model
from dasc_jax.parallel import make_mesh
from dasc_jax.weights import param_specs
from tests.checkpoints import ROOT
from tests.engines import GOLDEN

DEVICES = 8
FORCED = f"--xla_force_host_platform_device_count={DEVICES} --xla_backend_optimization_level=0"
"""Flags that make the CPU so many devices, and programs that run once quick to compile."""

needs_devices = pytest.mark.skipif(
    jax.device_count() < DEVICES, reason=f"needs {DEVICES} devices: XLA_FLAGS={FORCED}"
)

RELEASED = {"kimi_linear": "kimi-linear-48b", "qwen3_next": "qwen3-next-80b"}
WIDE = ("kimi_linear", "qwen3_next")


def wide_config(family: str) -> ModelConfig:
    """A golden model with heads for eight ranks and a vocabulary that none of them divides."""
    config = ModelConfig.from_hf(GOLDEN / f"{family}_a")
    ratio = config.delta.num_value_heads // config.delta.num_key_heads
    delta = dataclasses.replace(
        config.delta, num_key_heads=8, num_value_heads=8 * ratio, key_dim=16, value_dim=16
    )
    attention = dataclasses.replace(config.attention, num_heads=8)
    return dataclasses.replace(
        config,
        vocab_size=251,
        num_layers=3,
        layer_kinds=("delta", "attention", "delta"),
        ffn_kinds=config.ffn_kinds[:1] + ("moe",) * 2,
        delta=delta,
        attention=attention,
    )


def released_config(family: str) -> ModelConfig:
    """The released numbers of heads and experts in two layers of small width."""
    config = ModelConfig.from_hf(ROOT / "checkpoints" / "configs" / f"{RELEASED[family]}.json")
    delta = dataclasses.replace(
        config.delta, key_dim=8, value_dim=8, gate_rank=config.delta.gate_rank and 8
    )
    small = (
        {"head_dim": 16, "rope_dim": 4}
        if isinstance(config.attention, GQAConfig)
        else {"nope_dim": 8, "shared_dim": 4, "value_dim": 8, "latent_dim": 16}
    )
    assert config.moe is not None
    moe = dataclasses.replace(config.moe, intermediate=8, shared_intermediate=16)
    return dataclasses.replace(
        config,
        vocab_size=128,
        hidden_size=32,
        num_layers=2,
        layer_kinds=("delta", "attention"),
        ffn_kinds=("moe", "moe"),
        delta=delta,
        attention=dataclasses.replace(config.attention, **small),
        moe=moe,
        bos_token_id=None,
        eos_token_ids=(),
        pad_token_id=None,
    )


@lru_cache
def whole_model(family: str, kind: str = "wide") -> Model:
    """On one device, in float32, with weights that numpy draws: nothing to compile."""
    config = {"wide": wide_config, "released": released_config}[kind](family)
    rng = np.random.default_rng(0)
    params = {
        path: jax.device_put(_drawn(spec, rng))
        for path, spec in param_specs(config, "float32").items()
    }
    return Model(config, params, None, "float32")


def _drawn(spec: jax.ShapeDtypeStruct, rng: np.random.Generator) -> np.ndarray:
    values = rng.standard_normal(spec.shape).astype(np.float32)
    return 0.5 + 0.1 * values if values.ndim == 1 else values * spec.shape[-2] ** -0.5


@lru_cache
def model_on(family: str, tp: int, kind: str = "wide") -> Model:
    """The same model over the first `tp` devices."""
    return shard_model(whole_model(family, kind), make_mesh(tp))
