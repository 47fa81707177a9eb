"""Paged attention at the shapes of Kimi-Linear (latent) and Qwen3-Next (grouped): decode, and the
prompt of one request."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from pallas_kernels import PagedRows, paged_attention_decode, paged_attention_prefill
from pallas_kernels.bench.timing import Case, Problem, Run, floor_ms
from pallas_kernels.mgpu import attention_decode as kernel

PAGE = 64
LATENT_SHAPES = (
    (1, 4096),
    (1, 16384),
    (1, 65536),
    (8, 4096),
    (8, 16384),
    (32, 4096),
    (32, 16384),
    (64, 4096),
    (128, 4096),
    (256, 4096),
)
GROUPED_SHAPES = ((1, 16384), (1, 131072), (8, 16384), (32, 4096), (32, 16384), (128, 4096))
PROMPTS = (1024, 8192)
SWEPT = ((1, 4096), (1, 65536), (1, 131072), (8, 16384), (32, 4096), (128, 4096), (256, 4096))
"""Shapes at which other tilings are timed too."""
XLA_KEYS = 1 << 17
"""Most keys of a case at which XLA is timed: it takes milliseconds there."""

TILINGS = {
    f"split={pages}{', float32 parts' * parts}": {"split_pages": pages}
    | ({"partial": jnp.float32} if parts else {})
    for pages, parts in ((4, False), (8, False), (16, False), (32, False), (32, True))
}


def cases() -> Iterator[Case]:
    """All requests of a case are equally long."""
    for batch, length in LATENT_SHAPES:
        moved = 2 * batch * (length * 576 + 32 * (576 + 512))
        floor = floor_ms(moved, 2 * batch * length * 32 * (576 + 512))
        yield Case("mla_decode", f"B={batch} L={length}", floor, partial(_latent, batch, length))
    for batch, length in GROUPED_SHAPES:
        moved = 2 * batch * (2 * length * 2 * 256 + 2 * 16 * 256)
        yield Case(
            "gqa_decode", f"B={batch} L={length}", floor_ms(moved), partial(_grouped, batch, length)
        )
    for length in PROMPTS:
        # Of the expanded form, which needs the least: 192 + 128 columns a head.
        flop = length**2 * 32 * (192 + 128)
        yield Case("mla_prefill", f"T={length}", floor_ms(0, flop), partial(_latent_prompt, length))
        flop = length**2 * 16 * (256 + 256)
        yield Case(
            "gqa_prefill", f"T={length}", floor_ms(0, flop), partial(_grouped_prompt, length)
        )


def _latent(batch: int, length: int) -> Problem:
    q, table, lengths, pages = _data(batch, length, 32, 576)
    inputs = {
        "q": q,
        "pages": pages,
        "table": table,
        "lengths": lengths,
        "scale": 192**-0.5,
        "width": 512,
    }
    cached = pages[None]
    return _problem(inputs, (cached,), kernel.LATENT, length)


def _grouped(batch: int, length: int) -> Problem:
    q, table, lengths, *pages = _data(batch, length, 16, 256, 2, 256)
    inputs = {"q": q, "table": table, "lengths": lengths, "scale": 256**-0.5, "width": 256}
    cached = tuple(x.reshape(1, -1, PAGE, 2, 256) for x in pages)
    return _problem(inputs, cached, kernel.GROUPED, length)


def _data(batch: int, length: int, heads: int, width: int, *more: int) -> tuple[jax.Array, ...]:
    """Queries, page table, lengths and pages in random order: [P, 64, width], or two arrays of
    [P, 64, *more] where `more` is given."""
    keys = jax.random.split(jax.random.key(0), 4)
    pages = batch * (length // PAGE)
    table = jax.random.permutation(keys[0], pages).astype(jnp.int32).reshape(batch, -1)
    lengths = jnp.full((batch,), length, jnp.int32)
    q = jax.random.normal(keys[1], (batch, heads, width), jnp.bfloat16)
    pools = [
        jax.random.normal(key, (pages, PAGE, *(more or (width,))), jnp.bfloat16)
        for key in keys[2 : 4 if more else 3]
    ]
    return q, table, lengths, *pools


def _problem(
    inputs: dict[str, Any],
    cached: tuple[jax.Array, ...],
    tiling: kernel.Tiling,
    length: int,
) -> Problem:
    args = (inputs["q"], cached, inputs["table"], inputs["lengths"])
    scale, width = inputs["scale"], inputs["width"]

    def timed(attend: Callable[..., jax.Array]) -> Callable[[], Run]:
        def call(q, cached, table, lengths):
            return {"o": attend(q, PagedRows(cached[0], cached[-1], 0, width), table, lengths)}

        return lambda: Run(jax.jit(call), args)

    def one(impl: str) -> Callable[..., jax.Array]:
        return partial(paged_attention_decode, scale=scale, impl=impl)

    batch = len(inputs["lengths"])
    runs = {"ours": timed(one("mosaic"))}
    if (batch, length) in SWEPT:
        for name, changed in TILINGS.items():
            variant = partial(kernel.decode, scale=scale, tiling=replace(tiling, **changed))
            runs[f"ours[{name}]"] = timed(variant)
    if batch * length <= XLA_KEYS:
        runs["xla"] = timed(one("xla"))
    expected = jax.jit(partial(_one_by_one, one("reference"), width))(*args)
    return Problem(inputs, {"o": expected}, 5e-3, runs)


def _one_by_one(
    attend: Callable[..., jax.Array], width: int, q, cached, table, lengths
) -> jax.Array:
    """The reference of one request at a time: its keys in float32 need not fit for all."""

    def request(one):
        q, table, length = (x[None] for x in one)
        return attend(q, PagedRows(cached[0], cached[-1], 0, width), table, length)[0]

    return jax.lax.map(request, (q, table, lengths))


def _latent_prompt(length: int) -> Problem:
    _, page_table, _, pages = _data(1, length, 32, 576)
    return _prompt_problem(page_table, (pages[None],), (length, 32, 576), 512, 192**-0.5)


def _grouped_prompt(length: int) -> Problem:
    _, page_table, _, *pages = _data(1, length, 16, 256, 2, 256)
    cached = tuple(x.reshape(1, -1, PAGE, 2, 256) for x in pages)
    problem = _prompt_problem(page_table, cached, (length, 16, 256), 256, 256**-0.5)
    ours = problem.runs["ours"]().args

    def library(q, cached, page_table, positions, table):
        keys, values = (x[0, page_table[0]].reshape(1, length, 2, 256) for x in cached)
        out = jax.nn.dot_product_attention(
            q[None], keys, values, is_causal=True, implementation="cudnn"
        )
        return {"o": out[0].astype(jnp.float32)}

    cudnn = {"cudnn": lambda: Run(jax.jit(library), ours, tolerance=1e-2)}
    return replace(problem, runs={**problem.runs, **cudnn})


def _prompt_problem(
    page_table: jax.Array,
    cached: tuple[jax.Array, ...],
    shape: tuple[int, int, int],
    width: int,
    scale: float,
) -> Problem:
    """All tokens of one request of whole pages, whose keys are already there."""
    length = shape[0]
    q = jax.random.normal(jax.random.key(5), shape, jnp.bfloat16)
    sizes = {"num_tokens": length, "num_segments": 1, "num_boundaries": 1}
    table = pk.chunk_table([length], [0], [pk.ZERO], (), num_chunks=length // PAGE, **sizes)
    positions = jnp.arange(length, dtype=jnp.int32)
    args = (q, cached, page_table, positions, jax.tree.map(jnp.asarray, table))

    def timed(impl: str) -> Callable[[], Run]:
        def call(q, cached, page_table, positions, table):
            rows = PagedRows(cached[0], cached[-1], 0, width)
            return {
                "o": paged_attention_prefill(
                    q, rows, page_table, positions, table, scale=scale, impl=impl
                )
            }

        return lambda: Run(jax.jit(call), args)

    every = jnp.broadcast_to(page_table, (length, page_table.shape[1]))
    reference = partial(paged_attention_decode, scale=scale, impl="reference")
    expected = jax.jit(partial(_one_by_one, reference, width))(q, cached, every, positions + 1)
    inputs = {"q": q, "page_table": page_table, "positions": positions}
    return Problem(inputs, {"o": expected}, 5e-3, {"ours": timed("mosaic"), "xla": timed("xla")})
