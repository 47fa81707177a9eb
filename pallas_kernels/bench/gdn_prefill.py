"""Chunked prefill of GDN at Qwen3-Next's shape."""

from collections.abc import Iterator

from pallas_kernels.bench import delta_prefill
from pallas_kernels.bench.timing import Case
from pallas_kernels.mgpu import gdn_prefill as kernel
from pallas_kernels.mgpu.gdn_work import Tiling

TILINGS = {
    f"slots={t.key_slots}+{t.query_slots},parts={t.parts}": t
    for t in (Tiling(3, 2, 2), Tiling(2, 3, 1), Tiling(4, 1, 1))
}
GDN = delta_prefill.Kind("gdn_prefill", 16, 153e3, -3.0, kernel.prefill, TILINGS)


def cases() -> Iterator[Case]:
    return delta_prefill.cases(GDN)
