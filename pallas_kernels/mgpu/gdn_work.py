"""What the warpgroups of the GDN walk share: their part of the work and their shared memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chunks import CHUNK
from pallas_kernels.mgpu.common import rows, visit_chunks
from pallas_kernels.mgpu.gdn_tiles import HALF, KEY, squares
from pallas_kernels.mgpu.gdn_within import QUERY

COLUMNS = 64
"""Value columns of a stater."""
STORED = 32
"""Columns of o that a copy takes: 128 bytes."""
HALVES = range(KEY // HALF)
_KEY_SIDE, _QUERY_SIDE = 4, 4  # copies a slot of each ring takes, those of v apart


@dataclass(frozen=True)
class Tiling:
    """Slots of what the staters, at least two, and the outputter read; bfloat16 parts, 1 or 2, in
    which the state takes U; staters of a block of threads, which share what does not depend on the
    column; whether makers and walkers are in one launch; `lead` of its `pipeline.Plan`."""

    key_slots: int = 3
    query_slots: int = 2
    parts: int = 1
    staters: int = 1
    together: bool = True
    lead: int = 0


class Shared(NamedTuple):
    """References to a `ChunkTable`, a `Within`, its marks, or None where it is ready, and all arrays
    by name; the rest as in `gdn_prefill`."""

    table: Any
    local: Any
    marks: Any
    arrays: dict[str, Any]
    num_boundaries: int
    tiling: Tiling
    interpret: Any


class Work(NamedTuple):
    """The part of a block: its rank among the runs, value head, first value column, and chunks of
    the run; chunks write `listed` of the final states and `used` of the boundaries, None where it
    is the only run, which finds it on the way; what walkers share."""

    rank: Any
    head: Any
    column: Any
    first: Any
    stop: Any
    listed: Any
    used: Any
    shared: Shared
    scratch: dict[str, Any]

    table = property(lambda self: self.shared.table)
    local = property(lambda self: self.shared.local)
    arrays = property(lambda self: self.shared.arrays)
    num_boundaries = property(lambda self: self.shared.num_boundaries)
    tiling = property(lambda self: self.shared.tiling)
    interpret = property(lambda self: self.shared.interpret)

    def columns(self, stater: Any) -> Any:
        """The value columns of a stater."""
        return pl.ds(self.column + stater * COLUMNS, COLUMNS)


def shared_memory(tiling: Tiling, interpret: Any) -> dict[str, Any]:
    keys, queries, staters = tiling.key_slots, tiling.query_slots, tiling.staters
    return {
        "k": rows((keys * len(HALVES), CHUNK, HALF), jnp.bfloat16, interpret),
        "v": rows((keys * staters, CHUNK, COLUMNS), jnp.bfloat16, interpret),
        "solve": squares(keys),
        "key_vectors": plgpu.SMEM((keys, QUERY, CHUNK), jnp.float32),
        "q": rows((queries * len(HALVES), CHUNK, HALF), jnp.bfloat16, interpret),
        "attend": squares(queries),
        "query_vector": plgpu.SMEM((queries, CHUNK), jnp.float32),
        "state": squares(staters, len(HALVES)),
        "update": squares(staters, 2),
        "out": rows((COLUMNS // STORED, CHUNK, STORED), jnp.float32, interpret),
        "keys_full": plgpu.Barrier(num_arrivals=_KEY_SIDE + staters, num_barriers=keys),
        "keys_free": plgpu.Barrier(num_arrivals=staters, num_barriers=keys),
        "queries_full": plgpu.Barrier(num_arrivals=_QUERY_SIDE, num_barriers=queries),
        "queries_free": plgpu.Barrier(num_barriers=queries),
        "state_full": plgpu.Barrier(num_barriers=staters),
        "state_free": plgpu.Barrier(num_barriers=staters),
        "update_full": plgpu.Barrier(num_barriers=2 * staters),
        "update_free": plgpu.Barrier(num_barriers=2 * staters),
    }


def visit(w: Work, visit: Callable[[Any, Any], None]) -> Any:
    """`common.visit_chunks` of a block's own."""
    return visit_chunks(w.first, w.stop, w.table.length, visit)


def drain(barrier: Any, arrived: Any, slots: int, first: Any = 0, begun: Any = None) -> None:
    """Wait for the last arrivals, one a slot from the first on, so that none is left when the block
    ends. Each but the first `slots` uses of a slot waited for the one before; `begun` uses, if not
    as many as arrivals."""

    def wait(i, _):
        plgpu.barrier_wait(barrier.at[first + lax.rem(i, slots)])

    begun = arrived if begun is None else begun
    lax.fori_loop(jnp.maximum(begun - slots, 0), arrived, wait, None)
