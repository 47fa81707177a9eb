"""The scheduler's promises: room, order, the 64-token grid, progress, each checkpoint once."""

import hypothesis.strategies as st
from hypothesis import given

from dasc_jax.engine.scheduler import (
    Prefilling,
    checkpoint_depths,
    next_step,
    prefill_pieces,
)

REPLAY = 35  # a window of 32 tokens and 3 of convolution
SIZES = st.integers(2, 8).map(lambda pages: 64 * pages)


@st.composite
def prompts(draw) -> tuple[int, int, int, int, int | None]:
    """Length, hit (on the grid, leaving at least a token), replay, branch point, interval."""
    length = draw(st.integers(1, 900))
    hit = 64 * draw(st.integers(0, (length - 1) // 64))
    replay = draw(st.sampled_from([0, min(7, hit), min(REPLAY, hit)]))
    branch = 64 * draw(st.integers(0, 16))
    return length, hit, replay, branch, draw(st.sampled_from([None, 64, 128, 256]))


QUEUES = st.lists(prompts(), max_size=6)


def admitted(queue) -> list[Prefilling]:
    """The prompts as the scheduler meets them."""
    return [
        Prefilling(str(at), length, hit, replay, checkpoint_depths(length, hit, branch, interval))
        for at, (length, hit, replay, branch, interval) in enumerate(queue)
    ]


@given(QUEUES, SIZES, st.integers(1, 4))
def test_a_step_holds_what_fits_in_order_of_arrival(queue, tokens, requests):
    queue = admitted(queue)
    pieces = prefill_pieces(queue, tokens, requests)
    assert len(pieces) <= requests
    assert sum(p.replay + p.stop - p.start for p in pieces) <= tokens
    assert [p.id for p in pieces] == [p.id for p in queue[: len(pieces)]]
    for piece, prompt in zip(pieces, queue, strict=False):
        assert (piece.start, piece.replay) == (prompt.done, prompt.replay)
        assert piece.start < piece.stop <= prompt.length
        assert piece.stop == prompt.length or piece.stop % 64 == 0
        assert all(piece.start < depth <= piece.stop for depth in piece.checkpoints)


@given(QUEUES, SIZES, st.integers(1, 4))
def test_a_prompt_is_cut_only_where_the_step_is_full(queue, tokens, requests):
    queue, room = admitted(queue), tokens
    for piece, prompt in zip(prefill_pieces(queue, tokens, requests), queue, strict=False):
        room -= piece.replay + piece.stop - piece.start
        assert piece.stop == prompt.length or room < 64


@given(QUEUES, SIZES, st.integers(1, 4))
def test_every_prompt_ends_with_each_checkpoint_made_once(queue, tokens, requests):
    """A step with room for a page behind the longest replay always moves the oldest prompt on."""
    queue = admitted(queue)
    made = {p.id: [] for p in queue}
    wanted = {p.id: list(p.checkpoints) for p in queue}
    while queue:
        pieces = prefill_pieces(queue, tokens, requests)
        assert pieces, "no progress"
        for piece in pieces:
            made[piece.id] += piece.checkpoints
        ends = {piece.id: piece.stop for piece in pieces}
        moved = [p._replace(done=ends[p.id], replay=0) if p.id in ends else p for p in queue]
        queue = [p for p in moved if p.done < p.length]
    assert made == wanted


@given(
    st.integers(1, 2000),
    st.integers(0, 31).map(lambda n: 64 * n),
    st.integers(0, 31).map(lambda n: 64 * n),
    st.sampled_from([None, 64, 192, 1024]),
)
def test_checkpoints_lie_on_the_grid_behind_the_hit(length, hit, branch, interval):
    depths = checkpoint_depths(length, hit, branch, interval)
    for depth in range(0, length + 64):
        on_grid = depth % 64 == 0 and hit < depth < length
        last = depth + 64 >= length
        regular = interval is not None and depth % interval == 0
        assert (depth in depths) == (on_grid and (last or depth == branch or regular)), depth
    assert list(depths) == sorted(set(depths))


@given(st.integers(0, 3), st.integers(0, 3), st.sampled_from(["prefill", "decode"]))
def test_neither_prompts_nor_running_requests_starve(prefilling, decoding, previous):
    steps = []
    for _ in range(4):
        step = next_step(prefilling, decoding, previous)
        steps.append(step)
        previous = step if step != "idle" else previous
    if prefilling and decoding:
        assert set(steps[:2]) == set(steps[2:]) == {"prefill", "decode"}
    else:
        assert set(steps) == {"prefill" if prefilling else "decode" if decoding else "idle"}
