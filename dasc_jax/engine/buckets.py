"""The closed set of shapes an engine runs, each compiled ahead from abstract values alone."""

import logging
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from dasc_jax.engine.config import EngineConfig
from dasc_jax.models.packing import PrefillBucket
from dasc_jax.types import PAGE

log = logging.getLogger(__name__)


class CompileAfterWarmupError(RuntimeError):
    """A step asked for a shape outside the closed set."""


def prefill_buckets(config: EngineConfig) -> list[PrefillBucket]:
    """Token buckets 64, 256, 1024, ... up to `prefill_tokens`, ascending."""
    sizes, size = [], PAGE
    while size < config.prefill_tokens:
        sizes.append(size)
        size *= 4
    return [_prefill_bucket(config, tokens) for tokens in [*sizes, config.prefill_tokens]]


def _prefill_bucket(config: EngineConfig, tokens: int) -> PrefillBucket:
    requests = min(config.max_running, config.prefill_requests)
    every = tokens // config.checkpoint_interval if config.checkpoint_interval else 0
    # A request brings at most its branch point, its last boundary, and one interval that its start
    # cuts.
    boundaries = every + 3 * requests
    return PrefillBucket(tokens, 2 * requests, boundaries, config.context_pages, requests)


def decode_buckets(config: EngineConfig) -> list[int]:
    """Batch sizes 2, 4, 8, ... up to `max_running`, ascending.

    None of a single row: XLA turns its matrix products into elementwise ones, which on a GPU it
    writes out, weights and all, before it sums them.
    """
    sizes, size = [], 2
    while size < config.max_running:
        sizes.append(size)
        size *= 2
    return [*sizes, max(config.max_running, 2)]


def smallest(buckets: Iterable[Any], need: int, size: Callable[[Any], int]) -> Any:
    """The first bucket (ascending) that holds `need`."""
    for bucket in buckets:
        if size(bucket) >= need:
            return bucket
    raise CompileAfterWarmupError(f"no bucket holds {need}")


def abstract(tree: Any, sharding: Sharding | None = None) -> Any:
    """Shapes, dtypes and shardings of a tree of arrays (host, device or abstract already).

    `sharding` is that of host arrays, and of abstract ones that have none.
    """

    def leaf(x: Any) -> Any:
        x = x if isinstance(x, jax.ShapeDtypeStruct | jax.Array) else np.asarray(x)
        own = getattr(x, "sharding", None)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own or sharding)

    return jax.tree.map(leaf, tree)


@dataclass
class Executables:
    """Compiled steps by name and bucket; `late` counts those compiled after warm-up.

    A step outside the set compiles and is counted, or raises CompileAfterWarmupError when `strict`.
    """

    strict: bool
    compiled: dict[tuple[str, Any], Any] = field(default_factory=dict)
    seconds: dict[tuple[str, Any], float] = field(default_factory=dict)
    late: int = 0

    def warm(
        self,
        jobs: dict[tuple[str, Any], Callable[[], Any]],
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Run every job (a function that lowers and compiles), two to eight at a time."""

        def timed(job: Callable[[], Any]) -> tuple[Any, float]:
            begun = time.perf_counter()
            return job(), time.perf_counter() - begun

        with ThreadPoolExecutor(max(2, min(8, (os.cpu_count() or 2) // 4))) as threads:
            futures = {threads.submit(timed, job): key for key, job in jobs.items()}
            for done, future in enumerate(as_completed(futures), 1):
                key = futures[future]
                self.compiled[key], self.seconds[key] = future.result()
                log.debug("compiled %s in %.1f s", key, self.seconds[key])
                if progress:
                    progress(done, len(jobs))

    def get(self, key: tuple[str, Any], compile_now: Callable[[], Any]) -> Any:
        """The executable of `key`."""
        if key not in self.compiled:
            if self.strict:
                raise CompileAfterWarmupError(f"step {key} was not compiled at warm-up")
            self.late += 1
            log.warning("compiling %s after warm-up", key)
            self.compiled[key] = compile_now()
        return self.compiled[key]
