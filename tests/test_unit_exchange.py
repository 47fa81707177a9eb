"""How units travel between ranks: forms with the same result, and what each of them launches."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dasc_jax import checkpoint_shards, rank_slots
from dasc_jax.balance import place
from dasc_jax.checkpoint_shards import Shards
from dasc_jax.parallel import make_mesh
from dasc_jax.plan import make_plan
from dasc_jax.published import published_profile
from dasc_jax.unit_exchange import cheapest, cost
from pallas_kernels.mgpu import ragged_pack as hopper
from tests.many_devices import needs_devices
from tests.sharded_checkpoints import (
    HEADS,
    SLOTS,
    both,
    config_of,
    plan_of,
    same,
    shards_of,
    state_of,
)

pytestmark = needs_devices


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_all_forms_of_a_transfer_give_the_same_bits(kind, quantization):
    results = []
    for form in ("all_to_all", "permute"):
        shards, _, got, _ = both(kind, 4, "storage", quantization, form)
        used = np.zeros((4, shards.storage.width), bool)
        for rank in range(4):
            used[rank, : len(shards.storage.rows_of(rank))] = True
        rows = np.asarray(got[0].rows)[:, used.ravel()]
        results.append((rows, *got[1:]))
    same(*results)


def programs(kind, tp, placement, form, quantization=None):
    """A store and a restore of one checkpoint, lowered."""
    shards, config = shards_of(plan_of(kind), kind, tp, placement, form), config_of(kind)
    pool = checkpoint_shards.init_pool(shards, config, SLOTS, quantization=quantization)
    one = jnp.array([1])
    store = jax.jit(checkpoint_shards.store, static_argnums=0, donate_argnums=1)
    restore = jax.jit(checkpoint_shards.restore, static_argnums=0, donate_argnums=1)
    state = jax.device_put(
        state_of(kind, 2), jax.tree.map(lambda spec: jax.NamedSharding(shards.mesh, spec),
                                        checkpoint_shards.STATE)
    )  # fmt: skip
    return (
        shards,
        pool,
        state,
        (
            store.lower(shards, pool, one, state.temporal[:, :1], state.conv[:, :1]),
            restore.lower(shards, state, pool, one, one),
        ),
    )


COLLECTIVES = ("all_to_all", "collective_permute", "all_gather", "all_reduce")


@pytest.mark.parametrize(("tp", "placement"), [(8, "off"), (4, "hybrid"), (1, "storage")])
def test_nothing_travels_where_the_schedule_moves_nothing(tp, placement):
    shards, *_, lowered = programs("kda", tp, placement, None)
    assert shards.storage.moved == 0
    for program in lowered:
        assert not any(f"stablehlo.{name}" in program.as_text() for name in COLLECTIVES)
        assert "all-gather" not in program.compile().as_text()


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize(("form", "op"), [("all_to_all", "all_to_all"),
                                          ("permute", "collective_permute")])  # fmt: skip
def test_a_store_and_a_load_start_as_many_collectives_as_estimated(form, op, quantization):
    shards, *_, lowered = programs("kda", 8, "storage", form, quantization)
    moves = rank_slots.counts(shards.storage)
    for program, direction in zip(lowered, (moves, moves.T), strict=True):
        found = {name: program.as_text().count(f"stablehlo.{name}") for name in COLLECTIVES}
        assert found.pop(op) == cost(direction, 1, form).collectives
        assert not any(found.values())


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("placement", ["off", "storage"])
def test_store_and_restore_change_their_arrays_in_place(placement, quantization):
    _, pool, state, lowered = programs("kda", 2, placement, None, quantization)
    for changed, program in zip((pool, state), lowered, strict=True):
        own = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(changed))
        assert program.compile().memory_analysis().alias_size_in_bytes == own


def test_permutes_are_chosen_where_few_distances_have_anything_to_send():
    one = np.zeros((8, 8), int)
    one[5, 6] = 100
    assert cost(one, 10, "all_to_all") == (1, 7000)
    assert cost(one, 10, "permute") == (1, 1000)
    assert cheapest(one, 512) == "permute"
    spread = np.full((8, 8), 13) - 13 * np.eye(8, dtype=int)
    assert cost(spread, 10, "permute") == (7, 910)
    assert cheapest(spread, 512) == "all_to_all"
    assert cheapest(spread * (np.eye(8, k=1, dtype=int) * 10**6 + 1), 512) == "permute"
    assert cost(one * 0, 10, "permute") == (0, 0)


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize(("form", "op"), [("all_to_all", "all_to_all"),
                                          ("permute", "collective_permute")])  # fmt: skip
def test_a_rank_of_kimi_packs_with_the_kernels_of_a_gpu(monkeypatch, form, op, quantization):
    """Lowered for a GPU, not run: the kernels take what a rank gives them inside `shard_map`."""

    def fitting(kernel, parts):
        def run(*args):
            rows, scales, temporal, table = (args[at] for at in parts)
            assert hopper.unfit(rows, scales, temporal, table) is None
            return kernel(*args)

        return run

    monkeypatch.setattr(rank_slots, "ragged_pack", fitting(hopper.pack, (0, 1, 2, 3)))
    monkeypatch.setattr(rank_slots, "ragged_unpack", fitting(hopper.unpack, (1, 2, 0, 3)))
    config, h = published_profile("kimi-linear-48b")
    plan = make_plan(h, 16)
    shards = Shards(plan, place(plan, config, 8, "storage"), make_mesh(8), form)
    make = functools.partial(checkpoint_shards.init_pool, shards, config, 4)
    pool = jax.eval_shape(functools.partial(make, quantization=quantization))
    delta = config.delta
    state = (
        jax.ShapeDtypeStruct((20, 1, 32, delta.key_dim, delta.value_dim), jnp.float32),
        jax.ShapeDtypeStruct((20, 1, delta.conv_channels, 3), jnp.bfloat16),
    )
    one = jax.ShapeDtypeStruct((1,), jnp.int32)
    for call, args, kernels in (
        (checkpoint_shards.store, (pool, one, *state), 2),
        (checkpoint_shards.load, (pool, one), 1),
    ):
        traced = jax.jit(call, static_argnums=0).trace(shards, *args)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert len(re.findall(r"custom_call @mosaic_gpu\w*", text)) == kernels
        assert text.count(f"stablehlo.{op}") >= 1
