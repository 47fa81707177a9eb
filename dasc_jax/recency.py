"""An immutable sequence of distinct keys, least recently used first, with constant-time edits."""

from dataclasses import dataclass

from rpds import HashTrieMap

_NONE = b""


@dataclass(frozen=True, slots=True)
class Recency:
    """Keys from `first` (used longest ago) to `last`; every method returns a new value.

    A doubly linked list kept in a persistent map, `links[key] = (previous, next)` with `b""` for no
    key, so that appending, removing and asking for the oldest key cost O(1) whatever was done
    before: there are no stale entries to skip. `b""` itself cannot be a key.
    """

    links: HashTrieMap = HashTrieMap()
    first: bytes = _NONE
    last: bytes = _NONE

    def __len__(self) -> int:
        return len(self.links)

    def __contains__(self, key: bytes) -> bool:
        return key in self.links

    def append(self, key: bytes) -> "Recency":
        """`key` becomes the most recent one, wherever it was before."""
        order = self.discard(key)
        links = order.links.insert(key, (order.last, _NONE))
        if not order.last:
            return Recency(links, key, key)
        return Recency(links.insert(order.last, (links[order.last][0], key)), order.first, key)

    def prepend(self, key: bytes) -> "Recency":
        """`key` becomes the least recent one, wherever it was before."""
        order = self.discard(key)
        links = order.links.insert(key, (_NONE, order.first))
        if not order.first:
            return Recency(links, key, key)
        return Recency(links.insert(order.first, (key, links[order.first][1])), key, order.last)

    def discard(self, key: bytes) -> "Recency":
        """Without `key`; the same value where it is absent."""
        link = self.links.get(key)
        if link is None:
            return self
        before, after = link
        links = self.links.remove(key)
        if before:
            links = links.insert(before, (links[before][0], after))
        if after:
            links = links.insert(after, (before, links[after][1]))
        return Recency(links, self.first if before else after, self.last if after else before)

    def keys(self) -> list[bytes]:
        """All keys, least recent first."""
        found, key = [], self.first
        while key:
            found.append(key)
            key = self.links[key][1]
        return found
