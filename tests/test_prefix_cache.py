"""What a lookup finds, and why it finds no more; which pages and states the trie keeps."""

import pytest

from dasc_jax import prefix_cache as pc
from tests.cached_prompts import look, put, words


@pytest.fixture
def cache():
    return pc.empty(40, 8)


@pytest.mark.parametrize("length", [0, 1, 63, 64])
def test_a_prompt_without_a_boundary_before_its_last_token_says_so(cache, length):
    cache, _ = put(cache, words(1, 2), [64])
    found = look(cache, words(1, 2)[:length])
    assert (found.reason, found.depth, found.branch_depth) == ("below_page", 0, 0)


def test_the_last_token_is_always_left_to_compute(cache):
    cache, _ = put(cache, words(1, 2), [64, 128])
    assert look(cache, words(1, 2)).depth == 64
    assert look(cache, words(1, 2)).kv_depth == 128
    assert look(cache, words(1, 2, tail=1)).depth == 128


def test_kv_alone_is_no_hit_and_asks_for_a_checkpoint_where_it_ends(cache):
    cache, _ = put(cache, words(1, 2, 3))
    found = look(cache, words(1, 2, 8, tail=5))
    assert found == pc.Match("no_state_at_boundary", 0, 128, 128, 0, 0, (), None)
    assert look(cache, words(8, 2, 3)).reason == "no_kv"


def test_a_hit_names_the_pages_the_slot_and_the_hash_of_its_depth(cache):
    tokens = words(1, 2, 3, tail=9)
    cache, result = put(cache, tokens, [128])
    found = look(cache, tokens)
    assert (found.reason, found.depth, found.kv_depth) == ("hit", 128, 192)
    assert found.pages == result.adopted[:2]
    assert (128, found.slot) in result.attached
    assert found.key == list(pc.page_keys(tokens))[1]
    assert found.branch_depth == 192


def test_a_partial_last_page_never_enters_the_trie(cache):
    cache, result = put(cache, words(1, tail=63))
    assert len(result.adopted) == 1
    assert cache.counts.evictable_pages == 1


def test_keys_depend_on_every_token_before_and_on_the_namespace():
    keys = list(pc.page_keys(words(1, 2, 2, 2)))
    assert len(set(keys)) == 4
    assert keys[:2] == list(pc.page_keys(words(1, 2, tail=63)))
    assert not set(keys) & set(pc.page_keys(words(3, 2, 2, 2)))
    assert not set(keys) & set(pc.page_keys(words(1, 2, 2, 2), "tenant"))


def test_namespaces_share_nothing(cache):
    tokens = words(1, 2, tail=1)
    cache, _ = put(cache, tokens, [128], namespace="a")
    assert look(cache, tokens, namespace="a").reason == "hit"
    assert look(cache, tokens, namespace="b").reason == "no_kv"
    assert look(cache, tokens).reason == "no_kv"


def test_the_cache_keeps_nothing_of_the_callers_array(cache):
    tokens = words(1, 2, tail=1)
    same = tokens.copy()
    cache, _ = put(cache, tokens, [64])
    tokens[:] = 7
    assert look(cache, same).depth == 64
    assert look(cache, tokens).reason == "no_kv"


def test_an_evicted_state_is_told_from_one_that_never_was(cache):
    tokens = words(1, 2, 3, tail=1)
    cache, _ = put(cache, tokens, [128])
    cache, gone = pc.evict(cache, slots=1)
    assert len(gone.slots) == 1 and not gone.pages
    found = look(cache, tokens)
    assert (found.reason, found.kv_depth, found.branch_depth) == ("state_evicted", 192, 192)
    pc.check(cache)


def test_a_checkpoint_skipped_for_want_of_a_slot_is_told_as_locked(cache):
    tokens = words(1, 2, tail=1)
    cache, pages, _ = pc.allocate_pages(cache, 3)
    cache, _ = pc.insert(cache, tokens, pages, kv_lineage=0, plan_id="plan", skipped=[128])
    assert look(cache, tokens).reason == "locked"
    cache, _ = put(cache, tokens, [128])
    assert look(cache, tokens).reason == "hit"


def test_a_state_of_another_plan_serves_nobody_and_a_dense_request_takes_none(cache):
    tokens = words(1, 2, tail=1)
    cache, _ = put(cache, tokens, [128], plan_id="other")
    assert look(cache, tokens).reason == "plan_mismatch"
    assert look(cache, tokens, plan_id=None).reason == "plan_mismatch"
    cache, result = put(cache, tokens, [128])
    assert len(result.freed_slots) == 1 and look(cache, tokens).reason == "hit"


def test_lineage_counts_the_kv_of_the_path_as_well_as_the_state(cache):
    tokens = words(1, 2, 3, tail=1)
    cache, _ = put(cache, tokens[:128], [64], kv_lineage=0)
    cache, pages, _ = pc.allocate_pages(cache, 1)
    cache, slot = pc.allocate_slot(cache)
    known = look(cache, tokens).pages + (cache.nodes[list(pc.page_keys(tokens))[1]].page,)
    cache, _ = pc.insert(
        cache, tokens[:192], known + pages, [(192, slot, 1)], kv_lineage=2, plan_id="plan"
    )
    assert look(cache, tokens)[:2] == ("hit", 192)
    assert look(cache, tokens).lineage == 2
    shallower = look(cache, tokens, max_lineage=1)
    assert (shallower.reason, shallower.depth, shallower.lineage) == ("hit", 64, 0)
    assert shallower.branch_depth == 192


def test_no_admissible_lineage_is_a_miss_with_that_reason(cache):
    tokens = words(1, 2, tail=1)
    cache, _ = put(cache, tokens, [128], kv_lineage=3, lineage=1)
    assert look(cache, tokens, max_lineage=2).reason == "lineage"
    assert look(cache, tokens, max_lineage=3).lineage == 3


def test_pages_already_there_stay_and_the_request_keeps_its_own(cache):
    tokens = words(1, 2, 3)
    cache, first = put(cache, tokens[:128])
    cache, pages, _ = pc.allocate_pages(cache, 3)
    cache, second = pc.insert(cache, tokens, pages, kv_lineage=0, plan_id="plan")
    assert (second.adopted, second.duplicates) == (pages[2:], pages[:2])
    assert second.freed_pages == ()
    assert cache.counts.private_pages == 2
    pc.check(cache)


def test_a_more_exact_page_replaces_one_that_no_lock_holds(cache):
    tokens = words(1, 2, tail=1)
    cache, lossy = put(cache, tokens, [64], kv_lineage=1)
    exact, result = put(cache, tokens, kv_lineage=0)
    assert result.freed_pages == lossy.adopted
    assert look(exact, tokens).lineage == 0
    held, _ = pc.lock(*pc.match(cache, tokens, plan_id="plan"))
    half, result = put(held, tokens, kv_lineage=0)
    assert result.freed_pages == lossy.adopted[1:]
    assert look(half, tokens).lineage == 1


def test_the_more_exact_of_two_states_stays_and_the_other_slot_is_freed(cache):
    tokens = words(1, tail=1)
    cache, first = put(cache, tokens, [64], lineage=1)
    _, equal = put(cache, tokens, [64], lineage=1)
    _, worse = put(cache, tokens, [64], lineage=2)
    _, better = put(cache, tokens, [64], lineage=0)
    assert equal.attached == worse.attached == first.attached
    assert better.freed_slots == tuple(slot for _, slot in first.attached)
    locked, _ = pc.lock(*pc.match(cache, tokens, plan_id="plan"))
    _, refused = put(locked, tokens, [64], lineage=0)
    assert refused.attached == first.attached
