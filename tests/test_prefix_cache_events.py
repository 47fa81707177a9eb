"""Random lives of many requests: invariants after every event, and a naive cache beside ours."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dasc_jax import prefix_cache as pc
from dasc_jax.recency import Recency
from dasc_jax.types import PAGE

Path = tuple[int, ...]


class NaiveTrie:
    """Which page goes next, the slow way: every use marks its whole path, eviction scans all."""

    def __init__(self):
        self.page: dict[Path, int] = {}
        self.used: dict[Path, int] = {}
        self.locked: dict[int, Path] = {}
        self.clock = 0

    def use(self, path: Path) -> None:
        self.clock += 1
        for depth in range(1, len(path) + 1):
            if path[:depth] in self.page:
                self.used[path[:depth]] = self.clock

    def evict(self, count: int) -> tuple[int, ...]:
        gone = []
        while len(gone) < count:
            held = {path[:n] for path in self.locked.values() for n in range(len(path) + 1)}
            inner = {path[:-1] for path in self.page}
            free = [path for path in self.page if path not in held and path not in inner]
            if not free:
                break
            oldest = min(free, key=lambda path: self.used[path])
            gone.append(self.page.pop(oldest))
        return tuple(gone)


@dataclass
class Run:
    """A running request: `path` holds its page words, `pages` its page ids, shared ones first."""

    path: Path
    tail: int
    pages: tuple[int, ...]
    private: set[int]
    lock: pc.Lock
    lineage: int
    given: int

    @property
    def tokens(self) -> np.ndarray:
        return tokens_of(self.path, self.tail)


def tokens_of(path: Path, tail: int) -> np.ndarray:
    return np.repeat(np.array([*path, 9], np.int32), [PAGE] * len(path) + [tail])


class Game:
    """Plays events against the cache and the naive trie at once."""

    def __init__(self, pages: int, slots: int):
        self.cache, self.naive, self.runs = pc.empty(pages, slots), NaiveTrie(), []

    def play(self, event: tuple[str, int, int, int]) -> None:
        name, a, b, c = event
        if name == "start":
            self.start(a, b, c)
        elif name == "evict":
            self.cache, gone = pc.evict(self.cache, pages=a % 4, slots=b % 3)
            assert gone.pages == self.naive.evict(a % 4)
        elif name == "flush" and self.cache.counts.idle:
            self.cache, self.naive = pc.flush(self.cache), NaiveTrie()
        elif self.runs and name in ("load", "insert", "grow", "end"):
            getattr(self, name)(self.runs[a % len(self.runs)], b, c)
        pc.check(self.cache)
        self.require_own_pages()

    def start(self, a: int, b: int, c: int) -> None:
        path = tuple(1 + (a >> bit) % 2 for bit in range(b % 7))
        tokens = tokens_of(path, c % PAGE)
        limit, plan = (None, 0, 1)[c % 3], ("plan", "plan", "other", None)[a % 4]
        before = self.cache
        self.cache, found = pc.match(before, tokens, plan_id=plan, max_lineage=limit)
        self.require_best(before, found, path, c % PAGE, plan, limit)
        self.naive.use(path[: found.kv_depth // PAGE])
        self.cache, lock = pc.lock(self.cache, found)
        self.naive.locked[lock.id] = path[: found.depth // PAGE]
        need = len(path) + (c % PAGE > 0) - len(found.pages)
        self.cache, pages, evicted = pc.allocate_pages(self.cache, need)
        assert evicted.pages == self.naive.evict(len(evicted.pages))
        if pages is None:
            self.unlock(lock)
            return
        self.runs.append(
            Run(
                path,
                c % PAGE,
                found.pages + pages,
                set(pages),
                lock,
                found.lineage,
                len(found.pages),
            )
        )

    def load(self, run: Run, b: int, c: int) -> None:
        if run.lock.state_key is not None:
            self.cache, run.lock = pc.unlock_state(self.cache, run.lock)

    def grow(self, run: Run, b: int, c: int) -> None:
        path = run.path + ((1 + b % 2,) if run.tail or b % 3 else ())
        tail = run.tail if len(path) == len(run.path) else 0
        need = len(path) + (tail > 0) - len(run.pages)
        self.cache, pages, evicted = pc.allocate_pages(self.cache, need)
        assert evicted.pages == self.naive.evict(len(evicted.pages))
        if pages is not None:
            run.path, run.tail, run.pages = path, tail, run.pages + pages
            run.private |= set(pages)

    def insert(self, run: Run, b: int, c: int) -> None:
        count = run.given + b % (len(run.path) - run.given + 1)
        states, skipped = [], []
        for depth in range(1, count + 1):
            if (c >> depth) % 3 == 0:
                self.cache, slot = pc.allocate_slot(self.cache)
                if slot is None:
                    skipped.append(PAGE * depth)
                else:
                    states.append((PAGE * depth, slot, c % 3))
        self.cache, put = pc.insert(
            self.cache,
            run.tokens[: PAGE * count + b % 2],
            run.pages,
            states,
            kv_lineage=run.lineage + c % 2,
            plan_id="other" if c % 5 == 0 else "plan",
            lock=run.lock,
            skipped=skipped,
        )
        assert set(put.adopted) <= run.private
        assert set(put.duplicates) <= run.private - set(put.adopted)
        assert {depth for depth, _ in put.attached} == {depth for depth, _, _ in states}
        run.private -= set(put.adopted)
        run.lock, run.given = put.lock, count
        for depth in range(1, count + 1):
            path, page = run.path[:depth], run.pages[depth - 1]
            if page in put.adopted:
                self.naive.page[path] = page
        self.naive.use(run.path[:count])
        keys = [None, *pc.page_keys(run.tokens)]
        self.naive.locked[run.lock.id] = run.path[: keys.index(run.lock.key)]

    def end(self, run: Run, b: int, c: int) -> None:
        self.runs.remove(run)
        self.cache = pc.release_pages(self.cache, sorted(run.private))
        self.unlock(run.lock)

    def unlock(self, lock: pc.Lock) -> None:
        self.cache = pc.unlock(self.cache, lock)
        self.naive.use(self.naive.locked.pop(lock.id))

    def require_own_pages(self) -> None:
        """No page of a running request is free or another's, whatever was evicted."""
        taken = [page for run in self.runs for page in run.private]
        assert len(taken) == len(set(taken)) == self.cache.counts.private_pages
        for run in self.runs:
            for key, page in zip(pc.page_keys(run.tokens), run.pages, strict=False):
                assert page in run.private or self.cache.nodes[key].page == page
            if run.lock.state_key is not None:
                assert self.cache.nodes[run.lock.state_key].state.locks

    @staticmethod
    def require_best(cache, found, path, tail, plan, limit) -> None:
        """The match is the deepest node that has all a hit needs, by looking at all of them."""
        keys = list(pc.page_keys(tokens_of(path, tail)))
        nodes = [cache.nodes[key] for key in keys if key in cache.nodes]
        best = 0
        for count in range(1, min(len(nodes), max(len(path) * PAGE + tail - 1, 0) // PAGE) + 1):
            state = nodes[count - 1].state
            if state is not None and state.plan_id == plan:
                lineage = max(state.lineage, *(node.kv_lineage for node in nodes[:count]), 0)
                best = count if limit is None or lineage <= limit else best
        assert (found.depth, found.kv_depth) == (PAGE * best, PAGE * len(nodes))
        assert found.pages == tuple(node.page for node in nodes[:best])
        assert (found.reason == "hit") == (best > 0)


NAMES = ["start", "start", "load", "insert", "insert", "grow", "end", "evict", "flush"]
EVENTS = st.tuples(st.sampled_from(NAMES), *[st.integers(0, 2**12 - 1)] * 3)


@settings(max_examples=200, deadline=None)
@given(st.lists(EVENTS, max_size=40), st.integers(2, 14), st.integers(1, 6))
def test_every_event_keeps_the_invariants_and_evicts_like_the_naive_trie(events, pages, slots):
    game = Game(pages, slots)
    for event in events:
        game.play(event)
    for run in list(game.runs):
        game.end(run, 0, 0)
    assert game.cache.counts.idle
    pc.flush(game.cache)


def long_game(seed: int, steps: int = 1500) -> pc.PrefixCache:
    random, game = np.random.default_rng(seed), Game(30, 7)
    for _ in range(steps):
        game.play((NAMES[random.integers(len(NAMES))], *map(int, random.integers(0, 2**12, 3))))
    return game.cache


@pytest.mark.parametrize("seed", range(4))
def test_thousands_of_events_keep_the_invariants(seed):
    long_game(seed)


def test_the_same_events_give_the_same_value_and_others_another():
    assert long_game(11, 400) == long_game(11, 400)
    assert long_game(11, 400) != long_game(12, 400)


def test_no_event_changes_a_value_that_was_there_before():
    game, seen = Game(20, 5), []
    random = np.random.default_rng(5)
    for _ in range(200):
        seen.append((game.cache, dict(game.cache.nodes.items()), game.cache.counts))
        game.play((NAMES[random.integers(len(NAMES))], *map(int, random.integers(0, 2**12, 3))))
    for cache, nodes, counts in seen:
        assert dict(cache.nodes.items()) == nodes and cache.counts == counts
        pc.check(cache)


MOVES = st.tuples(st.sampled_from(["append", "prepend", "discard"]), st.integers(0, 5))


@given(st.lists(MOVES))
def test_recency_is_an_ordered_set(moves):
    ours, plain = Recency(), []
    for name, number in moves:
        key = bytes([1 + number])
        ours = getattr(ours, name)(key)
        plain = [other for other in plain if other != key]
        if name != "discard":
            plain = [*plain, key] if name == "append" else [key, *plain]
        assert ours.keys() == plain and len(ours) == len(plain)
        assert (key in ours) == (name != "discard")
        assert (ours.first, ours.last) == ((plain[0], plain[-1]) if plain else (b"", b""))
