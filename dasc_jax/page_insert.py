"""What a request gives to the prefix cache: complete pages, and states at page boundaries.

The trie prefers the more exact. A page that is there stays, and the request keeps its duplicate,
unless the present one has the greater lineage and no lock at or below it. A state that is there
stays unless its lineage is greater or its plan another, and no lock is on it. A partial last page
never enters.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32
from rpds import HashTrieSet

from dasc_jax.page_pool import push_all
from dasc_jax.page_trie import (
    CachedState,
    Lock,
    Node,
    PrefixCache,
    hold,
    page_keys,
    require_live,
    root_key,
    unhold,
)
from dasc_jax.recency import Recency
from dasc_jax.types import PAGE


class InsertResult(NamedTuple):
    """What became of a request's pages and slots.

    `adopted` were private and belong to the trie now. `duplicates` stay private, since the trie has
    another page for the same tokens: the request goes on using its own and releases them at its
    end. `freed_pages` are less exact pages which `adopted` ones replaced, `freed_slots` states that
    lost against one at the same depth (given now, or there before); both are on the free lists.
    `attached` are the (depth, slot) now in the trie. `lock` is the caller's, moved down to the
    deepest page of its own.
    """

    adopted: tuple[int, ...]
    duplicates: tuple[int, ...]
    freed_pages: tuple[int, ...]
    freed_slots: tuple[int, ...]
    attached: tuple[tuple[int, int], ...]
    lock: Lock | None


class _Path(NamedTuple):
    """The nodes of the inserted tokens, first page first; `before` are those already there."""

    keys: list[bytes]
    nodes: list[Node]
    before: list[Node]
    adopted: list[int]
    duplicates: list[int]
    replaced: list[int]

    @property
    def known(self) -> int:
        return len(self.before)

    def slots(self, places: set[int]) -> tuple[tuple[int, int], ...]:
        """(depth, slot) of the states at some places of the path, shallowest first."""
        found = [(place, self.nodes[place].state) for place in sorted(places)]
        return tuple((PAGE * (place + 1), state.slot) for place, state in found if state)


def insert(
    cache: PrefixCache,
    tokens: Int32[np.ndarray, " T"],
    pages: Sequence[int],
    states: Sequence[tuple[int, int, int]] = (),
    *,
    kv_lineage: int,
    plan_id: str,
    namespace: str = "",
    lock: Lock | None = None,
    skipped: Sequence[int] = (),
) -> tuple[PrefixCache, InsertResult]:
    """Gives the complete pages of a request, and its checkpoints, to the trie.

    `tokens`: all of the request whose KV is written, from the first on; `pages`: their page ids,
    matched ones included; `kv_lineage`: the lossy loads behind the private ones. `states`: (depth,
    pending slot, lineage), stored under `plan_id`; each slot is used up, attached or freed.
    `skipped`: depths where no slot could be had. `lock` moves down to the deepest own page. Legal
    when the steps that write these pages and slots are dispatched, as often as one likes.

    Raises:
        ValueError: pages neither in place nor private, slots not pending, depths off the grid or
            past the complete pages, a negative lineage, a lock not live or not on this path.
    """
    keys = list(page_keys(tokens, namespace))
    _require_legal(cache, keys, pages, states, kv_lineage, lock, skipped)
    path = _adopt(cache, keys, pages, kv_lineage, root_key(namespace), held=lock is not None)
    attached, freed = _attach(path, states, skipped, plan_id)
    cache = _write(cache, path, attached, freed, [slot for _, slot, _ in states])
    cache, lock = _settle(cache, path, pages, lock)
    return cache, InsertResult(
        adopted=tuple(path.adopted),
        duplicates=tuple(path.duplicates),
        freed_pages=tuple(path.replaced),
        freed_slots=tuple(freed),
        attached=path.slots(attached),
        lock=lock,
    )


def _require_legal(
    cache: PrefixCache,
    keys: list[bytes],
    pages: Sequence[int],
    states: Sequence[tuple[int, int, int]],
    kv_lineage: int,
    lock: Lock | None,
    skipped: Sequence[int],
) -> None:
    if len(pages) < len(keys):
        raise ValueError(f"{len(keys)} complete pages of tokens, but only {len(pages)} page ids")
    present = [cache.nodes.get(key) for key in keys]
    own = [
        page for page, node in zip(pages, present, strict=False) if not node or node.page != page
    ]
    foreign = [page for page in own if page not in cache.private_pages]
    if foreign or len(set(own)) < len(own):
        raise ValueError(f"pages {foreign or own} are neither in place nor private, or named twice")
    slots = [slot for _, slot, _ in states]
    if len(set(slots)) < len(slots) or any(slot not in cache.pending_slots for slot in slots):
        raise ValueError(f"slots {slots} must be pending and distinct")
    depths = [*(depth for depth, _, _ in states), *skipped]
    off = [d for d in depths if d % PAGE or not 0 < d <= PAGE * len(keys)]
    if off:
        raise ValueError(
            f"depths {off} must be multiples of {PAGE} in [{PAGE}, {PAGE * len(keys)}]"
        )
    if min([kv_lineage, *(lineage for _, _, lineage in states)]) < 0:
        raise ValueError(f"lineage counts loads: {kv_lineage} for KV, states {list(states)}")
    if lock is not None:
        require_live(cache, lock)
        if lock.key is not None and lock.key not in keys:
            raise ValueError(f"lock {lock.id} is not on the path of these tokens")


def _adopt(
    cache: PrefixCache,
    keys: list[bytes],
    pages: Sequence[int],
    kv_lineage: int,
    parent: bytes,
    *,
    held: bool,
) -> _Path:
    """The nodes of the path below `parent`, with the request's pages wherever they may go."""
    before: list[Node] = []
    path = _Path(keys, [], before, [], [], [])
    for key, page in zip(keys, pages, strict=False):
        node = cache.nodes.get(key)
        if node is None:
            break
        before.append(node)
        parent = key
        if node.page != page and kv_lineage < node.kv_lineage and not node.holds:
            path.adopted.append(page)
            path.replaced.append(node.page)
            node = node._replace(page=page, kv_lineage=kv_lineage)
        elif node.page != page:
            path.duplicates.append(page)
        path.nodes.append(node)
    known, total = len(before), len(keys)
    if known and known < total:
        path.nodes[-1] = path.nodes[-1]._replace(children=path.nodes[-1].children + 1)
    for at in range(known, total):
        path.nodes.append(
            Node(parent, pages[at], kv_lineage, int(at + 1 < total), int(held), None, "")
        )
        parent = keys[at]
    path.adopted.extend(pages[known:total])
    return path


def _attach(
    path: _Path, states: Sequence[tuple[int, int, int]], skipped: Sequence[int], plan_id: str
) -> tuple[set[int], list[int]]:
    """Puts states on the path. Returns the places of new or confirmed ones, and the lost slots."""
    touched, freed = set(), []
    for depth, slot, lineage in states:
        at = depth // PAGE - 1
        node = path.nodes[at]
        there = node.state
        better = there is None or there.plan_id != plan_id or lineage < there.lineage
        touched.add(at)
        if not better or (there and there.locks):
            freed.append(slot)
            continue
        if there:
            freed.append(there.slot)
        path.nodes[at] = node._replace(state=CachedState(slot, lineage, plan_id, 0), missing="")
    for depth in skipped:
        node = path.nodes[depth // PAGE - 1]
        if node.state is None:
            path.nodes[depth // PAGE - 1] = node._replace(missing="locked")
    return touched, freed


def _write(
    cache: PrefixCache, path: _Path, touched: set[int], freed: list[int], given: list[int]
) -> PrefixCache:
    """The cache with the path in it and every pool booked."""
    fresh = len(path.nodes) - path.known
    edits = {
        key: node
        for at, (key, node) in enumerate(zip(path.keys, path.nodes, strict=True))
        if at >= path.known or node is not path.before[at]
    }
    frontier, superseded = _rank_states(cache, path, touched)
    return replace(
        cache,
        nodes=cache.nodes.update(edits) if edits else cache.nodes,
        held=cache.held + (fresh if fresh and path.nodes[-1].holds else 0),
        states=cache.states + len(given) - len(freed),
        free_pages=push_all(cache.free_pages, path.replaced),
        private_pages=cache.private_pages.difference(HashTrieSet(path.adopted)),
        free_slots=push_all(cache.free_slots, freed),
        pending_slots=cache.pending_slots.difference(HashTrieSet(given)),
        frontier=frontier,
        superseded=superseded,
    )


def _rank_states(cache: PrefixCache, path: _Path, touched: set[int]) -> tuple[Recency, Recency]:
    """Which states are superseded now: those with a touched one next below and no branch
    between."""
    frontier, superseded = cache.frontier, cache.superseded
    forks = path.known - 1 if path.known < len(path.nodes) else -1
    if not touched and forks < 0:
        return frontier, superseded
    above = b""
    for at, (key, node) in enumerate(zip(path.keys, path.nodes, strict=True)):
        if node.state is not None:
            if at in touched and not node.state.locks:
                frontier, superseded = frontier.append(key), superseded.discard(key)
            if at in touched and above in frontier:
                frontier, superseded = frontier.discard(above), superseded.append(above)
            above = key
        if node.children > 1:
            if at == forks and above in superseded:
                frontier, superseded = frontier.append(above), superseded.discard(above)
            above = b""
    return frontier, superseded


def _settle(
    cache: PrefixCache, path: _Path, pages: Sequence[int], lock: Lock | None
) -> tuple[PrefixCache, Lock | None]:
    """Recency of the path, and the lock moved to the deepest page that the request itself uses."""
    if not path.keys:
        return cache, lock
    nodes, held, recency = cache.nodes, cache.held, cache.recency
    fresh, last = len(path.nodes) - path.known, path.keys[-1]
    if lock is not None:
        own = [
            key
            for key, node, page in zip(path.keys, path.nodes, pages, strict=False)
            if node.page == page
        ]
        if own and own[-1] != lock.key:
            if fresh == 0:
                nodes, newly = hold(nodes, own[-1])
            else:
                nodes, newly = hold(nodes, path.keys[path.known - 1]) if path.known else (nodes, 0)
            held += newly
            if lock.key is not None:
                nodes, let_go = unhold(nodes, lock.key)
                held -= let_go
            recency = recency.discard(own[-1])
            lock = lock._replace(key=own[-1])
    if not nodes[last].holds:
        recency = recency.append(last)
    locks = cache.locks.insert(lock.id, lock) if lock is not None else cache.locks
    return replace(cache, nodes=nodes, held=held, recency=recency, locks=locks), lock
