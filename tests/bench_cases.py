"""Cases for tests of the benchmark program: right, wrong, raising, crashing and hanging runs."""

import os
import time
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.bench.timing import Case, Problem, Run, floor_ms


def cases() -> Iterator[Case]:
    yield Case("double", "small", floor_ms(64), partial(make, 8))
    yield Case("double", "no data", floor_ms(64), no_data)
    yield Case("double", "last", floor_ms(128), partial(make, 16))


def no_data() -> Problem:
    raise MemoryError("too large")


def make(size: int) -> Problem:
    x = jax.random.normal(jax.random.key(0), (size,))

    def right() -> Run:
        return Run(jax.jit(lambda x: x + x), (x,))

    def pooled() -> Run:
        step = jax.jit(lambda pool, x: (pool + 1, x + x), donate_argnums=0)
        return Run(step, (jnp.zeros(4), x), carried=1, result=lambda out: out[1])

    return Problem(
        inputs={"x": x},
        expected=2 * x,
        tolerance=1e-6,
        runs={
            "ours": right,
            "ours[pooled]": pooled,
            "wrong": lambda: Run(jax.jit(lambda x: 3 * x), (x,)),
            "raising": lambda: Run(lambda x: 1 // 0, (x,)),
            "crashing": lambda: Run(lambda x: os._exit(9), (x,)),
            "hanging": lambda: Run(lambda x: time.sleep(600), (x,)),
            "xla": right,
        },
    )
