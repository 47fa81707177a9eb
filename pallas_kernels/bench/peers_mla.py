"""FlashMLA's dense decode for Hopper (the package sgl-flash-mla)."""

from typing import Any

from pallas_kernels.bench.peers import BF16_TOLERANCE, Peer, as_torch, torch_library
from pallas_kernels.bench.timing import Problem, Run


def peers(op: str) -> tuple[Peer, ...]:
    """The bf16 kernel over pages of 64 tokens."""
    return (Peer("flash_mla", ("torch", "flash_mla"), _run),)


def _run(problem: Problem) -> Run:
    torch = torch_library()
    from flash_mla import flash_mla_interface as flash  # pyright: ignore[reportMissingImports]

    inputs = problem.inputs
    q, pages = as_torch(inputs["q"]).unsqueeze(1), as_torch(inputs["pages"]).unsqueeze(2)
    table, lengths = (as_torch(inputs[name]).int() for name in ("table", "lengths"))
    # Filled in by the first call, then reused: the lengths stay what they are.
    schedule, _ = flash.get_mla_metadata()

    def call() -> Any:
        with torch.inference_mode():
            return flash.flash_mla_with_kvcache(
                q,
                pages,
                table,
                lengths,
                inputs["width"],
                schedule,
                softmax_scale=float(inputs["scale"]),
                causal=False,
                is_fp8_kvcache=False,
                use_legacy=True,
            )

    return Run(call, (), 0, lambda out: {"o": out[0][:, 0]}, "torch", BF16_TOLERANCE)
