import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.bench.clocks import kernel_times, timed
from pallas_kernels.bench.timing import Run, floor_ms, relative_error

pytestmark = pytest.mark.device

ELEMENTS = 2**28


def near_the_copy_rate(ms: float) -> bool:
    """Whether reading and writing a float32 array of `ELEMENTS` can take this long."""
    floor = floor_ms(2 * 4 * ELEMENTS)
    return 0.9 * floor < ms < 2.0 * floor


def test_kernels_of_jax_are_timed_by_cupti_without_the_flush():
    assert kernel_times(lambda: jnp.ones(2**20) + 1)
    spent = timed(Run(jax.jit(lambda x: -x), (jnp.ones(ELEMENTS),)))
    assert (spent.timer, spent.kernels) == ("cupti", 1)
    assert near_the_copy_rate(spent.median), spent
    assert spent.least <= spent.median <= 1.2 * spent.wall + 0.1
    again = timed(Run(jax.jit(lambda x: -x), (jnp.ones(ELEMENTS),)))
    assert again.median == pytest.approx(spent.median, rel=0.1)


def test_a_small_call_starts_from_a_cold_cache():
    """8 MiB read and written at the copy rate take 4 us; from the cache they would take less."""
    x = jnp.ones(2**20)
    step = jax.jit(lambda pool: (pool + 1.0,), donate_argnums=0)
    spent = timed(Run(step, (jnp.copy(x),), carried=1))
    assert spent.timer == "cupti"
    assert spent.median > 0.7 * floor_ms(2 * 4 * 2**20), spent


def test_kernels_of_torch_are_timed_the_same_way_and_tensors_are_compared_where_they_are():
    torch = pytest.importorskip("torch")
    x = torch.ones(ELEMENTS, device="cuda")
    spent = timed(Run(lambda: x.neg(), (), framework="torch"))
    assert spent.timer in ("cupti", "graph events")
    assert near_the_copy_rate(spent.median), spent
    assert relative_error(x.bfloat16(), jnp.ones(ELEMENTS)) == 0.0
