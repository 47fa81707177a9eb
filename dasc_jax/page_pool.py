"""Pages and slots that leave the prefix cache and come back: allocation, eviction, flush."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from rpds import HashTrieSet, List

from dasc_jax.page_trie import PrefixCache, empty


class Evicted(NamedTuple):
    """Pages and slots that left the trie, in the order in which they went."""

    pages: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()


class PageAllocation(NamedTuple):
    """`pages` is None, and `cache` the one given, when the pool cannot serve the request."""

    cache: PrefixCache
    pages: tuple[int, ...] | None
    evicted: Evicted


def allocate_pages(cache: PrefixCache, count: int) -> PageAllocation:
    """Makes `count` pages private to the caller, evicting unlocked leaves as needed.

    The least recently used leaf goes first. Legal at any time. Refusal is O(1), so a waiting
    request may ask at every step.
    """
    if count < 0:
        raise ValueError(f"cannot allocate {count} pages")
    short = count - len(cache.free_pages)
    if short > len(cache.nodes) - cache.held:
        return PageAllocation(cache, None, Evicted())
    cache, evicted = _evict_pages(cache, short)
    free, pages = cache.free_pages, list(islice(cache.free_pages, count))
    for _ in pages:
        free = free.drop_first()
    private = cache.private_pages.update(pages)
    return PageAllocation(
        replace(cache, free_pages=free, private_pages=private), tuple(pages), evicted
    )


def allocate_slot(cache: PrefixCache) -> tuple[PrefixCache, int | None]:
    """Makes one checkpoint slot pending, evicting the least useful unlocked state if none is free.

    Superseded states go first, then the others, each least recently used first. Legal at any time.
    None means that every slot is locked or pending: skip the checkpoint and count it, nothing is
    wrong.
    """
    if not cache.free_slots:
        cache, evicted = _evict_slots(cache, 1)
        if not evicted.slots:
            return cache, None
    slot = next(iter(cache.free_slots))
    pending = cache.pending_slots.insert(slot)
    return replace(cache, free_slots=cache.free_slots.drop_first(), pending_slots=pending), slot


def release_pages(cache: PrefixCache, pages: Sequence[int]) -> PrefixCache:
    """Gives private pages back. Legal once no dispatched step will write them.

    Raises:
        ValueError: a page that is not private (free, or in the trie already), or named twice.
    """
    returned = HashTrieSet(pages)
    if len(returned) != len(pages) or any(page not in cache.private_pages for page in pages):
        raise ValueError(
            f"pages {_not_in(pages, cache.private_pages)} are not private, or named twice"
        )
    private = cache.private_pages.difference(returned)
    return replace(cache, private_pages=private, free_pages=push_all(cache.free_pages, pages))


def release_slot(cache: PrefixCache, slot: int) -> PrefixCache:
    """Gives a pending slot back unused.

    Raises:
        ValueError: the slot is not pending.
    """
    if slot not in cache.pending_slots:
        raise ValueError(f"slot {slot} is not pending")
    pending = cache.pending_slots.remove(slot)
    return replace(cache, pending_slots=pending, free_slots=cache.free_slots.push_front(slot))


def evict(cache: PrefixCache, *, pages: int = 0, slots: int = 0) -> tuple[PrefixCache, Evicted]:
    """Moves up to so many pages, then up to so many slots, from the trie to the free lists.

    Legal at any time. Only what no lock holds goes; fewer than asked is no error. A state goes with
    its page.
    """
    cache, gone = _evict_pages(cache, min(pages, len(cache.nodes) - cache.held))
    cache, states = _evict_slots(cache, slots)
    return cache, Evicted(gone.pages, gone.slots + states.slots)


def flush(cache: PrefixCache) -> PrefixCache:
    """An empty cache over the same pools.

    Legal only when idle: no lock, no private page and no pending slot (`cache.counts.idle`).

    Raises:
        ValueError: something is in use, with the counts.
    """
    if not cache.counts.idle:
        raise ValueError(f"cannot flush a prefix cache in use: {cache.counts}")
    return empty(cache.pages, cache.slots)


def _evict_pages(cache: PrefixCache, count: int) -> tuple[PrefixCache, Evicted]:
    """Exactly `count` pages. A parent left childless is as recent as the child that went last."""
    if count <= 0:
        return cache, Evicted()
    nodes, recency = cache.nodes, cache.recency
    frontier, superseded = cache.frontier, cache.superseded
    pages, slots = [], []
    while len(pages) < count:
        key = recency.first
        node = nodes[key]
        recency = recency.discard(key)
        climbing = not node.children
        while climbing:
            nodes = nodes.remove(key)
            pages.append(node.page)
            if node.state:
                slots.append(node.state.slot)
                frontier, superseded = frontier.discard(key), superseded.discard(key)
            key, node = node.parent, nodes.get(node.parent)
            if node is None:
                break
            node = node._replace(children=node.children - 1)
            bare = not (node.children or node.holds or key in recency)
            climbing = bare and len(pages) < count
            if not climbing:
                nodes = nodes.insert(key, node)
                recency = recency.prepend(key) if bare else recency
    cache = replace(
        cache,
        nodes=nodes,
        recency=recency,
        frontier=frontier,
        superseded=superseded,
        states=cache.states - len(slots),
        free_pages=push_all(cache.free_pages, pages),
        free_slots=push_all(cache.free_slots, slots),
    )
    return cache, Evicted(tuple(pages), tuple(slots))


def _evict_slots(cache: PrefixCache, count: int) -> tuple[PrefixCache, Evicted]:
    """Up to `count` states; their nodes stay, with the KV, and remember the loss."""
    slots = []
    while len(slots) < count and (key := cache.superseded.first or cache.frontier.first):
        node = cache.nodes[key]
        slots.append(node.state.slot)
        cache = replace(
            cache,
            nodes=cache.nodes.insert(key, node._replace(state=None, missing="state_evicted")),
            frontier=cache.frontier.discard(key),
            superseded=cache.superseded.discard(key),
            states=cache.states - 1,
            free_slots=cache.free_slots.push_front(node.state.slot),
        )
    return cache, Evicted((), tuple(slots))


def push_all(free: List, values: Sequence[int]) -> List:
    """A free list with more on top of it."""
    for value in values:
        free = free.push_front(value)
    return free


def _not_in(values: Sequence[int], allowed: HashTrieSet) -> list[int]:
    return [value for value in values if value not in allowed]
