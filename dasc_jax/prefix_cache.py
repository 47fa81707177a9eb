"""The prefix cache of a hybrid model: a pure function of its events.

A hit is valid only at a depth where the attention KV of every page and a recurrent state both exist
and both describe exactly that many tokens. Every function takes a `PrefixCache` and returns a new
one; the device work that follows from it is in the result. The life of a request:

    cache, found = match(cache, prompt, plan_id=plan.id, max_lineage=4)
    cache, held = lock(cache, found)            # path and state stay
    cache, pages, _ = allocate_pages(cache, n)  # None: unlock(cache, held), match again later
    cache, slot = allocate_slot(cache)          # for each checkpoint; None: skip it, and count
    ...                                         # dispatch the prefill, which loads found.slot
    cache, held = unlock_state(cache, held)     # on a hit
    cache, put = insert(cache, prompt, found.pages + pages, [(depth, slot, 0)], lock=held, ...)
    ...                                         # decode; insert again at the end
    cache = release_pages(cache, private)       # all that was allocated and not put.adopted
    cache = unlock(cache, put.lock)
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int32
from rpds import HashTrieMap

from dasc_jax.page_insert import InsertResult, insert
from dasc_jax.page_pool import (
    Evicted,
    PageAllocation,
    allocate_pages,
    allocate_slot,
    evict,
    flush,
    release_pages,
    release_slot,
)
from dasc_jax.page_trie import (
    Counts,
    Lock,
    Node,
    PrefixCache,
    check,
    empty,
    hold,
    page_keys,
    require_live,
    unhold,
)
from dasc_jax.types import PAGE

__all__ = [
    "Counts",
    "Evicted",
    "InsertResult",
    "Lock",
    "Match",
    "PageAllocation",
    "PrefixCache",
    "Reason",
    "allocate_pages",
    "allocate_slot",
    "check",
    "empty",
    "evict",
    "flush",
    "insert",
    "lock",
    "match",
    "page_keys",
    "release_pages",
    "release_slot",
    "unlock",
    "unlock_state",
]

Reason = Literal[
    "hit",
    "no_kv",
    "no_state_at_boundary",
    "state_evicted",
    "below_page",
    "lineage",
    "plan_mismatch",
    "locked",
]
"""Why a lookup resumed where it did. `hit`: from a state, perhaps shallower than the KV. Otherwise
from 0: `below_page`: the prompt has no 64-token boundary before its last token; `no_kv`: its first
page is unknown; the rest is told by the deepest matched node that has anything to tell:
`plan_mismatch` or `lineage`: its state may not serve this request; `state_evicted`: it had one;
`locked`: one was due, but every slot was locked or pending at the time; `no_state_at_boundary`: no
node of the path ever had a state."""


class Match(NamedTuple):
    """What of a prompt need not be computed again. Depths count tokens and are multiples of 64.

    `depth` is where to resume: the request uses `pages` (page ids for tokens 0..depth), `slot` (0,
    the sink, on a miss) and `key`, the hash of everything up to `depth` (None on a miss). `lineage`
    is the greatest number of lossy loads behind the state and behind any of the pages. `kv_depth`
    >= depth is how far KV is known. A checkpoint at `branch_depth`, where it is not 0, would let
    the next such prompt resume there.
    """

    reason: Reason
    depth: int
    kv_depth: int
    branch_depth: int
    slot: int
    lineage: int
    pages: tuple[int, ...]
    key: bytes | None


def match(
    cache: PrefixCache,
    tokens: Int32[np.ndarray, " T"],
    *,
    plan_id: str | None,
    max_lineage: int | None = None,
    namespace: str = "",
) -> tuple[PrefixCache, Match]:
    """The deepest admissible checkpoint on the path of a prompt.

    At least one token is left to compute. `plan_id` names the plan under which a state must have
    been stored; None admits no stored state, for a dense request where the pool keeps lossy ones.
    `max_lineage` bounds the lossy loads behind what is used (None: no bound). Allocates nothing and
    locks nothing, so a match that is not followed up costs nothing; it makes most recent the KV
    path and of the states only the one consumed. Legal at any time.
    """
    boundary = max(len(tokens) - 1, 0) // PAGE * PAGE
    path = list(_known(cache, tokens, namespace))
    reason, count, lineage = _deepest_state(path[: boundary // PAGE], plan_id, max_lineage)
    if not boundary:
        reason = "below_page"
    elif not path:
        reason = "no_kv"
    key, node = path[count - 1] if count else (None, None)
    branch = min(PAGE * len(path), boundary)
    found = Match(
        reason=reason,
        depth=PAGE * count,
        kv_depth=PAGE * len(path),
        branch_depth=branch if branch > PAGE * count else 0,
        slot=node.state.slot if node and node.state else 0,
        lineage=lineage,
        pages=tuple(node.page for _, node in path[:count]),
        key=key,
    )
    return _used(cache, path[-1][0] if path else None, key), found


def lock(cache: PrefixCache, found: Match) -> tuple[PrefixCache, Lock]:
    """Keeps the path and the state of a match from eviction; O(pages).

    Every running request holds one lock, a miss included: it keeps nothing until `insert` moves it.
    Legal as long as nothing that the match names has been evicted or replaced since.

    Raises:
        ValueError: the match is stale; match again.
    """
    nodes, held, frontier, superseded = cache.nodes, 0, cache.frontier, cache.superseded
    if found.key is not None:
        if not _current(cache, found):
            raise ValueError(f"stale match: the path to depth {found.depth} has changed since")
        nodes, held = hold(_count_reader(nodes, found.key, 1), found.key)
        frontier, superseded = frontier.discard(found.key), superseded.discard(found.key)
    taken = Lock(cache.next_lock, found.key, found.key)
    cache = replace(
        cache,
        nodes=nodes,
        held=cache.held + held,
        recency=cache.recency.discard(found.key) if found.key else cache.recency,
        frontier=frontier,
        superseded=superseded,
        locks=cache.locks.insert(taken.id, taken),
        next_lock=cache.next_lock + 1,
    )
    return cache, taken


def unlock_state(cache: PrefixCache, held: Lock) -> tuple[PrefixCache, Lock]:
    """Lets the state go and keeps the path.

    Legal once, after the step that loads the state is dispatched.

    Raises:
        ValueError: not the current value of a live lock, or one that holds no state.
    """
    require_live(cache, held)
    key = held.state_key
    if key is None:
        raise ValueError(f"lock {held.id} holds no state")
    nodes = _count_reader(cache.nodes, key, -1)
    free = not nodes[key].state.locks
    left = held._replace(state_key=None)
    cache = replace(
        cache,
        nodes=nodes,
        frontier=cache.frontier.append(key) if free else cache.frontier,
        locks=cache.locks.insert(held.id, left),
    )
    return cache, left


def unlock(cache: PrefixCache, held: Lock) -> PrefixCache:
    """Lets go of everything a lock keeps; its path becomes the most recent one. Legal once a lock.

    Raises:
        ValueError: not the current value of a live lock.
    """
    require_live(cache, held)
    if held.state_key is not None:
        cache, held = unlock_state(cache, held)
    nodes, let_go, recency = cache.nodes, 0, cache.recency
    if held.key is not None:
        nodes, let_go = unhold(nodes, held.key)
        recency = recency if nodes[held.key].holds else recency.append(held.key)
    return replace(
        cache,
        nodes=nodes,
        held=cache.held - let_go,
        recency=recency,
        locks=cache.locks.remove(held.id),
    )


def _known(
    cache: PrefixCache, tokens: Int32[np.ndarray, " T"], namespace: str
) -> Iterator[tuple[bytes, Node]]:
    """The nodes of the complete pages of a prompt, as far as they are in the trie."""
    for key in page_keys(tokens, namespace):
        node = cache.nodes.get(key)
        if node is None:
            return
        yield key, node


def _deepest_state(
    path: list[tuple[bytes, Node]], plan_id: str | None, max_lineage: int | None
) -> tuple[Reason, int, int]:
    """The reason, the pages above the deepest admissible state (0: none), and its lineage."""
    reason: Reason = "no_state_at_boundary"
    count = lineage = kv_lineage = 0
    for at, (_, node) in enumerate(path, 1):
        kv_lineage = max(kv_lineage, node.kv_lineage)
        state = node.state
        if state is None:
            reason = node.missing or reason
        elif state.plan_id != plan_id:
            reason = "plan_mismatch"
        elif max_lineage is not None and max(kv_lineage, state.lineage) > max_lineage:
            reason = "lineage"
        else:
            count, lineage = at, max(kv_lineage, state.lineage)
    return "hit" if count else reason, count, lineage


def _used(cache: PrefixCache, deepest: bytes | None, consumed: bytes | None) -> PrefixCache:
    """Recency after a match. Pages above `deepest` inherit its place as their children go."""
    if deepest is None:
        return cache
    recency, frontier, superseded = cache.recency, cache.frontier, cache.superseded
    if not cache.nodes[deepest].holds:
        recency = recency.append(deepest)
    if consumed is not None and (consumed in frontier or consumed in superseded):
        frontier, superseded = frontier.append(consumed), superseded.discard(consumed)
    return replace(cache, recency=recency, frontier=frontier, superseded=superseded)


def _current(cache: PrefixCache, found: Match) -> bool:
    """Whether every page and the state of a match are still where it found them."""
    node = cache.nodes.get(found.key)
    if node is None or node.state is None or node.state.slot != found.slot:
        return False
    for page in reversed(found.pages):
        if node is None or node.page != page:
            return False
        node = cache.nodes.get(node.parent)
    return True


def _count_reader(nodes: HashTrieMap, key: bytes, change: int) -> HashTrieMap:
    node = nodes[key]
    return nodes.insert(
        key, node._replace(state=node.state._replace(locks=node.state.locks + change))
    )
