"""Chunked prefill of flash-linear-attention (Triton) and jax-linear-attention (Mosaic GPU).

Both take and return the state of every prompt, and normalise queries and keys themselves. Neither
reads states from slots of a pool or gives them at boundaries.
"""

import importlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.bench.peers import BF16_TOLERANCE, Peer, as_torch, torch_library
from pallas_kernels.bench.timing import Problem, Run

CHUNKED = {
    "kda": ("fla.ops.kda", "chunk_kda"),
    "gdn": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
}
KINDS = {"kda": "kda", "gdn": "gated_deltanet"}
LEAST_DECAY = -4.95
"""What jax-linear-attention's KDA takes: exp of five of them in a row is still a float32."""
CLIPPED_TOLERANCE = 5e-2
"""Of a peer that computes with clipped decays, against the exact result."""


def peers(op: str) -> tuple[Peer, ...]:
    """fla on packed prompts; jax-linear-attention where prompts are of one length."""
    kind = op.removesuffix("_prefill")
    return (
        Peer("fla", ("torch", "fla"), partial(_fla, kind)),
        Peer("jax-linear-attention", ("jla",), partial(_jla, kind)),
    )


def _fla(kind: str, problem: Problem) -> Run:
    torch = torch_library()
    module, name = CHUNKED[kind]
    chunked = getattr(importlib.import_module(module), name)
    inputs, lengths = problem.inputs, problem.inputs["lengths"]
    tensors = {name: as_torch(inputs[name]).unsqueeze(0) for name in ("q", "k", "v", "g", "beta")}
    state = as_torch(inputs["initial"])
    ends = torch.tensor([0, *lengths]).cumsum(0)
    packed = {"cu_seqlens": ends.cuda(), "cu_seqlens_cpu": ends} if len(lengths) > 1 else {}

    def call() -> Any:
        with torch.inference_mode():
            return chunked(
                **tensors,
                **packed,
                initial_state=state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )

    return Run(call, (), 0, lambda out: {"o": out[0][0], "state": out[1]}, "torch", BF16_TOLERANCE)


def _jla(kind: str, problem: Problem) -> Run | None:
    inputs, lengths = problem.inputs, problem.inputs["lengths"]
    if len(set(lengths)) > 1:
        return None
    attention = importlib.import_module("jla.ops").linear_attention
    args = [inputs[name] for name in ("q", "k", "v", "g", "beta")]
    args = [x.reshape(len(lengths), lengths[0], *x.shape[1:]) for x in args]
    args[3] = jnp.maximum(args[3], LEAST_DECAY)

    def call(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, state: Any):
        return attention(
            KINDS[kind],
            q,
            k,
            v,
            g=g,
            beta=beta,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm=True,
            impl="mosaic_gpu",
        )

    def result(out: Any) -> dict[str, jax.Array]:
        o, final = out
        return {"o": o.reshape(-1, *o.shape[2:]), "state": final}

    return Run(jax.jit(call), (*args, inputs["initial"]), 0, result, tolerance=CLIPPED_TOLERANCE)
