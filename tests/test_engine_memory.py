"""Device memory of an engine: every step works in place, and none copies a pool."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from dasc_jax.config import DascConfig
from dasc_jax.engine.config import EngineConfig
from dasc_jax.engine.dispatch import Device
from dasc_jax.horizons import retention_horizons
from dasc_jax.model import random_model
from dasc_jax.models.packing import pack_segments
from dasc_jax.plan import make_plan
from tests.engines import MODELS, prompt
from tests.test_engine import ask
from tests.tiny import tiny_config, tiny_engine

SLOTS = 256


def device(family: str, scale: int) -> Device:
    """Two recurrent and two attention layers in bfloat16; pools of `scale` times a base size."""
    config = replace(
        tiny_config(family),
        num_layers=4,
        layer_kinds=("delta", "attention") * 2,
        ffn_kinds=("dense",) * 4,
    )
    model = random_model(config)
    sizes = EngineConfig(
        dasc=DascConfig(quantization="int8" if family == MODELS[0] else None),
        max_context=128,
        max_running=128 * scale,
        prefill_tokens=128,
        pages=2048 * scale,
    )
    plan = make_plan(retention_horizons(model), sizes.w_max)
    return Device(model, sizes, plan, SLOTS * scale)


def temporaries(made: Device) -> dict[str, int]:
    """Bytes of scratch memory of a prefill, a decode, a store and a load step."""
    bucket = made.prefill_buckets[0]
    batch = pack_segments([], [], [], made.keep, bucket)
    slots = np.zeros(bucket.rows, np.int32)
    steps = {
        "prefill": made._compile_prefill(batch),
        "decode": made._compile_decode(made._decode_rows([], 4)),
        "store": made._compile_store(bucket.boundaries),
        "load": made._compile_load(slots, slots),
    }
    return {name: step.memory_analysis().temp_size_in_bytes for name, step in steps.items()}


@pytest.mark.parametrize("family", MODELS)
def test_no_step_copies_a_pool(family):
    """What a step needs beside the pools does not grow with them."""
    small, large = device(family, 1), device(family, 3)
    pools = [*jax.tree.leaves(small.memory.state), small.memory.pool.rows]
    needed = temporaries(small)
    assert needed == temporaries(large)
    assert max(needed.values()) < max(pool.nbytes for pool in pools)


def test_every_step_writes_where_it_read():
    engine = tiny_engine(policy="wr")
    arrays = jax.tree.leaves(engine.loop.device.memory)
    places = [array.unsafe_buffer_pointer() for array in arrays]
    engine.generate([ask(f"{n}", 60 + 30 * n, 9) for n in range(5)])
    assert engine.generate([ask("hit", prompt(90, seed=90), 5)])[0].cached_tokens == 64
    after = jax.tree.leaves(engine.loop.device.memory)
    assert [array.unsafe_buffer_pointer() for array in after] == places
    assert all(array.is_deleted() for array in arrays)
