"""The fused decode step of every implementation: its parts, padding, impossible channels."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from tests.kernels import cases, step_cases

every_kind = pytest.mark.parametrize("kind", cases.KINDS)
LAYER, EPS = 1, 1e-5


def step(impl):
    return jax.jit(partial(pk.delta_step, layer=LAYER, eps=EPS, impl=impl))


@pytest.mark.parametrize("impl", cases.IMPLS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@every_kind
def test_a_step_is_gates_then_recurrence_then_output_norm(kind, dtype, impl):
    rng = np.random.default_rng(0)
    case = step_cases.step_case(rng, kind, heads=4, batch=3, group=2, dtype=dtype)
    pool, y = step(impl)(*case.tokens, case.pool, case.slots)
    o = step_cases.check_states(case, pool, layer=LAYER)
    truth = step_cases.output(case, o.astype(dtype), EPS)
    assert y.dtype == dtype
    tolerance = 2e-6 if dtype == jnp.float32 else 1e-2
    assert cases.distance(np.asarray(y), truth) <= tolerance


@every_kind
def test_channels_that_are_no_q_k_v_are_refused(kind):
    case = step_cases.step_case(np.random.default_rng(1), kind, heads=3, batch=2)
    qkv, *others = (jnp.asarray(x) for x in (*case.tokens, case.pool, case.slots))
    for channels in (qkv[:, 1:], qkv[:, : 3 * 128], qkv[:, 2 * 128 :]):
        with pytest.raises(ValueError, match=f"{channels.shape[1]} channels are no"):
            pk.delta_step(channels, *others, layer=0, eps=EPS)
