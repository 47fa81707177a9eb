"""The trained checkpoints that come with the repository are whole, small, and really retrieve."""

from pathlib import Path

import numpy as np
import pytest

from dasc_jax.config import DascConfig
from dasc_jax.engine.config import EngineConfig
from dasc_jax.engine.engine import Engine
from dasc_jax.engine.request import Request, SamplingParams
from dasc_jax.evals.ruler import Generator
from dasc_jax.horizons import retention_horizons
from dasc_jax.model import load_model
from dasc_jax.plan import make_plan
from dasc_jax.training.card import check_sums
from dasc_jax.training.minis import MINIS

CHECKPOINTS = Path(__file__).resolve().parent.parent / "checkpoints"


@pytest.mark.parametrize("name", MINIS)
def test_every_file_is_the_published_one(name: str) -> None:
    assert check_sums(CHECKPOINTS / name) == []


def test_all_checkpoints_together_stay_small() -> None:
    assert sum(file.stat().st_size for file in CHECKPOINTS.rglob("*") if file.is_file()) < 28e6


@pytest.mark.parametrize("name", MINIS)
def test_a_mini_loads_with_a_tokenizer_of_its_vocabulary(name: str) -> None:
    model = load_model(CHECKPOINTS / name)
    assert model.tokenizer is not None
    assert len(model.tokenizer) == model.config.vocab_size
    text = "Catherine's 4,352 essays -- naïve?"
    assert model.tokenizer.decode(model.tokenizer.encode(text)) == text


@pytest.mark.parametrize("name", MINIS)
def test_a_mini_has_work_for_every_threshold(name: str) -> None:
    horizons = retention_horizons(load_model(CHECKPOINTS / name))
    units = np.concatenate([h.ravel() for h in horizons])
    kept = [make_plan(horizons, w).total for w in (0, 16, 512)]
    assert units.size == kept[0] > kept[1] > kept[2] > 0


@pytest.mark.parametrize("name", [MINIS[0], pytest.param(MINIS[1], marks=pytest.mark.slow)])
def test_a_mini_finds_a_number_among_four_cold_and_cached(name: str) -> None:
    model = load_model(CHECKPOINTS / name, "float32")
    assert model.tokenizer is not None
    asked = Generator(model.tokenizer).instance("niah_multikey_1", 600, 0)
    prompt = tuple(model.tokenizer.encode(asked.prompt))
    # One bucket of prefill keeps the compilation short.
    sizes = {"max_context": 640, "max_running": 1, "prefill_tokens": 64}
    engine = Engine(model, EngineConfig(DascConfig(w_max=0, policy="dense"), **sizes))
    for cached in (0, (len(prompt) - 1) // 64 * 64):
        (result,) = engine.generate([Request("a", prompt, SamplingParams(max_tokens=16))])
        assert result.cached_tokens == cached and result.finish_reason == "stop"
        said = model.tokenizer.decode(result.tokens, skip_special_tokens=True)
        assert said.strip() == asked.references[0]
