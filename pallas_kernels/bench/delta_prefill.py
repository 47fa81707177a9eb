"""Chunked prefill at the shapes of both released models: prompts alone, and eight packed.

32 value heads of 128 x 128 in float32 (16 key heads for GDN), q, k and v bfloat16. Every state
starts from one that is given and is written back. Two shapes more, of KDA the second: a state every
1,024 tokens on the way, and the four heads of one of eight ranks.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import chunked
from pallas_kernels.bench.timing import Case, Problem, Run, floor_ms
from pallas_kernels.chunks import SLOT, ChunkTable, chunk_count, chunk_table
from pallas_kernels.walk import DeltaOut

HEADS, DIM = 32, 128
TOLERANCE = 5e-3
RAGGED = (1300, 547, 2048, 963, 271, 3063, 4095, 4097)


class Shape(NamedTuple):
    """Prompts, tokens between two states on the way (0: none), and the share of all heads."""

    lengths: tuple[int, ...]
    every: int = 0
    ranks: int = 1


SHAPES = {
    "1x1024": Shape((1024,)),
    "1x8192": Shape((8192,)),
    "8 ragged, 16384 in all": Shape(RAGGED),
    "8x2048": Shape((2048,) * 8),
    "1x4096": Shape((4096,)),
    "1x16384": Shape((16384,)),
    "1x8192, a state every 1024": Shape((8192,), every=1024),
    "1x8192, one of 8 ranks": Shape((8192,), ranks=8),
    "1x65536": Shape((65536,)),
}


class Kind(NamedTuple):
    """A delta rule: its op, key heads, FLOP of a token and value head in chunks of 64, the median
    of log decay rates, and the kernel with its tilings by name."""

    op: str
    key_heads: int
    flop: float
    log_rate: float
    kernel: Callable[..., DeltaOut]
    tilings: Mapping[str, Any]

    @property
    def channels(self) -> int:
        """Decays a head has."""
        return DIM if self.op == "kda_prefill" else 1


def cases(kind: Kind) -> Iterator[Case]:
    """All shapes of a kind."""
    for name, shape in SHAPES.items():
        yield Case(kind.op, name, floor_ms(*cost(kind, shape)), partial(make, kind, shape))


def cost(kind: Kind, shape: Shape) -> tuple[float, float]:
    """(bytes, FLOP): q, k, v and o in 16 bits, gates and states in 32; every state once."""
    tokens, heads = sum(shape.lengths), HEADS // shape.ranks
    states = 2 * len(shape.lengths) + len(_boundaries(shape))
    vectors = 2 * (2 * kind.key_heads + 2 * HEADS) * DIM + 4 * HEADS * (kind.channels + 1)
    moved = tokens * vectors // shape.ranks + states * heads * DIM * DIM * 4
    return float(moved), tokens * heads * kind.flop


def make(kind: Kind, shape: Shape) -> Problem:
    """Kimi-like decays: the rates of channels spread over three decades."""
    tokens, heads = sum(shape.lengths), HEADS // shape.ranks
    key_heads = kind.key_heads // shape.ranks
    keys = jax.random.split(jax.random.key(0), 7)
    q, k, v = (
        jax.random.normal(key, (tokens, count, DIM), jnp.bfloat16)
        for key, count in zip(keys, (key_heads, key_heads, heads), strict=False)
    )
    units = (heads, DIM) if kind.channels > 1 else (heads,)
    rates = jnp.exp(kind.log_rate + 1.43 * jax.random.normal(keys[3], units))
    g = -rates * jnp.exp(0.3 * jax.random.normal(keys[4], (tokens, *units)))
    beta = jax.nn.sigmoid(jax.random.normal(keys[5], (tokens, heads)))
    initial = 0.1 * jax.random.normal(keys[6], (len(shape.lengths), heads, DIM, DIM))
    inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial": initial}
    args = (*inputs.values(), _table(shape))
    boundaries = len(_boundaries(shape))

    def jitted(op: Callable[..., DeltaOut]) -> Callable[..., DeltaOut]:
        return jax.jit(lambda *args: op(*args, None, boundaries))

    def run(op: Callable[..., DeltaOut]) -> Run:
        return Run(jitted(op), args, 0, _result)

    runs: dict[str, Callable[[], Run]] = {"ours": partial(run, kind.kernel)}
    for name, tiling in kind.tilings.items():
        runs[f"ours[{name}]"] = partial(run, partial(kind.kernel, tiling=tiling))
    runs["xla"] = partial(run, chunked.prefill)
    expected = _result(jitted(chunked.prefill)(*args))
    return Problem(inputs | {"lengths": shape.lengths}, expected, TOLERANCE, runs)


def _boundaries(shape: Shape) -> list[tuple[int, int]]:
    """(prompt, tokens) of the states on the way; the last of a prompt is its final one."""
    return [
        (prompt, at)
        for prompt, length in enumerate(shape.lengths)
        for at in range(shape.every, length, shape.every or length)
        if at
    ]


def _table(shape: Shape) -> ChunkTable:
    lengths, boundaries = shape.lengths, _boundaries(shape)
    starts = [0] * len(lengths)
    table = chunk_table(
        lengths,
        starts,
        [SLOT] * len(lengths),
        boundaries,
        num_tokens=sum(lengths),
        num_segments=len(lengths),
        num_chunks=chunk_count(lengths, starts),
        num_boundaries=len(boundaries),
    )
    return ChunkTable(*(jnp.asarray(column) for column in table))


def _result(out: DeltaOut) -> dict[str, jax.Array]:
    return {"o": out.o, "state": out.final, "boundary": out.boundary}
