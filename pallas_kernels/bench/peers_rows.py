"""Checkpoint rows with what torch offers: gather and scatter, eager and compiled."""

from collections.abc import Callable
from functools import partial
from typing import Any

from pallas_kernels.bench.peers import Peer, as_torch, torch_library
from pallas_kernels.bench.timing import Problem, Run

INT8_TOLERANCE = 1e-2
"""A compiled division may round otherwise, which moves a value of int8 by one."""


def peers(op: str) -> tuple[Peer, ...]:
    """torch, and torch.compile of the same function."""
    return (
        Peer("torch", ("torch",), partial(_run, op, False)),
        Peer("torch.compile", ("torch",), partial(_run, op, True)),
    )


def _run(op: str, compiled: bool, problem: Problem) -> Run:
    torch = torch_library()
    inputs = problem.inputs
    index = as_torch(inputs["index"]).long()
    names = [name for name in ("rows", "scales") if name in inputs]
    args = tuple(as_torch(inputs[name]) for name in names)
    call = _functions(inputs.get("units", 0))[op]
    if compiled:
        call = torch.compile(call, dynamic=False)
    outputs = {"pack": ("rows",), "pack_int8": ("rows", "scales")}.get(op, ("state",))
    return Run(
        call,
        (index, *args),
        0,
        lambda out: dict(zip(outputs, out, strict=True)),
        "torch",
        INT8_TOLERANCE if op.endswith("int8") else 0.0,
    )


def _functions(units: int) -> dict[str, Callable[..., Any]]:
    """By op: of (row numbers, arrays) a tuple of outputs. `units` rows are unpacked to."""
    torch = torch_library()

    def pack(index: Any, rows: Any) -> Any:
        return (rows.index_select(0, index),)

    def pack_int8(index: Any, rows: Any) -> Any:
        kept = rows.index_select(0, index)
        scales = kept.abs().amax(-1).clamp_min(1e-8) / 127
        quantized = (kept / scales[:, None]).round().clamp(-127, 127)
        return quantized.to(torch.int8), scales

    def unpack(index: Any, rows: Any) -> Any:
        state = torch.zeros(units, rows.shape[1], device=rows.device)
        return (state.index_copy_(0, index, rows),)

    def unpack_int8(index: Any, rows: Any, scales: Any) -> Any:
        return unpack(index, rows.float() * scales[:, None])

    return {
        "pack": pack,
        "pack_int8": pack_int8,
        "unpack": unpack,
        "unpack_int8": unpack_int8,
    }
