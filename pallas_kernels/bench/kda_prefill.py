"""Chunked prefill of KDA at Kimi-Linear's shape."""

from collections.abc import Iterator

from pallas_kernels.bench import delta_prefill
from pallas_kernels.bench.timing import Case
from pallas_kernels.mgpu import kda_prefill as kernel
from pallas_kernels.mgpu.kda_walk import Tiling

TILINGS = {
    f"turns={t.turns},lead={t.lead}": t
    for t in (
        *(Tiling(turns=turns) for turns in (1, 2, 4, 8)),
        *(Tiling(lead=lead) for lead in (0, 16, 40)),
    )
}
KDA = delta_prefill.Kind("kda_prefill", 32, 169e3, -0.284, kernel.prefill, TILINGS)


def cases() -> Iterator[Case]:
    return delta_prefill.cases(KDA)
