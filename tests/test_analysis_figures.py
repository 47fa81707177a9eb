"""Figures 2, 4, 5 and 6 of the published profiles show what the paper says of them."""

import csv
import dataclasses

import numpy as np
import pytest

from dasc_jax.analysis.chart import write_csv
from dasc_jax.analysis.horizon_figures import (
    channel_horizons,
    draw_channels,
    draw_fractions,
    draw_heads,
    draw_profile,
    head_fractions,
    head_horizons,
    profile_points,
    profile_summary,
    typical_block,
)
from dasc_jax.horizons import HorizonError
from dasc_jax.published import published_profile

KIMI, QWEN = "kimi-linear-48b", "qwen3-next-80b"


def picture(figure):
    return next(axes.images[0] for axes in figure.axes if axes.images).get_array()


@pytest.mark.parametrize(
    ("name", "quartiles"), [(KIMI, (0.170, 0.471, 0.774)), (QWEN, (0.894, 0.969, 0.997))]
)
def test_figure_2_is_the_distribution_whose_quartiles_the_paper_prints(name, quartiles):
    _, h = published_profile(name)
    points = profile_points(h)
    alphas = {p.fraction: p.alpha for p in points}
    for fraction, want in zip((0.25, 0.5, 0.75), quartiles, strict=True):
        assert alphas[fraction] == pytest.approx(want, abs=1e-3)
    assert all(p.alpha**p.horizon == pytest.approx(1e-3) for p in points)
    assert f"median alpha {quartiles[1]:.3f}" in profile_summary(h)
    assert ("90.6% of heads" in profile_summary(h)) == (name == KIMI)
    assert len(draw_profile(h, name).axes) == 1


def test_figure_4_has_a_cell_for_every_head_and_leaves_attention_blank():
    config, h = published_profile(QWEN)
    cells, values = head_horizons(config, h), picture(draw_heads(config, h, QWEN))
    assert len(cells) == 36 * 32 and values.shape == (48, 32)
    blank = np.flatnonzero(np.ma.getmaskarray(np.ma.masked_invalid(values)).all(axis=1))
    assert tuple(blank) == config.attention_layers
    assert all(values[c.layer, c.head] == c.horizon for c in cells)
    assert np.mean([c.bin >= 16 for c in cells]) == pytest.approx(0.907, abs=1e-3)


def test_a_horizon_of_exactly_w_max_is_local():
    config, h = published_profile(QWEN)
    edges = [np.array([15.9, 16.0, 16.1, 1024.0, 1025.0] * 7)[:32]] * len(h)
    assert [c.bin for c in head_horizons(config, edges)[:5]] == [0, 0, 16, 512, 1024]


def test_figure_5_counts_the_kept_channels_of_every_head():
    config, h = published_profile(KIMI)
    cells, values = head_fractions(config, h), picture(draw_fractions(config, h, KIMI))
    assert len(cells) == 20 * 32
    assert sum(c.kept for c in cells) * 128 == pytest.approx(29_364)
    assert all(values[c.layer, c.head] == c.kept for c in cells)
    assert np.mean([0 < c.kept < 1 for c in cells]) == pytest.approx(0.906, abs=1e-3)


def test_figure_6_is_of_the_block_nearest_to_the_median_layer():
    config, h = published_profile(KIMI)
    cells, values = channel_horizons(config, h), picture(draw_channels(config, h, KIMI))
    assert {c.layer for c in cells} == {21} and len(cells) == 32 * 128
    assert np.mean([c.bin >= 16 for c in cells]) == pytest.approx(0.375, abs=2e-3)
    assert all(values[c.head, c.channel] == c.horizon for c in cells)


def test_of_two_equally_typical_blocks_the_one_that_keeps_more_is_taken():
    layers = [np.where(np.arange(10) < kept, 20.0, 2.0)[None] for kept in (9, 4, 6, 1)]
    assert typical_block(layers) == 2 and typical_block(layers[:3]) == 2


def test_a_figure_of_the_other_kind_of_decay_is_refused():
    kimi, qwen = published_profile(KIMI), published_profile(QWEN)
    for make, profile in (
        (head_horizons, kimi),
        (head_fractions, qwen),
        (channel_horizons, qwen),
    ):
        with pytest.raises(HorizonError, match="this model has horizons of shape"):
            make(*profile)


def test_rows_are_written_under_their_field_names(tmp_path):
    config, h = published_profile(KIMI)
    cells, path = head_fractions(config, h), tmp_path / "new" / "cells.csv"
    write_csv(path, cells)
    with path.open() as file:
        lines = list(csv.DictReader(file))
    assert list(lines[0]) == [f.name for f in dataclasses.fields(cells[0])]
    got = [(int(x["layer"]), int(x["head"]), float(x["kept"])) for x in lines]
    assert got == [dataclasses.astuple(c) for c in cells]
    with pytest.raises(ValueError, match="no row"):
        write_csv(path, [])
