"""Chunked prefill of KDA at Kimi-Linear's shape."""

from collections.abc import Iterator

from pallas_kernels.bench import delta_prefill
from pallas_kernels.bench.timing import Case
from pallas_kernels.mgpu import kda_prefill as kernel
from pallas_kernels.mgpu.kda_walk import Tiling

TILINGS = {
    f"V={t.columns},slots={t.key_slots},{t.query_slots}": t
    for t in (Tiling(32, 3, 2), Tiling(32, 2, 2), Tiling(64, 2, 2))
}
KDA = delta_prefill.Kind("kda_prefill", 32, 169e3, -0.284, kernel.prefill, TILINGS)


def cases() -> Iterator[Case]:
    return delta_prefill.cases(KDA)
