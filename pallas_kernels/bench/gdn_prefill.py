"""Chunked prefill of GDN at Qwen3-Next's shape."""

from collections.abc import Iterator

from pallas_kernels.bench import delta_prefill
from pallas_kernels.bench.timing import Case
from pallas_kernels.mgpu import gdn_prefill as kernel
from pallas_kernels.mgpu.gdn_walk import Tiling

TILINGS = {f"stages={n}": Tiling(n) for n in (1, 2)}
GDN = delta_prefill.Kind("gdn_prefill", 16, 153e3, -3.0, kernel.prefill, TILINGS)


def cases() -> Iterator[Case]:
    return delta_prefill.cases(GDN)
