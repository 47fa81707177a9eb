"""Grouped matrix products of tokamax (Pallas Mosaic GPU)."""

import sys
from types import ModuleType
from typing import Any

import jax

from pallas_kernels.bench.peers import BF16_TOLERANCE, Peer
from pallas_kernels.bench.timing import Problem, Run


def peers(op: str) -> tuple[Peer, ...]:
    """`tokamax.ragged_dot` on a GPU; it takes up to 8 rows or a multiple of 8."""
    return (Peer("tokamax mosaic_gpu", ("tokamax",), _run),)


def _run(problem: Problem) -> Run:
    tokamax, inputs = _tokamax(), problem.inputs

    @jax.jit
    def call(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
        return tokamax.ragged_dot(x, w, group_sizes=group_sizes, implementation="mosaic_gpu")

    args = tuple(inputs[name] for name in ("x", "w", "group_sizes"))
    return Run(call, args, 0, lambda y: {"y": y}, "jax", BF16_TOLERANCE)


def _tokamax() -> Any:
    """tokamax. It imports xprof, of 32 MB, for benchmarks of its own: an empty module will do."""
    parts = ("xprof", "xprof.cli", "xprof.cli.tools", "xprof.cli.tools.get_kernel_stats_tool")
    for name in parts:
        sys.modules.setdefault(name, ModuleType(name))
    tools, kernel_stats = (sys.modules[name] for name in parts[2:])
    vars(tools).setdefault("get_kernel_stats_tool", kernel_stats)
    import tokamax  # pyright: ignore[reportMissingImports]

    return tokamax
