"""Clocks of a call on a device: CUPTI, events around replayed graphs, the host.

The second-level cache is flushed before each timed call, and the flush is not counted.
"""

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.bench.timing import Run

FLUSH_BYTES = 256 * 2**20
"""Read between two timed calls: four times the 60 MB of an H200's second-level cache."""
ITERATIONS = 30
SPIN_SECONDS = 0.05


class Timing(NamedTuple):
    """Milliseconds of one call, and where they come from."""

    median: float
    least: float
    timer: str
    """"cupti" (kernels alone); "cupti mean" where calls differ in their kernels, which leaves only
    the mean; "graph events" (CUDA events around graph replays, torch); "host clock"."""
    kernels: float
    """Kernels launched by a call; 0 where the timer cannot tell."""
    wall: float
    """Host clock of a call in a row of calls, caches warm: what CUPTI leaves out shows here, such
    as copies by the copy engine and gaps between kernels, wherever it exceeds the dispatch."""
    parts: dict[str, float] = {}
    """Median of every kernel of a call, those of one name added; filled by "cupti" alone."""


class Flush(NamedTuple):
    """What empties the second-level cache: a call, and the names of its kernels (CUPTI's)."""

    call: Callable[[], Any]
    kernels: tuple[str, ...]


def timed(run: Run, iterations: int = ITERATIONS) -> Timing:
    """Device time of a call, from a cold second-level cache each time.

    CUPTI reports the kernels of the flush and of the call in launch order; those of the flush are
    left out, gaps between kernels are not counted. Copies that XLA or torch hand to the copy engine
    are no kernels and are not seen. Without CUPTI, torch calls are captured in a CUDA graph and
    timed with events; JAX calls fall back to the host clock around the call, dispatch included.
    """
    torch = importlib.import_module("torch") if run.framework == "torch" else None
    flush = _flush(run.framework)
    for _ in range(2):
        out, run = run.step()
        _wait(out, torch)
    _spin(flush, torch)
    wall, run = _row_of_calls(run, torch, iterations)
    if flush.kernels:
        spent = _cupti_times(run, flush, torch, iterations)
    elif torch and torch.cuda.is_available():
        spent = _graph_times(torch, run, flush, iterations)
    else:
        spent = _host_times(run, flush, torch, iterations)
    return spent._replace(wall=wall)


def _spin(flush: Flush, torch: Any) -> None:
    """Keep the device busy until its clocks are up: a compilation before may have let them drop."""
    end = time.perf_counter() + SPIN_SECONDS * (jax.default_backend() == "gpu")
    while time.perf_counter() < end:
        _wait([flush.call() for _ in range(16)], torch)


def _row_of_calls(run: Run, torch: Any, iterations: int) -> tuple[float, Run]:
    out, start = None, time.perf_counter()
    for _ in range(iterations):
        out, run = run.step()
    _wait(out, torch)
    return 1e3 * (time.perf_counter() - start) / iterations, run


def _cupti_times(run: Run, flush: Flush, torch: Any, iterations: int) -> Timing:
    def work() -> Any:
        current, out = run, None
        for _ in range(iterations):
            flush.call()
            out, current = current.step()
        return out

    return per_call(kernel_times(work, torch), flush.kernels, iterations)


def per_call(
    launched: Sequence[tuple[str, float]], flush: Sequence[str], iterations: int
) -> Timing:
    """Milliseconds of a call from all (name, milliseconds) of `iterations` of flush and call.

    `flush` names the kernels that come first in each.
    """
    each, rest = divmod(len(launched), iterations)
    names = [name for name, _ in launched[:each]]
    calls = [launched[i : i + each] for i in range(0, len(launched) - rest, each or 1)]
    first = list(flush)
    if not rest and names[: len(first)] == first:
        if all([name for name, _ in call] == names for call in calls):
            spent = [sum(ms for _, ms in call[len(first) :]) for call in calls]
            kernels = each - len(first)
            parts: dict[str, float] = {}
            for of_one in zip(*(call[len(first) :] for call in calls), strict=True):
                name = of_one[0][0]
                parts[name] = parts.get(name, 0.0) + statistics.median(ms for _, ms in of_one)
            return Timing(statistics.median(spent), min(spent), "cupti", kernels, 0.0, parts)
    spent = sum(ms for name, ms in launched if name not in first) / iterations
    kernels = len(launched) / iterations - len(first)
    return Timing(spent, spent, "cupti mean", kernels, 0.0)


def kernel_times(work: Callable[[], Any], torch: Any = None) -> list[tuple[str, float]]:
    """(name, milliseconds) of every kernel that the process launches during `work`, in order.

    `work` returns something to wait for. Empty without CUPTI.
    """
    cupti = _cupti()
    if cupti is None:
        return []
    cupti._cupti_init()
    try:
        _wait(work(), torch)
    finally:
        launched = cupti._cupti_get_timings(True)
    return launched or []


def _graph_times(torch: Any, run: Run, flush: Flush, iterations: int) -> Timing:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run.step()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(iterations)]
    for start, end in pairs:
        flush.call()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    spent = [start.elapsed_time(end) for start, end in pairs]
    return Timing(statistics.median(spent), min(spent), "graph events", 0, 0.0)


def _host_times(run: Run, flush: Flush, torch: Any, iterations: int) -> Timing:
    spent = []
    for _ in range(iterations):
        _wait(flush.call(), torch)
        start = time.perf_counter()
        out, run = run.step()
        _wait(out, torch)
        spent.append(1e3 * (time.perf_counter() - start))
    return Timing(statistics.median(spent), min(spent), "host clock", 0, 0.0)


def _wait(out: Any, torch: Any) -> None:
    if torch:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    else:
        jax.block_until_ready(out)


def _cupti() -> ModuleType | None:
    """JAX's CUPTI binding (what `mosaic.gpu.profiler` measures with), or None off an NVIDIA GPU."""
    if jax.default_backend() != "gpu":
        return None
    try:
        from jax._src.lib import mosaic_gpu
    except ImportError:
        return None
    return getattr(mosaic_gpu, "_mosaic_gpu_ext", None)


@cache
def _flush(framework: str) -> Flush:
    """The flush in the stream of a framework, made once.

    It reads, and does not write: dirty lines would be written back during the timed call.
    """
    if framework == "torch":
        torch = importlib.import_module("torch")
        where = "cuda" if torch.cuda.is_available() else "cpu"
        call = torch.ones(_flush_size(where), device=where).sum
    else:
        torch = None
        call = partial(jax.jit(jnp.sum), jnp.ones(_flush_size(jax.default_backend())))
    _wait(call(), torch)
    return Flush(call, tuple(name for name, _ in kernel_times(call, torch)))


def _flush_size(where: str) -> int:
    return 1024 if where == "cpu" else FLUSH_BYTES // 4
