"""The value of the prefix cache: a trie of 64-token pages, and what must always hold for it.

A node is one complete page of tokens after one particular prefix. Its key chains the hash of all
that came before, `blake2b(parent key, int32 token bytes)`, with the namespace in the key of the
(virtual) root, so one map from key to node is the whole trie. Nothing here is ever changed in
place.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int32
from rpds import HashTrieMap, HashTrieSet, List

from dasc_jax.recency import Recency
from dasc_jax.types import PAGE

_KEY_BYTES = 16


class CachedState(NamedTuple):
    """A recurrent state at the end of a page. `locks` counts the requests yet to read `slot`."""

    slot: int
    lineage: int
    plan_id: str
    locks: int


class Node(NamedTuple):
    """One page of attention KV, and perhaps the recurrent state at its last token.

    `holds` counts the locks that end here plus the children with `holds` > 0, so that a node with 0
    has no lock at or below it. `missing` says why there is no state where one had been made or was
    due.
    """

    parent: bytes
    page: int
    kv_lineage: int
    children: int
    holds: int
    state: CachedState | None
    missing: Literal["", "state_evicted", "locked"]


class Lock(NamedTuple):
    """What a request keeps from being evicted: the path down to `key`, and the state at
    `state_key`."""

    id: int
    key: bytes | None
    state_key: bytes | None


class Counts(NamedTuple):
    """Pages and slots by what may be done with them; each row sums to the pool less its sink.

    `private` pages and `pending` slots belong to running requests and are not in the trie.
    """

    free_pages: int
    evictable_pages: int
    locked_pages: int
    private_pages: int
    free_slots: int
    evictable_slots: int
    locked_slots: int
    pending_slots: int
    locks: int

    @property
    def idle(self) -> bool:
        """No request holds a lock, a private page or a pending slot."""
        return not (self.locks or self.private_pages or self.pending_slots)


@dataclass(frozen=True, slots=True)
class PrefixCache:
    """All host state of the prefix cache. Compare two with `==`: equal events give equal values.

    `recency` orders the pages: every leaf is in it unless a lock ends there, beside inner nodes
    where a use ended, which eviction skips. `frontier` and `superseded` hold exactly the unlocked
    states; a state is superseded when, since its last use, a deeper one was attached below it with
    no branch in between, so that only a request that departs between the two could still want it.
    """

    pages: int
    slots: int
    nodes: HashTrieMap
    held: int
    states: int
    free_pages: List
    private_pages: HashTrieSet
    free_slots: List
    pending_slots: HashTrieSet
    recency: Recency
    frontier: Recency
    superseded: Recency
    locks: HashTrieMap
    next_lock: int

    @property
    def counts(self) -> Counts:
        """Pool accounting in O(1), fit for every scheduler step."""
        evictable_slots = len(self.frontier) + len(self.superseded)
        return Counts(
            free_pages=len(self.free_pages),
            evictable_pages=len(self.nodes) - self.held,
            locked_pages=self.held,
            private_pages=len(self.private_pages),
            free_slots=len(self.free_slots),
            evictable_slots=evictable_slots,
            locked_slots=self.states - evictable_slots,
            pending_slots=len(self.pending_slots),
            locks=len(self.locks),
        )


def empty(pages: int, slots: int) -> PrefixCache:
    """A cache over pages 1..pages-1 and checkpoint slots 1..slots-1; 0 is the sink of both.

    Raises:
        ValueError: fewer than two pages (nothing could run) or no slot at all (not even the sink).
    """
    if pages < 2 or slots < 1:
        raise ValueError(f"need >= 2 pages and >= 1 slot with their sinks; got {pages} and {slots}")
    return PrefixCache(
        pages=pages,
        slots=slots,
        nodes=HashTrieMap(),
        held=0,
        states=0,
        free_pages=List(range(1, pages)),
        private_pages=HashTrieSet(),
        free_slots=List(range(1, slots)),
        pending_slots=HashTrieSet(),
        recency=Recency(),
        frontier=Recency(),
        superseded=Recency(),
        locks=HashTrieMap(),
        next_lock=1,
    )


def root_key(namespace: str) -> bytes:
    """The key above all first pages of a namespace; `person` keeps it apart from every page key."""
    return blake2b(namespace.encode(), digest_size=_KEY_BYTES, person=b"namespace").digest()


def page_keys(tokens: Int32[np.ndarray, " T"], namespace: str = "") -> Iterator[bytes]:
    """The node key at every 64-token boundary: item i stands for the first 64 * (i + 1) tokens."""
    view = memoryview(np.ascontiguousarray(tokens, dtype=np.int32)).cast("B")
    key, size = root_key(namespace), 4 * PAGE
    for start in range(0, view.nbytes - size + 1, size):
        chained = blake2b(key, digest_size=_KEY_BYTES)
        chained.update(view[start : start + size])
        key = chained.digest()
        yield key


def hold(nodes: HashTrieMap, key: bytes) -> tuple[HashTrieMap, int]:
    """Adds one hold to a node. Returns the nodes and how many of them were not held before."""
    edits, node = {}, nodes[key]
    while node is not None:
        edits[key] = node._replace(holds=node.holds + 1)
        if node.holds:
            return nodes.update(edits), len(edits) - 1
        key = node.parent
        node = nodes.get(key)
    return nodes.update(edits), len(edits)


def unhold(nodes: HashTrieMap, key: bytes) -> tuple[HashTrieMap, int]:
    """Takes one hold from a node. Returns the nodes and how many of them are held no longer."""
    edits, node = {}, nodes[key]
    while node is not None:
        edits[key] = node._replace(holds=node.holds - 1)
        if node.holds > 1:
            return nodes.update(edits), len(edits) - 1
        key = node.parent
        node = nodes.get(key)
    return nodes.update(edits), len(edits)


def require_live(cache: PrefixCache, lock: Lock) -> None:
    """Raises ValueError unless `lock` is the current value of a lock that was not released."""
    if cache.locks.get(lock.id) != lock:
        raise ValueError(f"lock {lock.id} is not live: released, or replaced by a later value")


def check(cache: PrefixCache) -> None:
    """Recomputes every invariant from the nodes, in O(pool). For tests and idle moments.

    Raises:
        AssertionError: naming each invariant that does not hold.
    """
    nodes = dict(cache.nodes.items())
    broken = [name for name, fine in _pool_invariants(cache, nodes) if not fine]
    broken += [name for name, fine in _trie_invariants(cache, nodes) if not fine]
    if broken:
        raise AssertionError(f"prefix cache: {'; '.join(broken)} ({cache.counts})")


def _pool_invariants(cache: PrefixCache, nodes: dict[bytes, Node]) -> list[tuple[str, bool]]:
    pages = [*cache.free_pages, *cache.private_pages, *(node.page for node in nodes.values())]
    states = [node.state for node in nodes.values() if node.state]
    slots = [*cache.free_slots, *cache.pending_slots, *(state.slot for state in states)]
    counts = cache.counts
    return [
        ("every page is in exactly one place", sorted(pages) == list(range(1, cache.pages))),
        ("every slot is in exactly one place", sorted(slots) == list(range(1, cache.slots))),
        ("page counts sum to the pool", sum(counts[:4]) == cache.pages - 1),
        ("slot counts sum to the pool", sum(counts[4:8]) == cache.slots - 1),
        ("states are counted", cache.states == len(states)),
    ]


def _trie_invariants(cache: PrefixCache, nodes: dict[bytes, Node]) -> list[tuple[str, bool]]:
    children = Counter(node.parent for node in nodes.values())
    holds = Counter(node.parent for node in nodes.values() if node.holds)
    holds.update(lock.key for lock in cache.locks.values())
    readers = Counter(lock.state_key for lock in cache.locks.values())
    unlocked = {key for key, node in nodes.items() if node.state and not node.state.locks}
    leaves = {key for key, node in nodes.items() if not node.children and not node.holds}
    recency, frontier, superseded = (
        order.keys() for order in (cache.recency, cache.frontier, cache.superseded)
    )
    return [
        ("child counts", all(node.children == children[key] for key, node in nodes.items())),
        ("hold counts", all(node.holds == holds[key] for key, node in nodes.items())),
        ("held pages are counted", cache.held == sum(node.holds > 0 for node in nodes.values())),
        (
            "state lock counts",
            all(node.state.locks == readers[key] for key, node in nodes.items() if node.state),
        ),
        (
            "locks name nodes and states that exist",
            all(
                (lock.key is None or lock.key in nodes)
                and (lock.state_key is None or nodes[lock.state_key].state is not None)
                for lock in cache.locks.values()
            ),
        ),
        (
            "a locked state is held",
            all(n.holds for n in nodes.values() if n.state and n.state.locks),
        ),
        ("a node with a state misses none", not any(n.state and n.missing for n in nodes.values())),
        ("evictable leaves are ordered", leaves <= set(recency) <= set(nodes)),
        ("unlocked states are ordered once", Counter(frontier + superseded) == Counter(unlocked)),
        ("orders are whole", len(recency) == len(cache.recency) == len(set(recency))),
        (
            "recent pages are not locked",
            not any(lock.key in recency for lock in cache.locks.values()),
        ),
    ]
