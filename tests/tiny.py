"""A model of two layers that compiles in seconds, reads bytes, and engines of one's own over it."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

from dasc_jax.config import DascConfig, ModelConfig
from dasc_jax.engine.config import EngineConfig
from dasc_jax.engine.engine import Engine
from dasc_jax.model import Model, random_model
from dasc_jax.tokenizer import load_tokenizer, write_byte_tokenizer
from tests.engines import golden_model

VOCABULARY = 259
EOS = 258


def tiny_config(family: str = "kimi_linear_a") -> ModelConfig:
    """One recurrent and one attention layer of a golden model, without experts."""
    return replace(
        golden_model(family).config,
        vocab_size=VOCABULARY,
        num_layers=2,
        layer_kinds=("delta", "attention"),
        ffn_kinds=("dense", "dense"),
        dense_intermediate=64,
        moe=None,
        eos_token_ids=(EOS,),
    )


@lru_cache
def tiny_model(family: str = "kimi_linear_a", dtype: str = "float32") -> Model:
    """Random weights and the byte tokenizer: token b is byte b."""
    with TemporaryDirectory() as directory:
        write_byte_tokenizer(Path(directory))
        tokenizer = load_tokenizer(directory)
    return replace(random_model(tiny_config(family), dtype), tokenizer=tokenizer)


def tiny_engine(**options: object) -> Engine:
    """A new engine; options are fields of EngineConfig or of DascConfig."""
    dasc = {k: options.pop(k) for k in ("w_max", "policy", "quantization") if k in options}
    defaults = {"max_context": 256, "max_running": 4, "prefill_tokens": 128, "strict_compile": True}
    config = EngineConfig(dasc=DascConfig(**dasc), **{**defaults, **options})
    return Engine(tiny_model(), config)
