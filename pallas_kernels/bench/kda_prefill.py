"""Prefill of KDA at Kimi-Linear's shape: 32 heads of 128 x 128, q, k and v bfloat16."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import chunked
from pallas_kernels.bench.timing import Case, Problem, Run, floor_ms
from pallas_kernels.chunks import SLOT, ChunkTable, chunk_count, chunk_table
from pallas_kernels.mgpu import kda_prefill as kernel
from pallas_kernels.mgpu.kda_walk import Tiling

HEADS, DIM = 32, 128
FLOP = 169e3
"""Of a token and head, in chunks of 64."""
SHAPES = {
    "1x1024": (1024,),
    "1x4096": (4096,),
    "1x8192": (8192,),
    "1x16384": (16384,),
    "8x2048": (2048,) * 8,
    "8 ragged, 16384 in all": (1300, 547, 2048, 963, 271, 3063, 4095, 4097),
}
TILINGS = (Tiling(32, 3, 2), Tiling(32, 2, 2), Tiling(64, 2, 2))
XLA = ("1x1024",)
"""Where the XLA form is worth its time."""


def cases() -> Iterator[Case]:
    for name, lengths in SHAPES.items():
        yield Case("kda_prefill", name, floor_ms(*cost(lengths)), partial(make, name, lengths))


def cost(lengths: tuple[int, ...]) -> tuple[float, float]:
    """(bytes, FLOP): q, k, v in 16 bits, the decay, beta and o in 32; states in and out."""
    rows = sum(lengths) * HEADS
    moved = rows * DIM * (3 * 2 + 4 + 4) + rows * 4 + 2 * len(lengths) * HEADS * DIM * DIM * 4
    return float(moved), rows * FLOP


def make(name: str, lengths: tuple[int, ...]) -> Problem:
    tokens, count = sum(lengths), len(lengths)
    starts = [0] * count
    table = ChunkTable(
        *(
            jnp.asarray(column)
            for column in chunk_table(
                lengths,
                starts,
                [SLOT] * count,
                [],
                num_tokens=tokens,
                num_segments=count,
                num_chunks=chunk_count(lengths, starts),
                num_boundaries=1,
            )
        )
    )
    keys = jax.random.split(jax.random.key(0), 7)
    shape = (tokens, HEADS, DIM)
    q, k, v = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys[:3])
    channels = jnp.exp(-0.284 + 1.43 * jax.random.normal(keys[3], shape[1:]))
    g = -channels * jnp.exp(0.3 * jax.random.normal(keys[4], shape))
    beta = jax.nn.sigmoid(jax.random.normal(keys[5], shape[:2]))
    initial = 0.1 * jax.random.normal(keys[6], (count, HEADS, DIM, DIM))
    args = q, k, v, g, beta, initial, table

    runs: dict[str, Callable[[], Run]] = {"ours": partial(_run, kernel.prefill, args)}
    for t in TILINGS:
        tiled = partial(kernel.prefill, tiling=t)
        slots = f"slots={t.key_slots},{t.query_slots}"
        runs[f"ours[V={t.columns},{slots}]"] = partial(_run, tiled, args)
    if name in XLA:
        runs["xla"] = partial(_run, chunked.prefill, args)
    inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial": initial, "table": table}
    return Problem(inputs, _result(_jitted(chunked.prefill)(*args)), 5e-3, runs)


def _jitted(op: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(lambda *args: op(*args, None, 1))


def _run(op: Callable[..., Any], args: tuple[Any, ...]) -> Run:
    return Run(_jitted(op), args, 0, _result)


def _result(out: Any) -> dict[str, jax.Array]:
    return {"o": out.o, "state": out.final}
