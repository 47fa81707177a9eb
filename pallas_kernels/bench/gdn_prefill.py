"""Chunked prefill of GDN at Qwen3-Next's shape."""

from collections.abc import Iterator

from pallas_kernels.bench import delta_prefill
from pallas_kernels.bench.timing import Case
from pallas_kernels.mgpu import gdn_prefill as kernel
from pallas_kernels.mgpu.gdn_work import Tiling

TILINGS = {
    f"slots={t.key_slots}+{t.query_slots},columns={64 * t.staters},launches={2 - t.together}": t
    for t in (
        Tiling(3, 2, 1, 1, True),
        Tiling(3, 2, 1, 1, False),
        Tiling(2, 2, 1, 2, True),
        Tiling(2, 2, 1, 2, False),
        Tiling(3, 1, 1, 2, False),
        Tiling(3, 3, 1, 1, True),
    )
}
GDN = delta_prefill.Kind("gdn_prefill", 16, 153e3, -3.0, kernel.prefill, TILINGS)


def cases() -> Iterator[Case]:
    return delta_prefill.cases(GDN)
