"""The same checkpoint calls over ranks and on one device, for tests that compare them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dasc_jax import checkpoint_shards, checkpoint_state
from dasc_jax.balance import place
from dasc_jax.checkpoint_shards import Shards
from dasc_jax.config import DeltaConfig, MLAConfig, ModelConfig
from dasc_jax.parallel import make_mesh
from dasc_jax.plan import make_plan
from dasc_jax.types import RecurrentState

LAYERS, KEY, VALUE, SLOTS = 2, 4, 8, 5
HEADS = {"kda": 8, "gdn": 16}
PLACEMENTS = ("off", "storage", "hybrid")


def config_of(kind):
    gate = 4 if kind == "kda" else None
    return ModelConfig(
        family="kimi_linear", vocab_size=16, hidden_size=8, num_layers=LAYERS + 1,
        layer_kinds=("delta",) * LAYERS + ("attention",), ffn_kinds=("dense",) * (LAYERS + 1),
        norm_eps=1e-5, zero_centred_norm=False, dense_intermediate=8,
        delta=DeltaConfig(kind, 8, HEADS[kind], KEY, VALUE, gate_rank=gate),
        attention=MLAConfig(2, 4, 4, 4, 8), moe=None, dtype="bfloat16", max_context=64,
        bos_token_id=None, eos_token_ids=(), pad_token_id=None,
    )  # fmt: skip


def plan_of(kind, seed=0, w_max=16):
    """Slow heads come first, so that ranks have very different shares to store."""
    rng = np.random.default_rng(seed)
    heads = HEADS[kind]
    scale = np.geomspace(60, 4, heads)
    shape = (heads, KEY) if kind == "kda" else (heads,)
    scale = scale[:, None] if kind == "kda" else scale
    return make_plan([scale * rng.uniform(0.3, 2, shape) for _ in range(LAYERS)], w_max)


def state_of(kind, batch, seed=0):
    rng = np.random.default_rng(seed)
    temporal = rng.normal(size=(LAYERS, batch, HEADS[kind], KEY, VALUE)).astype(np.float32)
    conv = rng.normal(size=(LAYERS, batch, config_of(kind).delta.conv_channels, 3))
    return RecurrentState(jnp.asarray(temporal), jnp.asarray(conv, jnp.bfloat16))


def shards_of(plan, kind, tp, placement, form=None):
    return Shards(plan, place(plan, config_of(kind), tp, placement), make_mesh(tp), form)


def permuted(storage, temporal):
    """The state of the model whose heads are in the order of a schedule."""
    if storage.order is None:
        return temporal
    heads = [storage.order.value_heads(layer) for layer in range(LAYERS)]
    return jnp.stack([layer[:, order] for layer, order in zip(temporal, heads, strict=True)])


def bits(array):
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def same(got, expected):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(bits(one), bits(other))


STORED, READ = (4, 0, 1), (1, 0, 4, 2)
CHECKPOINTS, TARGETS = (4, 0, 0, 1), (2, 0, 1, 4)


def everything(module, first, pool, state, active):
    """A pool after a store, and what `load` and `restore` make of it."""
    pool = module.store(first, pool, jnp.array(STORED), *state)
    loaded = module.load(first, pool, jnp.array(READ))
    restored = module.restore(first, active, pool, jnp.array(CHECKPOINTS), jnp.array(TARGETS))
    return pool, RecurrentState(*loaded), restored


over_ranks = functools.partial(jax.jit(everything, static_argnums=(0, 1)), checkpoint_shards)
alone = functools.partial(jax.jit(everything, static_argnums=(0, 1)), checkpoint_state)


def both(kind, tp, placement, quantization, form=None, plan=None):
    """The same calls over ranks and on one device, the states of the former in their order."""
    plan = plan_of(kind) if plan is None else plan
    shards, config = shards_of(plan, kind, tp, placement, form), config_of(kind)
    state, active = state_of(kind, len(STORED)), state_of(kind, 6, seed=1)
    state = RecurrentState(state.temporal.at[:, 1].set(jnp.nan), state.conv)
    pool = checkpoint_state.init_pool(plan, config, SLOTS, quantization=quantization)
    expected = list(alone(plan, pool, state, active))
    moved = [RecurrentState(permuted(shards.storage, x), y) for x, y in (state, active)]
    pool = checkpoint_shards.init_pool(shards, config, SLOTS, quantization=quantization)
    got = over_ranks(shards, pool, *moved)
    for at in (1, 2):
        temporal = permuted(shards.storage, expected[at].temporal)
        expected[at] = expected[at]._replace(temporal=temporal)
    return shards, state, got, expected
