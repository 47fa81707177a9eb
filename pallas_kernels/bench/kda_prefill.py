"""Chunked prefill of KDA at Kimi-Linear's shape."""

from collections.abc import Iterator

from pallas_kernels.bench import delta_prefill
from pallas_kernels.bench.timing import Case
from pallas_kernels.mgpu import kda_prefill as kernel
from pallas_kernels.mgpu.kda_walk import Tiling

TILINGS = {
    f"slots={t.start_slots},{t.end_slots},{t.query_slots}": t
    for t in (Tiling(2, 3, 2), Tiling(2, 2, 2), Tiling(3, 3, 1))
}
KDA = delta_prefill.Kind("kda_prefill", 32, 169e3, -0.284, kernel.prefill, TILINGS)


def cases() -> Iterator[Case]:
    return delta_prefill.cases(KDA)
