import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dasc_jax.models import abstract_params
from dasc_jax.programs.decode_step import Args, bench
from dasc_jax.programs.step_profile import (
    large_copies,
    library_calls,
    longest,
    origins,
    part,
    shares,
)
from dasc_jax.programs.step_program import options
from dasc_jax.programs.step_report import Failure, StepTime, tables
from dasc_jax.programs.step_size import shortened, step_bytes
from dasc_jax.programs.synthetic import device_params, device_state, uniform
from dasc_jax.published import published_config
from tests.engines import MODELS, golden_model


@pytest.mark.parametrize("family", [MODELS[0], pytest.param(MODELS[1], marks=pytest.mark.slow)])
def test_a_small_model_runs_end_to_end(family: str):
    config = replace(golden_model(family).config, dtype="bfloat16", max_context=1024)
    args = Args(batches=(1,), context=100, max_context=256, steps=4)
    (took,) = bench(config, args)
    assert isinstance(took, StepTime), took
    assert took.batch == 1
    assert 0 < took.dispatch_ms <= took.ms and took.synced_ms > 0
    assert took.temporaries > 0 and took.copied == 0
    assert math.isnan(took.kernel_ms) and took.parts == took.longest == ()
    assert len(list(tables(took))) == 1


def test_a_variant_that_cannot_be_compiled_does_not_stop_the_others():
    config = replace(golden_model(MODELS[0]).config, max_context=1024)
    variants = ("xla_no_such_option=1", "xla_gpu_graph_min_graph_size=1")
    args = Args(batches=(2,), variants=variants, context=100, max_context=256, steps=2)
    refused, took = bench(config, args)
    assert isinstance(refused, Failure) and "xla_no_such_option" in refused.error
    assert isinstance(took, StepTime) and took.variant == variants[1]


def test_variants_name_options_of_xla_beside_the_engines():
    engines = options("engine")
    assert options("a=1;b=FUSION,CUBLAS;c=false;d=") == engines | {
        "a": 1,
        "b": "FUSION,CUBLAS",
        "c": False,
        "d": "",
    }
    with pytest.raises(ValueError, match="'a' is no NAME=VALUE"):
        options("a")


def test_steps_that_do_not_fit_the_page_table_are_refused():
    config = golden_model("kimi_linear_a").config
    with pytest.raises(ValueError, match="50 steps twice behind 200 tokens"):
        next(bench(config, Args(batches=(1,), context=200, max_context=256)))


def test_every_parameter_is_made_with_the_shape_and_dtype_the_model_has():
    config = golden_model("kimi_linear_a").config
    params, specs = device_params(config, "bfloat16"), abstract_params(config, "bfloat16")
    assert {p: (a.shape, a.dtype) for p, a in params.items()} == {
        p: (s.shape, s.dtype) for p, s in specs.items()
    }
    kernel = np.asarray(params["layers.0.mixer.q_proj.kernel"], np.float32)
    assert kernel.std() == pytest.approx(kernel.shape[0] ** -0.5, rel=0.05)
    assert not np.array_equal(kernel, params["layers.1.mixer.q_proj.kernel"])
    state = device_state(config, "bfloat16", 3, 5)
    assert state.recurrent.temporal.shape[1] == 3 and state.pages.arrays[0].shape[1] == 5
    assert np.abs(np.asarray(state.recurrent.temporal)).max() <= 0.1


def test_uniform_numbers_are_uniform_and_differ_by_seed():
    spec = jax.ShapeDtypeStruct((300, 70), jnp.float32)
    x, y = (np.asarray(uniform(spec, seed, 2.0, 1.0)) for seed in (5, 6))
    assert x.min() >= -1.0 and x.max() <= 3.0
    assert x.mean() == pytest.approx(1.0, abs=0.05) and x.std() == pytest.approx(
        2 / 3**0.5, abs=0.03
    )
    assert abs(np.corrcoef(x.ravel(), y.ravel())[0, 1]) < 0.05


def test_a_step_reads_the_active_weights_and_touches_states_twice():
    config = published_config("kimi-linear-48b")
    one = step_bytes(config, 1, 0)
    # 3.1 B active parameters in bf16, and 20 layers of 2 MiB read and written.
    assert one == pytest.approx(2 * 3.1e9 + 84e6, rel=0.02)
    more = step_bytes(config, 1, 1000) - one
    assert more == 7 * 1000 * 576 * 2
    assert step_bytes(config, 4096, 0) > 97e9


def test_a_model_can_be_cut_behind_any_layer_that_leaves_both_kinds():
    config = shortened(published_config("kimi-linear-48b"), 4)
    assert config.layer_kinds == ("delta", "delta", "delta", "attention")
    assert shortened(config, None) is config


def test_a_kernel_leads_back_to_the_part_of_the_model_that_asked_for_it():
    def sample(x: jax.Array) -> jax.Array:
        return jnp.cumsum(jnp.sin(x) * 2)

    text = jax.jit(lambda x: sample(x)).lower(jnp.ones(64)).compile().as_text()
    assert text is not None
    found = origins(text)
    assert found and any("sample" in frames for frames in found.values())
    kernel = next(name for name, frames in found.items() if "sample" in frames)
    assert part(kernel, found[kernel]) == "sampling"
    assert part("nvjet_tst_64x8", None) == "matrix products of libraries"
    assert part("grouped_matmul_mosaic_gpu", None) == "experts"
    assert part("memset", None) == "other"
    spent = longest([("loop_fusion_3", 1.0), ("loop_fusion_12", 3.0), ("gemm_4_impl", 2.0)], 2)
    assert spent == (("loop_fusion", 2.0, 1.0), ("gemm_impl", 1.0, 0.5))
    rows = shares([("nvjet", 1.0), (kernel, 4.0), ("nvjet", 1.0)], 2, found)
    assert [(row.part, row.ms, row.kernels) for row in rows] == [
        ("sampling", 2.0, 0.5),
        ("matrix products of libraries", 1.0, 1.0),
    ]


def test_an_array_that_is_not_updated_in_place_counts_as_copied():
    def text(donated: tuple[int, ...]) -> str:
        step = jax.jit(lambda pool, x: pool.at[3].set(x), donate_argnums=donated)
        compiled = step.lower(jnp.zeros((1024, 512), jnp.float32), jnp.ones(512)).compile()
        return compiled.as_text() or ""

    assert list(large_copies(text(())).values()) == [2**21]
    assert large_copies(text((0,))) == {}


def test_products_of_a_library_belong_to_the_part_that_asked_for_them():
    text = """
FunctionNames
1 "Experts.__call__"
2 "HybridModel.logits"

FileLocations
1 {file_name_id=1 function_name_id=1 line=1}
2 {file_name_id=1 function_name_id=2 line=1}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}

ENTRY %main {
  %cublas.1 = f32[2] custom-call(%a), custom_call_target="__cublas$gemm", stack_frame_id=1
  ROOT %cublas.2 = f32[2] custom-call(%b), custom_call_target="__cublas$gemm", stack_frame_id=2
}
"""
    products = library_calls(text)
    assert products == ["Experts.__call__", "HybridModel.logits"]
    step = [("nvjet_a", 1.0), ("splitKreduce", 0.5), ("nvjet_a", 2.0)]
    rows = {row.part: row.ms for row in shares(2 * step, 2, origins(text), products)}
    assert rows == {
        "experts": 1.0,
        "embedding and logits": 2.0,
        "matrix products of libraries": 0.5,
    }
    assert [row.part for row in shares(step[:1], 1, {}, products)] == [
        "matrix products of libraries"
    ]
