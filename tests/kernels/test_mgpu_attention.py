"""The Hopper kernel of paged attention: interpreted on a CPU, and lowered for CUDA at the shapes of
both models."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ChunkTable, PagedRows
from pallas_kernels.mgpu import attention_decode as kernel
from pallas_kernels.mgpu import attention_prefill
from tests.kernels import cases
from tests.kernels.attention_cases import KINDS, LAYER, assert_right, problem, prompts

pytestmark = pytest.mark.usefixtures("no_races")

TILINGS = {"latent": kernel.LATENT, "grouped": kernel.GROUPED}
PROMPT_TILINGS = {"latent": attention_prefill.LATENT, "grouped": attention_prefill.GROUPED}


def interpreted(p, kind, **tiling):
    """Two pages a split and two blocks, so that splits, blocks and slots are all reused."""
    tiling = {"split_pages": 2, "blocks": 2} | tiling
    return kernel.decode(
        p.q,
        p.rows(),
        jnp.asarray(p.table),
        jnp.asarray(p.lengths),
        p.scale,
        dataclasses.replace(TILINGS[kind], **tiling),
        plgpu.InterpretGPUParams(detect_races=True),
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
def test_ragged_requests_see_their_keys_and_nothing_else_without_races(kind):
    p = problem(kind, (0, 1, 64, 200))
    assert kernel.unfit(p.q, p.rows(), jnp.asarray(p.table), jnp.asarray(p.lengths), 1.0) is None
    assert_right(interpreted(p, kind), p)


@pytest.mark.timeout(120)
def test_bits_depend_on_neither_the_batch_nor_how_blocks_share_the_work():
    p = problem("grouped", (65, 0, 190))
    together = interpreted(p, "grouped")
    spread = interpreted(p, "grouped", blocks=5, slots=4)
    cases.assert_same_bits(spread, together)
    alone = p._replace(q=p.q[2:], table=p.table[2:], lengths=p.lengths[2:])
    cases.assert_same_bits(interpreted(alone, "grouped"), np.asarray(together)[2:])


@pytest.mark.timeout(120)
def test_few_query_heads_are_padded_and_a_split_grows_with_the_request():
    p = problem("grouped", (256, 3))
    few = p._replace(q=p.q[:, ::4], truth=p.truth[:, ::4])
    assert_right(interpreted(few, "grouped", split_pages=1, max_splits=3), few)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind, heads", [("latent", slice(1)), ("grouped", slice(0, 16, 4))])
def test_packed_prompts_see_their_own_request_up_to_themselves(kind, heads):
    p = prompts(kind, [(9, 62), (2, 5)], 12, pages=2)
    p = p._replace(q=p.q[:, heads], truth=p.truth[:, heads])
    out = attention_prefill.prefill(
        p.q,
        p.pages.rows(),
        p.pages.table,
        p.positions,
        p.table,
        p.pages.scale,
        dataclasses.replace(PROMPT_TILINGS[kind], blocks=2),
        plgpu.InterpretGPUParams(),
    )
    assert_right(out, p)


@pytest.mark.parametrize("kind, queries, heads", [("latent", 32, 0), ("grouped", 16, 2)])
def test_prefill_of_both_models_lowers_without_a_copy_of_the_pages(kind, queries, heads):
    k, spec = KINDS[kind], jax.ShapeDtypeStruct
    pool = (7, 4096, 64) + ((heads,) if heads else ())
    arrays = (spec((*pool, k.key_width), jnp.bfloat16),) * (2 if heads else 1)
    chunk, token = spec((140,), jnp.int32), spec((8192,), jnp.int32)
    table = ChunkTable(*[chunk] * 7, spec((9,), jnp.int32))

    def run(q, arrays, pages, positions, table):
        cache = PagedRows(arrays[0], arrays[-1], LAYER, k.value_width)
        return attention_prefill.prefill(q, cache, pages, positions, table, 0.1)

    q = spec((8192, queries, k.key_width), jnp.bfloat16)
    traced = jax.jit(run).trace(q, arrays, spec((8, 512), jnp.int32), token, table)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 2
    for operation in ("slice", "gather", "copy", "transpose"):
        assert f"stablehlo.{operation} %arg1" not in text


def lowered(kind, batch, queries, heads, tiling=None):
    k, spec = KINDS[kind], jax.ShapeDtypeStruct
    pool = (7, 4096, 64) + ((heads,) if heads else ())
    arrays = (spec((*pool, k.key_width), jnp.bfloat16),) * (2 if heads else 1)
    q = spec((batch, queries, k.key_width), jnp.bfloat16)
    integers = spec((batch, 512), jnp.int32), spec((batch,), jnp.int32)

    def run(q, arrays, table, lengths):
        cache = PagedRows(arrays[0], arrays[-1], LAYER, k.value_width)
        return kernel.decode(q, cache, table, lengths, 0.1, tiling)

    traced = jax.jit(run).trace(q, arrays, *integers)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "kind, batch, queries, heads",
    [
        ("latent", 1, 32, 0),
        ("latent", 256, 32, 0),
        ("latent", 32, 4, 0),
        ("grouped", 1, 16, 2),
        ("grouped", 256, 16, 2),
        ("grouped", 32, 2, 1),
    ],
)
def test_both_models_lower_whole_and_split_over_eight_without_a_copy_of_the_pages(
    kind, batch, queries, heads
):
    text = lowered(kind, batch, queries, heads)
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 2
    for operation in ("slice", "gather", "copy", "transpose"):
        assert f"stablehlo.{operation} %arg1" not in text


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_not_tested_is_refused_with_its_reason(kind):
    p = problem(kind, (70,))
    table, lengths = jnp.asarray(p.table), jnp.asarray(p.lengths)
    refused = {
        "float32": (p.q.astype(jnp.float32), p.rows(), table, lengths),
        "int32": (p.q, p.rows(), table, lengths.astype(jnp.int16)),
        "wide": (p.q[..., :128], p.rows(), table, lengths),
        "query heads": (jnp.concatenate([p.q] * 5, axis=1), p.rows(), table, lengths),
    }
    for word, args in refused.items():
        assert word in (kernel.unfit(*args, p.scale) or "")
    assert "GPU" in (kernel.refuses(p.q, p.rows(), table, lengths, p.scale) or "")
