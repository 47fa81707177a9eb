"""The synthetic profiles reproduce the statistics that the DASC paper prints, every time alike."""

import math
import time
from pathlib import Path

import numpy as np
import pytest

from dasc_jax.balance import storage_schedule
from dasc_jax.config import ModelConfig
from dasc_jax.layout import account
from dasc_jax.plan import make_plan
from dasc_jax.published import (
    PUBLISHED,
    published_config,
    published_decay_weights,
    published_profile,
)

KIMI, QWEN = PUBLISHED
BUDGET = {KIMI: 694_681_600, QWEN: 1_236_271_104}
CONFIGS = Path(__file__).resolve().parent.parent / "checkpoints" / "configs"


def alphas(name):
    _, h = published_profile(name)
    return np.exp(np.log(1e-3) / np.concatenate([x.ravel() for x in h]))


@pytest.mark.parametrize("name", PUBLISHED)
def test_configuration_is_the_released_one(name):
    assert published_config(name) == ModelConfig.from_hf(CONFIGS / f"{name}.json")


@pytest.mark.parametrize(("name", "shape"), [(KIMI, (32, 128)), (QWEN, (32,))])
def test_decay_weights_have_the_released_shapes_and_are_the_same_every_time(name, shape):
    weights = published_decay_weights(name)
    assert len(weights) == len(published_config(name).recurrent_layers)
    for (A_log, dt_bias), again in zip(weights, published_decay_weights(name), strict=True):
        assert A_log.shape == (32,) and dt_bias.shape == shape
        assert A_log.dtype == dt_bias.dtype == np.float32
        np.testing.assert_array_equal(dt_bias, again[1])
    start = time.perf_counter()
    published_profile(name)
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize(
    ("name", "quartiles"), [(KIMI, (0.170, 0.471, 0.774)), (QWEN, (0.894, 0.969, 0.997))]
)
def test_pooled_alpha_has_the_published_quartiles(name, quartiles):
    np.testing.assert_allclose(np.quantile(alphas(name), [0.25, 0.5, 0.75]), quartiles, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "w_max", "retained", "ratio"),
    [(KIMI, 16, 29_364, 2.63), (KIMI, 512, 144, 28.04),
     (QWEN, 16, 1_045, 1.10), (QWEN, 512, 448, 2.48)],
)  # fmt: skip
def test_retained_units_and_complete_ratio_are_the_published_ones(name, w_max, retained, ratio):
    config, h = published_profile(name)
    plan = make_plan(h, w_max)
    assert plan.total == retained
    assert account(config, plan).c_ckpt == pytest.approx(ratio, abs=0.005)


def test_kimi_at_512_has_113_of_its_144_units_in_one_head():
    _, h = published_profile(KIMI)
    per_head = np.stack(make_plan(h, 512).retained).sum(axis=2)
    assert per_head.max() == 113 and per_head.sum() == 144 and (per_head > 0).sum() > 2


def test_kimi_heads_are_mixed_and_layers_vary_as_published():
    _, h = published_profile(KIMI)
    plan = make_plan(h, 16)
    per_head = np.stack(plan.retained).sum(axis=2)
    assert np.mean((per_head > 0) & (per_head < 128)) == pytest.approx(0.906, abs=0.01)
    layer = np.stack(plan.retained).mean(axis=(1, 2))
    assert np.median(layer) == pytest.approx(0.360, abs=0.002)
    closest = published_config(KIMI).recurrent_layers[int(np.argmin(abs(layer - 0.375)))]
    assert closest == 21 and abs(layer - 0.375).min() < 0.002


@pytest.mark.parametrize(
    ("name", "w_max", "low", "high"),
    [(KIMI, 16, 277, 283), (KIMI, 64, 601, 639), (KIMI, 128, 1136, 1278),
     (QWEN, 16, 133, 134), (QWEN, 64, 142, 143), (QWEN, 128, 171, 172), (QWEN, 512, 262, 268)],
)  # fmt: skip
def test_unbalanced_capacity_gives_the_block_counts_of_the_paper(name, w_max, low, high):
    config, h = published_profile(name)
    slots = account(config, make_plan(h, w_max), placement="off").slots(BUDGET[name])
    assert low <= slots <= high


def test_kimi_at_512_is_as_unbalanced_as_144_units_can_be():
    """The 2046 to 2556 slots that 4 whole blocks imply need more units on a rank than exist."""
    config, h = published_profile(KIMI)
    plan = make_plan(h, 512)
    assert storage_schedule(plan, 8, "off").width == plan.total
    slots = account(config, plan, placement="off").slots(BUDGET[KIMI])
    assert slots == 2691 and round(12_032 / math.ceil(slots / 0.85)) == 4


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_unit_sits_on_a_threshold(name):
    _, h = published_profile(name)
    pooled = np.concatenate([x.ravel() for x in h])
    for w in (16, 64, 128, 512):
        assert abs(pooled / w - 1).min() > 2e-6


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="kimi-linear-48b, qwen3-next-80b"):
        published_profile("kimi")
