"""Hybrid linear-attention models in JAX, served with a prefix cache of decay-aware state
checkpoints (DASC).

import dasc_jax as dj
model = dj.load_model("checkpoints/kimi-linear-mini")
logits, cache = dj.forward(model, tokens)
plan = dj.make_plan(dj.retention_horizons(model), w_max=16)
packed = dj.pack(plan, cache)
engine = dj.Engine(model, dj.EngineConfig(max_running=4))
"""

from dasc_jax.checkpoint_state import Packed, unpack
from dasc_jax.config import DascConfig, ModelConfig
from dasc_jax.engine.config import EngineConfig
from dasc_jax.engine.engine import Engine
from dasc_jax.engine.request import Request, RequestResult, SamplingParams
from dasc_jax.horizons import retention_horizons
from dasc_jax.layout import account
from dasc_jax.model import (
    Cache,
    Model,
    forward,
    generate,
    init_state,
    load_model,
    pack,
    random_model,
)
from dasc_jax.plan import SelectionPlan, load_plan, make_plan, random_plan
from dasc_jax.published import published_profile
from dasc_jax.types import AttentionPages, RecurrentState

__all__ = [
    "AttentionPages",
    "Cache",
    "DascConfig",
    "Engine",
    "EngineConfig",
    "Model",
    "ModelConfig",
    "Packed",
    "RecurrentState",
    "Request",
    "RequestResult",
    "SamplingParams",
    "SelectionPlan",
    "account",
    "forward",
    "generate",
    "init_state",
    "load_model",
    "load_plan",
    "make_plan",
    "pack",
    "published_profile",
    "random_model",
    "random_plan",
    "retention_horizons",
    "unpack",
]
