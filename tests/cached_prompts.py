"""Prompts for the tests of the prefix cache, and a request that has come and gone."""

import numpy as np

from dasc_jax import prefix_cache as pc
from dasc_jax.types import PAGE


def words(*pages: int, tail: int = 0) -> np.ndarray:
    """Tokens of whole pages, each filled with one number, and `tail` more tokens."""
    return np.repeat(np.array([*pages, 99], np.int32), [PAGE] * len(pages) + [tail])


def put(cache, tokens, depths=(), *, kv_lineage=0, lineage=0, plan_id="plan", namespace=""):
    """A request that computed all of `tokens` itself, checkpointed at `depths` and has ended."""
    cache, pages, _ = pc.allocate_pages(cache, -(-len(tokens) // PAGE))
    states = []
    for depth in depths:
        cache, slot = pc.allocate_slot(cache)
        states.append((depth, slot, lineage))
    cache, result = pc.insert(
        cache,
        tokens,
        pages,
        states,
        kv_lineage=kv_lineage,
        plan_id=plan_id,
        namespace=namespace,
    )
    cache = pc.release_pages(cache, [page for page in pages if page not in result.adopted])
    pc.check(cache)
    return cache, result


def look(cache, tokens, **how):
    return pc.match(cache, tokens, **({"plan_id": "plan"} | how))[1]
