"""What the warpgroups of the GDN walk share: their part of the work and their shared memory."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chunks import CHUNK
from pallas_kernels.mgpu.common import rows
from pallas_kernels.mgpu.gdn_tiles import HALF, KEY, squares
from pallas_kernels.mgpu.gdn_within import QUERY

COLUMNS = 64
"""Value columns of a walker."""
STORED = 32
"""Columns of o that a copy takes: 128 bytes."""
HALVES = range(KEY // HALF)
_KEY_SIDE, _QUERY_SIDE = 5, 4  # copies a slot of each ring takes


@dataclass(frozen=True)
class Tiling:
    """Slots of what the stater, at least two, and the outputter read; bfloat16 parts, 1 or 2, in
    which the state takes U."""

    key_slots: int = 3
    query_slots: int = 2
    parts: int = 1


class Shared(NamedTuple):
    """References to a `ChunkTable`, a `Within` and all arrays by name; the rest as in
    `gdn_prefill`."""

    table: Any
    local: Any
    arrays: dict[str, Any]
    num_boundaries: int
    tiling: Tiling
    interpret: Any


class Work(NamedTuple):
    """The part of a walker: its rank among the runs, value head and columns, and chunks of the run;
    chunks write `listed` of the final states and `used` of the boundaries, None where it is the
    only run, which finds it on the way; what walkers share, and shared memory."""

    rank: Any
    head: Any
    columns: Any
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


def shared_memory(tiling: Tiling, interpret: Any) -> dict[str, Any]:
    keys, queries = tiling.key_slots, tiling.query_slots
    return {
        "k": rows((keys * len(HALVES), CHUNK, HALF), jnp.bfloat16, interpret),
        "v": rows((keys, CHUNK, COLUMNS), jnp.bfloat16, interpret),
        "solve": squares(keys),
        "key_vectors": plgpu.SMEM((keys, QUERY, CHUNK), jnp.float32),
        "q": rows((queries * len(HALVES), CHUNK, HALF), jnp.bfloat16, interpret),
        "attend": squares(queries),
        "query_vector": plgpu.SMEM((queries, CHUNK), jnp.float32),
        "state": squares(2, len(HALVES)),
        "update": squares(2),
        "out": rows((COLUMNS // STORED, CHUNK, STORED), jnp.float32, interpret),
        "keys_full": plgpu.Barrier(num_arrivals=_KEY_SIDE, num_barriers=keys),
        "keys_free": plgpu.Barrier(num_barriers=keys),
        "queries_full": plgpu.Barrier(num_arrivals=_QUERY_SIDE, num_barriers=queries),
        "queries_free": plgpu.Barrier(num_barriers=queries),
        "handed": plgpu.Barrier(num_barriers=2),
        "taken": plgpu.Barrier(num_barriers=2),
    }
