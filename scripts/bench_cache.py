"""Times the prefix cache: what a prompt costs, and what an eviction costs as the pool grows.

    python scripts/bench_cache.py --out results/cache

Everything runs on the host in one thread; no model and no device is involved.
"""

import json
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from dasc_jax import prefix_cache as pc
from dasc_jax.types import PAGE

PLAN = "bench"


@dataclass(frozen=True)
class Args:
    """Sizes of the benchmark."""

    out: Path | None = None
    """Directory for `bench_cache.jsonl`, one measurement a line; nothing is written without it."""
    prompt: int = 16_384
    """Tokens of the measured prompt."""
    pages: int = 20_000
    """Attention pages of the cache that serves it; it is full before the measurement starts."""
    pools: tuple[int, ...] = (1_000, 10_000, 100_000)
    """Pool sizes, in pages, at which single evictions are timed."""
    repeats: int = 50
    """Prompts timed; evictions are timed ten times as often."""
    seed: int = 0
    """Of the token ids."""


def filled(pages: int, prompt_pages: int, random: np.random.Generator) -> pc.PrefixCache:
    """A cache whose pages are all in the trie, in paths of `prompt_pages` that end with a state."""
    cache = pc.empty(pages + 1, pages // prompt_pages + 8)
    while free := min(prompt_pages, cache.counts.free_pages):
        cache, own, _ = pc.allocate_pages(cache, free)
        cache, slot = pc.allocate_slot(cache)
        assert own is not None and slot is not None
        states = [(PAGE * free, slot, 0)]
        tokens = prompt(free * PAGE, random)
        cache, _ = pc.insert(cache, tokens, own, states, kv_lineage=0, plan_id=PLAN)
    return cache


def prompt(length: int, random: np.random.Generator) -> np.ndarray:
    return random.integers(0, 160_000, length).astype(np.int32)


def time_prompts(args: Args) -> Iterator[tuple[str, list[float]]]:
    """Milliseconds of every call in the life of a cold prompt, then of the same prompt again."""
    random = np.random.default_rng(args.seed)
    cache = filled(args.pages, args.prompt // PAGE, random)
    spent: dict[str, list[float]] = {}

    def timed(name: str, call: Callable):
        start = time.perf_counter()
        value = call()
        spent.setdefault(name, []).append(1e3 * (time.perf_counter() - start))
        return value

    for _ in range(args.repeats):
        tokens = prompt(args.prompt, random)
        for turn in ("cold", "hit"):
            life(cache, tokens, lambda name, call, turn=turn: timed(f"{turn} {name}", call))
            if turn == "cold":
                cache = life(cache, tokens, lambda _, call: call())
    for turn in ("cold", "hit"):
        both = zip(spent[f"{turn} match"], spent[f"{turn} insert"], strict=True)
        spent[f"{turn} match + insert"] = [sum(pair) for pair in both]
    yield from spent.items()


def life(cache: pc.PrefixCache, tokens: np.ndarray, timed: Callable) -> pc.PrefixCache:
    """One request from its match to its end, each call through `timed(name, call)`."""
    cache, found = timed("match", lambda: pc.match(cache, tokens, plan_id=PLAN))
    cache, held = timed("lock", lambda: pc.lock(cache, found))
    need = -(-len(tokens) // PAGE) - len(found.pages)
    cache, own, _ = timed("allocate pages", lambda: pc.allocate_pages(cache, need))
    assert own is not None
    states = []
    depth = (len(tokens) - 1) // PAGE * PAGE
    if depth > found.depth:
        cache, slot = timed("allocate slot", lambda: pc.allocate_slot(cache))
        states = [(depth, slot, 0)]
    pages = found.pages + own
    cache, put = timed(
        "insert",
        lambda: pc.insert(cache, tokens, pages, states, kv_lineage=0, plan_id=PLAN, lock=held),
    )
    private = [page for page in own if page not in put.adopted]
    cache = timed("release", lambda: pc.release_pages(cache, private))
    return timed("unlock", lambda: pc.unlock(cache, put.lock))


def time_evictions(pages: int, args: Args) -> list[float]:
    """Microseconds of each of many evictions of one page, in a full pool of so many."""
    cache = filled(pages, 64, np.random.default_rng(args.seed))
    spent = []
    for _ in range(min(10 * args.repeats, pages // 2)):
        start = time.perf_counter()
        cache, gone = pc.evict(cache, pages=1)
        spent.append(1e6 * (time.perf_counter() - start))
        assert len(gone.pages) == 1
    return spent


def main(args: Args) -> None:
    rows = [
        {
            "what": f"{name} {args.prompt:,} tokens",
            "pages": args.pages,
            "unit": "ms",
            "times": times,
        }
        for name, times in time_prompts(args)
    ]
    rows += [
        {
            "what": "evict one page",
            "pages": pages,
            "unit": "us",
            "times": time_evictions(pages, args),
        }
        for pages in args.pools
    ]
    table = Table(
        "what", "pool pages", "median", "p95", "unit", "calls", title="prefix cache, host time"
    )
    for row in rows:
        times = row.pop("times")
        row |= {"median": median(times), "p95": quantiles(times, n=20)[-1], "calls": len(times)}
        cells = [f"{row['pages']:,}", f"{row['median']:.3f}", f"{row['p95']:.3f}"]
        table.add_row(row["what"], *cells, row["unit"], str(row["calls"]))
    Console().print(table)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        machine = {"machine": platform.machine(), "python": platform.python_version()}
        lines = [json.dumps(row | machine) for row in rows]
        (args.out / "bench_cache.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args))
