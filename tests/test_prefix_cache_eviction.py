"""Who goes first, and what locks keep."""

import pytest

from dasc_jax import prefix_cache as pc
from tests.cached_prompts import put, words


@pytest.fixture
def cache():
    return pc.empty(40, 8)


def test_the_oldest_unlocked_leaf_goes_first_and_its_state_with_it(cache):
    cache, old = put(cache, words(1, 2), [128])
    cache, new = put(cache, words(3, 4), [128])
    cache, gone = pc.evict(cache, pages=3)
    assert gone.pages == (*reversed(old.adopted), new.adopted[1])
    assert gone.slots == (old.attached[0][1], new.attached[0][1])
    pc.check(cache)


def test_a_match_makes_its_kv_path_recent(cache):
    cache, first = put(cache, words(1, 2))
    cache, second = put(cache, words(3, 4))
    cache, _ = pc.match(cache, words(1, 9), plan_id="plan")
    _, gone = pc.evict(cache, pages=4)
    assert gone.pages == (*first.adopted[1:], *reversed(second.adopted), first.adopted[0])


def test_only_the_state_consumed_becomes_recent(cache):
    cache, path = put(cache, words(1, 2), [64])
    cache, deep = put(cache, words(1, 3), [128])
    cache, other = put(cache, words(5, 6), [128])
    cache, found = pc.match(cache, words(1, 3, tail=1), plan_id="plan")
    assert found.slot == deep.attached[0][1]
    _, gone = pc.evict(cache, slots=3)
    assert gone.slots == tuple(each.attached[0][1] for each in (path, other, deep))


def test_a_superseded_state_goes_before_older_ones_that_still_end_a_path(cache):
    cache, old = put(cache, words(7, 8), [128])
    cache, shallow = put(cache, words(1), [64])
    cache, deep = put(cache, words(1, 2), [128])
    _, gone = pc.evict(cache, slots=3)
    assert gone.slots == tuple(each.attached[0][1] for each in (shallow, old, deep))


def test_a_branch_makes_a_superseded_state_wanted_again(cache):
    cache, shallow = put(cache, words(1), [64])
    cache, deep = put(cache, words(1, 2), [128])
    cache, _ = put(cache, words(1, 3))
    _, gone = pc.evict(cache, slots=2)
    assert gone.slots == (deep.attached[0][1], shallow.attached[0][1])


def test_locks_keep_path_and_state_apart(cache):
    tokens = words(1, 2, 3, tail=1)
    cache, _ = put(cache, tokens, [128])
    cache, found = pc.match(cache, tokens, plan_id="plan")
    cache, held = pc.lock(cache, found)
    assert cache.counts[1:3] == (1, 2) and cache.counts.locked_slots == 1
    assert pc.evict(cache, pages=9, slots=9)[1].pages == (cache.nodes[last_key(tokens)].page,)
    cache, held = pc.unlock_state(cache, held)
    cache, gone = pc.evict(cache, pages=9, slots=9)
    assert gone.slots == (found.slot,) and len(gone.pages) == 1
    cache = pc.unlock(cache, held)
    assert cache.counts.idle and len(pc.evict(cache, pages=9)[1].pages) == 2
    pc.check(cache)


def last_key(tokens):
    return list(pc.page_keys(tokens))[-1]


def test_two_readers_of_one_state_are_both_waited_for(cache):
    tokens = words(1, 2, tail=1)
    cache, _ = put(cache, tokens, [128])
    cache, one = pc.lock(*pc.match(cache, tokens, plan_id="plan"))
    cache, two = pc.lock(*pc.match(cache, tokens, plan_id="plan"))
    cache = pc.unlock(cache, one)
    assert pc.evict(cache, pages=9, slots=9)[1] == pc.Evicted()
    cache, two = pc.unlock_state(cache, two)
    assert len(pc.evict(cache, pages=9, slots=9)[1].slots) == 1
    pc.check(cache)


def test_a_lock_moves_down_to_the_pages_its_request_gave(cache):
    tokens = words(1, 2, 3, tail=1)
    cache, miss = pc.match(cache, tokens, plan_id="plan")
    cache, held = pc.lock(cache, miss)
    cache, pages, _ = pc.allocate_pages(cache, 4)
    cache, result = pc.insert(cache, tokens[:128], pages, kv_lineage=0, plan_id="plan", lock=held)
    assert cache.counts.locked_pages == 2
    cache, result = pc.insert(cache, tokens, pages, kv_lineage=0, plan_id="plan", lock=result.lock)
    assert cache.counts[1:4] == (0, 3, 1)
    pc.check(cache)
    cache = pc.unlock(pc.release_pages(cache, pages[3:]), result.lock)
    assert cache.counts.idle and cache.counts.evictable_pages == 3
    pc.check(cache)


def test_a_lock_does_not_pin_pages_that_only_duplicate_its_own(cache):
    tokens = words(1, 2, 3)
    cache, held = pc.lock(*pc.match(cache, tokens, plan_id="plan"))
    cache, pages, _ = pc.allocate_pages(cache, 3)
    cache, _ = put(cache, tokens)
    cache, result = pc.insert(cache, tokens, pages, kv_lineage=0, plan_id="plan", lock=held)
    assert result.duplicates == pages and cache.counts.locked_pages == 0
    pc.check(cache)


def test_what_the_pool_cannot_give_leaves_the_cache_as_it_was(cache):
    cache, _ = put(cache, words(1, 2), [64, 128])
    cache, _ = pc.lock(*pc.match(cache, words(1, 2, tail=1), plan_id="plan"))
    same, pages, evicted = pc.allocate_pages(cache, 38)
    assert same is cache and pages is None and evicted == pc.Evicted()
    assert len(pc.allocate_pages(cache, 37).pages) == 37


def test_slots_run_out_with_none_and_never_with_an_error(cache):
    taken = []
    while True:
        cache, slot = pc.allocate_slot(cache)
        if slot is None:
            break
        taken.append(slot)
    assert sorted(taken) == list(range(1, 8))
    for slot in taken:
        cache = pc.release_slot(cache, slot)
    assert cache.counts.idle and cache.counts.free_slots == 7
