"""Chunked prefill of GDN at the shapes of Qwen3-Next: 16 key heads, 32 value heads, 128 wide.

Prompts alone at four lengths, and eight of 2,048 tokens on average. Every state starts from a slot
and is written back; no state is asked for on the way.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import chunked, reference
from pallas_kernels.bench.timing import Case, Problem, Run, floor_ms
from pallas_kernels.chunks import SLOT, ChunkTable, chunk_count, chunk_table
from pallas_kernels.mgpu import gdn_prefill as kernel
from pallas_kernels.mgpu.gdn_walk import Tiling
from pallas_kernels.walk import DeltaOut

KEY_HEADS, HEADS, DIM = 16, 32, 128
RAGGED = (1300, 547, 2048, 963, 271, 3063, 4096, 4096)
LENGTHS = {
    "1x1024": (1024,),
    "1x4096": (4096,),
    "1x8192": (8192,),
    "1x16384": (16384,),
    "8x2048": RAGGED,
}
TILINGS = (Tiling(1), Tiling(2))
FLOP = 153e3
"""A value head's matrix products for one token."""


def cases() -> Iterator[Case]:
    for name, lengths in LENGTHS.items():
        yield Case("gdn_prefill", name, floor_ms(*cost(lengths)), partial(make, lengths))


def cost(lengths: tuple[int, ...]) -> tuple[float, float]:
    """(bytes, FLOP): q, k, v and o as 16 bits, gates, states in and out; chunks of 64."""
    tokens = sum(lengths)
    moved = tokens * (2 * (2 * KEY_HEADS + 2 * HEADS) * DIM + 8 * HEADS)
    return float(moved + 2 * len(lengths) * HEADS * DIM * DIM * 4), tokens * HEADS * FLOP


def make(lengths: tuple[int, ...]) -> Problem:
    tokens = sum(lengths)
    keys = jax.random.split(jax.random.key(0), 6)
    q, k, v = (
        jax.random.normal(key, (tokens, heads, DIM), jnp.bfloat16)
        for key, heads in zip(keys, (KEY_HEADS, KEY_HEADS, HEADS), strict=False)
    )
    g = -jnp.exp(1.4 * jax.random.normal(keys[3], (tokens, HEADS)) - 3.0)
    beta = jax.nn.sigmoid(jax.random.normal(keys[4], (tokens, HEADS)))
    initial = 0.1 * jax.random.normal(keys[5], (len(lengths), HEADS, DIM, DIM))
    inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial": initial}
    args = (*inputs.values(), _table(lengths))

    def run(op: Callable[..., DeltaOut], tolerance: float | None = None) -> Run:
        return Run(jax.jit(partial(_call, op)), args, 0, _result, tolerance=tolerance)

    runs: dict[str, Callable[[], Run]] = {"ours": lambda: run(kernel.prefill)}
    for t in TILINGS:
        runs[f"ours[stages={t.stages}]"] = partial(run, partial(kernel.prefill, tiling=t))
    runs["xla"] = lambda: run(chunked.prefill)
    expected = _result(jax.jit(partial(_call, reference.prefill))(*args))
    extra = {"lengths": lengths, "state": initial}
    return Problem(inputs | extra, expected, 5e-3, runs)


def _table(lengths: tuple[int, ...]) -> ChunkTable:
    count = len(lengths)
    table = chunk_table(
        lengths,
        [0] * count,
        [SLOT] * count,
        [],
        num_tokens=sum(lengths),
        num_segments=count,
        num_chunks=chunk_count(lengths, [0] * count),
        num_boundaries=0,
    )
    return ChunkTable(*(jnp.asarray(column) for column in table))


def _call(op: Callable[..., DeltaOut], *args: Any) -> DeltaOut:
    return op(*args, None, 0)


def _result(out: DeltaOut) -> dict[str, jax.Array]:
    return {"o": out.o, "state": out.final}
