"""Recurrent decode of flash-linear-attention (fla-core, Triton): as released, and retiled.

Its entry points fix the tile of value columns and the warps. So that the comparison is with what
its kernel can do and not with that choice, other tiles are put in on the way to the launch.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from pallas_kernels.bench.peers import BF16_TOLERANCE, Peer, as_torch, torch_library
from pallas_kernels.bench.timing import Problem, Run

TILES = ((8, 1), (16, 2), (32, 4))
"""(value columns, warps) of a program."""

KERNELS = {
    "kda": ("fla.ops.kda.fused_recurrent", "fused_recurrent_kda"),
    "gdn": ("fla.ops.gated_delta_rule.fused_recurrent", "fused_recurrent_gated_delta_rule"),
}


def peers(op: str) -> tuple[Peer, ...]:
    """The released call in both state layouts, in place (in a pool, where it takes one), and every
    tile."""
    packages = ("torch", "fla")
    tiled = tuple(
        Peer(f"fla[V={columns},warps={warps}]", packages, partial(_call, (columns, warps), False))
        for columns, warps in TILES
    )
    return (
        Peer("fla", packages, partial(_call, None, False)),
        Peer("fla[v first]", packages, partial(_call, None, True)),
        Peer("fla[v first,in place]", packages, _in_place),
        Peer("fla[pool]", packages, partial(_pooled, None)),
        Peer("fla[pool,V=16,warps=2]", packages, partial(_pooled, (16, 2))),
        *tiled,
    )


def _tensors(problem: Problem) -> dict[str, Any]:
    """q, k, v, g, beta with an axis of one token, `[B, 1, ...]`."""
    return {
        name: as_torch(problem.inputs[name]).unsqueeze(1) for name in ("q", "k", "v", "g", "beta")
    }


def _kind(problem: Problem) -> str:
    return "kda" if problem.inputs["g"].ndim == 3 else "gdn"


def _in_place(problem: Problem) -> Run | None:
    """States as an array of the batch, overwritten; GDN only, as KDA's kernel has a pool."""
    return None if _kind(problem) == "kda" else _call(None, True, problem, in_place=True)


def _call(
    tile: tuple[int, int] | None, v_first: bool, problem: Problem, in_place: bool = False
) -> Run:
    """States in and out as arrays of the batch: no pool, no slots."""
    module, name = KERNELS[_kind(problem)]
    recurrent = getattr(importlib.import_module(module), name)
    inputs = problem.inputs
    state = as_torch(inputs["pool"][inputs["layer"], inputs["slots"]])
    if v_first:
        state = state.transpose(-1, -2).contiguous()
    tensors = _tensors(problem)

    def call() -> Any:
        with _tiled(module, f"{name}_fwd_kernel", tile, in_place):
            return recurrent(
                **tensors,
                initial_state=state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                state_v_first=v_first,
            )

    def result(out: Any) -> dict[str, Any]:
        o, final = out
        final = state if in_place else final
        return {"o": o[:, 0], "state": final.transpose(-1, -2) if v_first else final}

    return Run(_inference(call), (), 0, result, "torch", BF16_TOLERANCE)


def _pooled(tile: tuple[int, int] | None, problem: Problem) -> Run | None:
    """States read and written in place at slots of a pool (KDA only)."""
    if _kind(problem) != "kda":
        return None
    module, name = KERNELS["kda"]
    torch = torch_library()
    forward = getattr(importlib.import_module(module), f"{name}_fwd")
    inputs = problem.inputs
    pool, slots = as_torch(inputs["pool"][inputs["layer"]]), as_torch(inputs["slots"]).int()
    tensors = {name: x.transpose(0, 1).contiguous() for name, x in _tensors(problem).items()}
    each = torch.arange(slots.shape[0] + 1, device=slots.device)
    out = torch.empty_like(tensors["v"])

    def call() -> Any:
        with _tiled(module, f"{name}_fwd_kernel", tile):
            return forward(
                **tensors,
                initial_state=pool,
                inplace_final_state=True,
                cu_seqlens=each,
                ssm_state_indices=slots,
                use_qk_l2norm_in_kernel=True,
                out=out,
            )

    return Run(
        _inference(call),
        (),
        0,
        lambda value: {"o": value[0][0], "state": pool[slots.long()]},
        "torch",
        BF16_TOLERANCE,
    )


def _inference(call: Callable[[], Any]) -> Callable[[], Any]:
    torch = torch_library()

    def quiet() -> Any:
        with torch.inference_mode():
            return call()

    return quiet


@contextlib.contextmanager
def _tiled(
    module: str, kernel: str, tile: tuple[int, int] | None, in_place: bool = False
) -> Iterator[None]:
    """Inside, `kernel` is launched with (value columns, warps) of `tile`, and as told in place."""
    if tile is None and not in_place:
        yield
        return
    holder = importlib.import_module(module)
    released = getattr(holder, kernel)
    setattr(holder, kernel, _Relaunched(released, tile, in_place))
    try:
        yield
    finally:
        setattr(holder, kernel, released)


class _Relaunched:
    """A Triton kernel that is launched over other tiles than its caller asks for, or writes final
    states over initial ones: every program reads its tile of a token's state before it writes."""

    def __init__(self, kernel: Any, tile: tuple[int, int] | None, in_place: bool):
        self.kernel, self.tile, self.in_place = kernel, tile, in_place

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(**arguments: Any) -> Any:
            programs = grid[0]
            if self.tile is not None:
                columns, warps = self.tile
                programs = programs * arguments["BV"] // columns
                arguments |= {"BV": columns, "num_warps": warps}
            if self.in_place:
                arguments["ht"] = arguments["h0"]
            return self.kernel[(programs,)](**arguments)

        return launch
