"""Illegal calls raise and change nothing; `check` finds what went astray."""

from dataclasses import replace

import pytest

from dasc_jax import prefix_cache as pc
from dasc_jax.recency import Recency
from tests.cached_prompts import look, put, words


@pytest.fixture
def cache():
    return pc.empty(40, 8)


def test_flush_forgets_everything_and_refuses_while_anything_is_in_use(cache):
    tokens = words(1, 2, tail=1)
    cache, _ = put(cache, tokens, [128])
    assert pc.flush(cache) == pc.empty(40, 8)
    busy = [
        pc.lock(*pc.match(cache, tokens, plan_id="plan"))[0],
        pc.allocate_pages(cache, 1).cache,
        pc.allocate_slot(cache)[0],
    ]
    for value in busy:
        with pytest.raises(ValueError, match="in use"):
            pc.flush(value)


def test_a_stale_match_cannot_be_locked(cache):
    tokens = words(1, 2, tail=1)
    cache, _ = put(cache, tokens, [128], kv_lineage=1)
    cache, found = pc.match(cache, tokens, plan_id="plan")
    changed = [
        pc.evict(cache, slots=1)[0],
        pc.evict(cache, pages=1)[0],
        put(cache, words(1))[0],
        put(cache, tokens, [128], plan_id="other")[0],
    ]
    for value in changed:
        with pytest.raises(ValueError, match="stale"):
            pc.lock(value, found)


def test_locks_are_released_once(cache):
    tokens = words(1, 2, tail=1)
    cache, _ = put(cache, tokens, [128])
    cache, held = pc.lock(*pc.match(cache, tokens, plan_id="plan"))
    cache, left = pc.unlock_state(cache, held)
    done = pc.unlock(cache, left)
    for illegal in (
        lambda: pc.unlock_state(cache, held),
        lambda: pc.unlock_state(cache, left),
        lambda: pc.unlock(cache, held),
        lambda: pc.unlock(done, left),
    ):
        with pytest.raises(ValueError, match="not live|holds no state"):
            illegal()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pages": [1]}, "only 1 page ids"),
        ({"pages": [1, 9]}, "neither in place nor private"),
        ({"pages": [1, 1]}, "named twice"),
        ({"states": [(64, 5, 0)]}, "pending"),
        ({"states": [(64, 1, 0), (128, 1, 0)]}, "distinct"),
        ({"states": [(32, 1, 0)]}, "multiples of 64"),
        ({"states": [(192, 1, 0)]}, "multiples of 64"),
        ({"skipped": [0]}, "multiples of 64"),
        ({"states": [(64, 1, -1)]}, "lineage"),
        ({"kv_lineage": -1}, "lineage"),
        ({"lock": pc.Lock(3, None, None)}, "not live"),
    ],
)
def test_an_illegal_insert_names_its_fault(cache, change, message):
    cache, pages, _ = pc.allocate_pages(cache, 2)
    cache, _ = pc.allocate_slot(cache)
    legal = {"pages": pages, "states": [(64, 1, 0)], "kv_lineage": 0, "plan_id": "plan"}
    pc.insert(cache, words(1, 2), **legal)
    with pytest.raises(ValueError, match=message):
        pc.insert(cache, words(1, 2), **(legal | change))


def test_a_lock_of_another_path_cannot_be_moved(cache):
    cache, _ = put(cache, words(1, tail=1), [64])
    cache, held = pc.lock(*pc.match(cache, words(1, tail=1), plan_id="plan"))
    cache, pages, _ = pc.allocate_pages(cache, 1)
    with pytest.raises(ValueError, match="not on the path"):
        pc.insert(cache, words(2), pages, kv_lineage=0, plan_id="plan", lock=held)


def test_only_private_pages_and_pending_slots_are_released(cache):
    cache, pages, _ = pc.allocate_pages(cache, 2)
    for wrong in ([0], [pages[0], 30], [pages[0], pages[0]]):
        with pytest.raises(ValueError, match="not private"):
            pc.release_pages(cache, wrong)
    with pytest.raises(ValueError, match="not pending"):
        pc.release_slot(cache, 1)


@pytest.mark.parametrize(("pages", "slots"), [(1, 4), (0, 4), (4, 0)])
def test_a_pool_without_room_is_refused(pages, slots):
    with pytest.raises(ValueError, match="sinks"):
        pc.empty(pages, slots)


def test_a_cache_without_slots_serves_and_never_checkpoints():
    cache, _ = put(pc.empty(4, 1), words(1, 2))
    assert pc.allocate_slot(cache) == (cache, None)
    assert look(cache, words(1, 2, tail=1)).reason == "no_state_at_boundary"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda cache: {"held": cache.held + 1},
        lambda cache: {"states": cache.states - 1},
        lambda cache: {"pages": cache.pages + 1},
        lambda cache: {"slots": cache.slots - 1},
        lambda cache: {"free_pages": cache.free_pages.push_front(0)},
        lambda cache: {"free_slots": cache.free_slots.push_front(1)},
        lambda cache: {"private_pages": cache.private_pages.insert(30)},
        lambda cache: {"pending_slots": cache.pending_slots.insert(7)},
        lambda cache: {"recency": Recency()},
        lambda cache: {"frontier": Recency()},
        lambda cache: {"superseded": cache.frontier},
        lambda cache: {"locks": cache.locks.remove(1)},
        lambda cache: {"nodes": cache.nodes.remove(next(iter(cache.nodes)))},
    ],
)
def test_check_finds_whatever_went_astray(cache, spoil):
    cache, _ = put(cache, words(1, 2, 3), [64, 192])
    cache, _ = put(cache, words(5), [64])
    cache, _ = pc.lock(*pc.match(cache, words(1, 2), plan_id="plan"))
    cache, _, _ = pc.allocate_pages(cache, 1)
    cache, _ = pc.allocate_slot(cache)
    pc.check(cache)
    with pytest.raises(AssertionError, match="prefix cache"):
        pc.check(replace(cache, **spoil(cache)))
