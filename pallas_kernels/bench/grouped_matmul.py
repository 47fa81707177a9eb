"""The experts' products at the shapes of both models, routed uniformly at random.

`grouped_matmul` up is one projection of [width, expert], which is what peers were measured on; down
goes back. `grouped_swiglu` is what the models run first: gate and up in one, with SiLU.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.bench.timing import Case, Problem, Run, floor_ms
from pallas_kernels.grouped_matmul import grouped_matmul as composed
from pallas_kernels.grouped_matmul import grouped_swiglu as composed_swiglu
from pallas_kernels.mgpu import grouped_matmul as kernel
from pallas_kernels.mgpu.grouped_matmul import Tiling


class Experts(NamedTuple):
    count: int
    width: int
    inner: int
    top: int


MODELS = {"kimi": Experts(256, 2304, 1024, 8), "qwen": Experts(512, 2048, 512, 10)}
TOKENS = (1, 32, 256, 2048, 8192)
XLA_TOKENS = (1, 32)
"""Where the XLA form, which copies the matrices of its tiles, is worth its time."""

FEW = (
    Tiling(8, 64, 128, 3, 1, 2),
    Tiling(16, 64, 64, 5, 1, 2),
    Tiling(16, 64, 64, 3, 1, 3),
    Tiling(16, 64, 128, 2, 1, 3),
    Tiling(16, 128, 64, 3, 1, 2),
    Tiling(16, 64, 64, 6, 2, 1),
    Tiling(32, 64, 64, 4, 1, 2),
)
SOME = (
    Tiling(32, 64, 64, 4, 1, 2),
    Tiling(48, 64, 64, 5, 2, 1),
    Tiling(64, 64, 64, 5, 2, 1),
    Tiling(64, 64, 64, 4, 1, 1),
    Tiling(96, 64, 64, 4, 2, 1),
    Tiling(128, 64, 64, 3, 2, 1),
    Tiling(64, 128, 64, 4, 2, 1),
    Tiling(128, 128, 64, 3, 2, 1),
)
MANY = (
    Tiling(64, 64, 64, 5, 2, 1),
    Tiling(96, 64, 64, 4, 2, 1),
    Tiling(128, 64, 64, 3, 2, 1),
    Tiling(96, 128, 64, 4, 2, 1),
    Tiling(128, 128, 64, 3, 2, 1),
    Tiling(256, 64, 64, 3, 2, 1),
)
SWEPT = {
    ("up", "kimi", 1): FEW,
    ("up", "qwen", 256): FEW,
    ("up", "kimi", 2048): SOME,
    ("down", "kimi", 32): FEW,
    ("down", "kimi", 8192): MANY,
    ("swiglu", "kimi", 1): FEW,
    ("swiglu", "kimi", 32): FEW,
    ("swiglu", "qwen", 256): FEW,
    ("swiglu", "qwen", 2048): SOME,
    ("swiglu", "kimi", 8192): MANY,
}
PARTS = {"up": 1, "down": 1, "swiglu": 2}


def cases() -> Iterator[Case]:
    """Several tilings where `SWEPT` says so; elsewhere the default."""
    for product in PARTS:
        for model in MODELS:
            for tokens in TOKENS:
                op = "grouped_swiglu" if product == "swiglu" else "grouped_matmul"
                _, inner, width = shape(model, product)
                name = f"{model} {product} {inner}->{width // PARTS[product]} T={tokens}"
                floor = floor_ms(*cost(model, product, tokens))
                yield Case(op, name, floor, partial(make, model, product, tokens))


def shape(model: str, product: str) -> tuple[int, int, int]:
    """[groups, inner dimension, columns] of the weights."""
    experts, width, inner, _ = MODELS[model]
    return {
        "up": (experts, width, inner),
        "down": (experts, inner, width),
        "swiglu": (experts, width, 2 * inner),
    }[product]


def cost(model: str, product: str, tokens: int) -> tuple[float, float]:
    """(bytes, FLOP): the weights of the experts that random routing is expected to touch, x, y."""
    groups, inner, width = shape(model, product)
    top = MODELS[model].top
    touched = groups * (1.0 - (1.0 - top / groups) ** tokens)
    rows = tokens * top
    moved = 2 * (touched * inner * width + rows * (inner + width // PARTS[product]))
    return moved, 2.0 * rows * inner * width


def route(model: str, tokens: int) -> jax.Array:
    """Rows of each expert where every token takes `top` different ones."""
    experts, _, _, top = MODELS[model]
    noise = jax.random.uniform(jax.random.key(0), (tokens, experts))
    return jnp.bincount(jax.lax.top_k(noise, top)[1].ravel(), length=experts).astype(jnp.int32)


def make(model: str, product: str, tokens: int) -> Problem:
    weights, sizes = shape(model, product), route(model, tokens)
    rows = tokens * MODELS[model].top
    keys = jax.random.split(jax.random.key(1))
    x = jax.random.normal(keys[0], (rows, weights[1]), jnp.bfloat16)
    w = jax.random.normal(keys[1], weights, jnp.bfloat16) * jnp.bfloat16(weights[1] ** -0.5)
    swiglu = product == "swiglu"
    xla = composed_swiglu if swiglu else composed
    ours = kernel.grouped_swiglu if swiglu else kernel.grouped_matmul
    args = x, w, sizes
    runs: dict[str, Callable[[], Run]] = {"ours": partial(_run, ours, args)}
    if swiglu:
        runs["ours[silu by XLA]"] = partial(_run, _apart, args)
    for t in SWEPT.get((product, model, tokens), ()):
        if t.misfit(weights[1], weights[2] // PARTS[product], PARTS[product]) is None:
            name = f"ours[{t.rows}x{t.columns}x{t.depth} {t.stages=} {t.warpgroups=} {t.blocks=}]"
            runs[name.replace("t.", "")] = partial(_run, partial(ours, tiling=t), args)
    if tokens in XLA_TOKENS:
        runs["xla"] = partial(_run, xla, args)
    expected = jax.jit(lambda x, w, sizes: xla(x.astype(jnp.float32), w, sizes))(*args)
    return Problem({"x": x, "w": w, "group_sizes": sizes}, {"y": expected}, 5e-3, runs)


def _run(op: Callable[..., jax.Array], args: tuple[jax.Array, ...]) -> Run:
    return Run(jax.jit(op), args, 0, lambda y: {"y": y})


def _apart(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    gate, up = jnp.split(kernel.grouped_matmul(x, w, group_sizes), 2, axis=-1)
    return jax.nn.silu(gate) * up
