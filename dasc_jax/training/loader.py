"""Batches made ahead of time by other processes, in the order of the steps."""

import multiprocessing
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice

from dasc_jax.training.data import Batch, Plan, make_batch

AHEAD = 3
"""Batches in the making for every process."""


def batches(plan: Plan, first: int, processes: int) -> Iterator[Batch]:
    """The batches of steps `first` to the last; with 0 processes they are made here."""
    steps = iter(range(first, plan.steps))
    if not processes:
        yield from (make_batch(plan, step) for step in steps)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=_without_accelerator) as pool:
        waiting = deque(
            pool.submit(make_batch, plan, step) for step in islice(steps, AHEAD * processes)
        )
        try:
            while waiting:
                batch = waiting.popleft().result()
                waiting.extend(pool.submit(make_batch, plan, step) for step in islice(steps, 1))
                yield batch
        finally:
            for future in waiting:
                future.cancel()


def _without_accelerator() -> None:
    # A worker that imports JAX must not reserve the memory of the device the trainer uses.
    os.environ["JAX_PLATFORMS"] = "cpu"
