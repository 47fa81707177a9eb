"""Other people's kernels, timed beside ours on the same data. Each is optional.

Peers of an op read these names of `Problem.inputs`, and compute these of `Problem.expected`:

| op | inputs | expected |
| --- | --- | --- |
| `delta_decode` | q, k `[B, Hk, K]`, v `[B, H, V]`, g `[B, H, K]` or `[B, H]`, beta `[B, H]`, pool `[L, S, H, K, V]`, slots `[B]`, layer | o `[B, H, V]`, state `[B, H, K, V]` |
| `pack`, `pack_int8` | rows `[N, V]` float32, index `[R]` | rows `[R, V]`, and scales `[R]` |
| `unpack`, `unpack_int8` | rows `[R, V]`, scales `[R]` (int8), index `[R]`, units (N) | state `[N, V]` |
| `grouped_matmul` | x `[M, K]`, w `[G, K, N]`, group_sizes `[G]` | y `[M, N]` |
| `kda_prefill`, `gdn_prefill` | q, k `[T, Hk, K]`, v `[T, H, V]`, g `[T, H, K]` or `[T, H]`, beta `[T, H]`, initial `[N, H, K, V]`, lengths (of N prompts) | o `[T, H, V]`, state `[N, H, K, V]` |
| `mla_decode` | q `[B, Hq, Dk]`, pages `[P, 64, Dk]`, table `[B, M]`, lengths `[B]`, scale, width | o `[B, Hq, width]` |
"""  # noqa: E501

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from pallas_kernels.bench.timing import Problem, Run

MODULES = {
    "delta_decode": "peers_delta",
    "pack": "peers_rows",
    "pack_int8": "peers_rows",
    "unpack": "peers_rows",
    "unpack_int8": "peers_rows",
    "grouped_matmul": "peers_grouped",
    "mla_decode": "peers_mla",
    "kda_prefill": "peers_prefill",
    "gdn_prefill": "peers_prefill",
}

BF16_TOLERANCE = 1e-2
"""Of a peer that rounds its output to bfloat16, against a float32 reference."""


class Peer(NamedTuple):
    """A kernel of someone else: the packages it needs, and how a problem is put to it.

    `make` may return None: this peer does not take such a problem.
    """

    name: str
    packages: tuple[str, ...]
    make: Callable[[Problem], Run | None]

    def missing(self) -> str | None:
        """What is not installed, or None."""
        absent = [name for name in self.packages if importlib.util.find_spec(name) is None]
        return f"not installed: {', '.join(absent)}" if absent else None


def peers(op: str) -> tuple[Peer, ...]:
    """The peers of an op; none for an op that nobody else has."""
    if op not in MODULES:
        return ()
    return importlib.import_module(f"pallas_kernels.bench.{MODULES[op]}").peers(op)


def as_torch(x: jax.Array) -> Any:
    """A copy of a JAX array as a torch tensor on the same device."""
    return torch_library().from_dlpack(jax.block_until_ready(x)).clone()


def torch_library() -> Any:
    """torch, which this library does not depend on."""
    return importlib.import_module("torch")
