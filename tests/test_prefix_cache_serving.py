"""Public faults of other prefix caches, replayed on ours by a server that computes nothing.

Each test names the report it guards against.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from dasc_jax import prefix_cache as pc
from dasc_jax.types import PAGE


class Running(NamedTuple):
    """A request between admission and end."""

    tokens: np.ndarray
    found: pc.Match
    pages: tuple[int, ...]
    states: tuple[tuple[int, int, int], ...]
    skipped: tuple[int, ...]
    lock: pc.Lock


class Server:
    """The order of calls of a real engine, with the skipped checkpoints counted."""

    def __init__(self, pages: int, slots: int):
        self.cache = pc.empty(pages, slots)
        self.skipped = 0

    def start(self, prompt: np.ndarray, output: int = 0) -> Running | None:
        """Admits a request that will generate `output` tokens; None when the pages are lacking."""
        self.cache, found = pc.match(self.cache, prompt, plan_id="plan")
        self.cache, lock = pc.lock(self.cache, found)
        need = -(-(len(prompt) + output) // PAGE) - len(found.pages)
        self.cache, pages, _ = pc.allocate_pages(self.cache, need)
        if pages is None:
            self.cache = pc.unlock(self.cache, lock)
            return None
        states, skipped = [], []
        for depth in sorted(
            {(len(prompt) - 1) // PAGE * PAGE, found.branch_depth} - {0, found.depth}, reverse=True
        ):
            self.cache, slot = pc.allocate_slot(self.cache)
            if slot is None:
                skipped.append(depth)
            else:
                states.append((depth, slot, 0))
        self.skipped += len(skipped)
        return Running(prompt, found, pages, tuple(states), tuple(skipped), lock)

    def finish(self, run: Running, output: np.ndarray | None = None) -> None:
        """The prefill, the decode and the end of an admitted request."""
        lock = run.lock
        if lock.state_key is not None:
            self.cache, lock = pc.unlock_state(self.cache, lock)
        pages = run.found.pages + run.pages
        how = {"kv_lineage": 0, "plan_id": "plan"}
        self.cache, put = pc.insert(
            self.cache, run.tokens, pages, run.states, lock=lock, skipped=run.skipped, **how
        )
        private = set(run.pages) - set(put.adopted)
        if output is not None:
            tokens = np.concatenate([run.tokens, output])
            self.cache, put = pc.insert(self.cache, tokens, pages, lock=put.lock, **how)
            private -= set(put.adopted)
        self.cache = pc.release_pages(self.cache, sorted(private))
        self.cache = pc.unlock(self.cache, put.lock)
        assert self.cache.counts.idle or self.cache.counts.locks
        pc.check(self.cache)

    def abort(self, run: Running) -> None:
        for _, slot, _ in run.states:
            self.cache = pc.release_slot(self.cache, slot)
        self.cache = pc.release_pages(self.cache, run.pages)
        self.cache = pc.unlock(self.cache, run.lock)

    def serve(self, prompt: np.ndarray, output: np.ndarray | None = None) -> pc.Match:
        run = self.start(prompt, 0 if output is None else len(output))
        assert run is not None
        self.finish(run, output)
        return run.found


def text(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, length).astype(np.int32)


@pytest.mark.parametrize("length", [d for n in (1, 2, 3, 5) for d in range(64 * n - 2, 64 * n + 3)])
def test_a_repeated_prompt_hits_its_last_boundary_from_the_second_time_on(length):
    """sgl-project/sglang 21158: the same prompt sent again never hit."""
    server = Server(64, 16)
    depths = [server.serve(text(0, length)).depth for _ in range(3)]
    assert depths == [0] + [(length - 1) // PAGE * PAGE] * 2


@pytest.mark.parametrize("output", [0, 1, 63, 200])
def test_a_repeated_prompt_hits_whatever_was_generated_after_it(output):
    server = Server(64, 16)
    for turn in range(3):
        found = server.serve(text(0, 192), text(turn, output))
        assert found.depth == (128 if turn else 0)


@pytest.mark.parametrize("shared", range(640, 705))
def test_the_third_request_reuses_the_whole_shared_prefix(shared):
    """vllm-project/vllm 45238: one state in each private tail meant no reuse at all."""
    server = Server(128, 16)
    prompts = [np.concatenate([text(0, shared), text(9 + i, 100 + 70 * i)]) for i in range(4)]
    found = [server.serve(prompt) for prompt in prompts]
    assert found[1].branch_depth == found[1].kv_depth == shared // PAGE * PAGE
    assert [each.depth for each in found[2:]] == [shared // PAGE * PAGE] * 2


@pytest.mark.parametrize("slots", [11, 12, 13])
@pytest.mark.parametrize("system", [0, 300])
def test_deepest_states_outlive_the_shallow_ones_of_other_conversations(slots, system):
    """sgl-project/sglang 31648: a hit refreshed all ancestors, and cold conversations lost all."""
    server = Server(4096, slots)
    history = [np.concatenate([text(99, system), text(i, 150)]) for i in range(8)]
    expected = [0] * 8
    for turn in range(6):
        for who in range(8):
            found = server.serve(history[who], text(1000 + 10 * turn + who, 40))
            if turn:
                assert (found.reason, found.depth) == ("hit", expected[who])
            expected[who] = (len(history[who]) - 1) // PAGE * PAGE
            more = text(2000 + 10 * turn + who, 90)
            history[who] = np.concatenate([history[who], text(1000 + 10 * turn + who, 40), more])


def test_prompts_that_find_no_slot_are_served_without_a_checkpoint():
    """sgl-project/sglang 36770: an assertion on an optional allocation killed the server."""
    server = Server(1024, 4)
    runs = [server.start(text(i, 1000)) for i in range(8)]
    assert server.skipped == 5
    for run in runs:
        server.finish(run)
    assert server.cache.counts.idle
    again = [server.start(text(i, 1000)) for i in range(8)]
    reasons = [run.found.reason for run in again]
    assert reasons == ["hit"] * 3 + ["locked"] * 5
    assert [run.found.branch_depth for run in again] == [0] * 3 + [960] * 5
    for run in again:
        server.finish(run)
    assert server.cache.counts.idle


def test_nothing_leaks_when_a_match_is_not_admitted():
    """sgl-project/sglang 21404: a slot was taken while matching and lost with the request."""
    server = Server(40, 6)
    server.serve(text(0, 1000))
    running = server.start(text(0, 1000), output=1000)
    before = server.cache.counts
    for turn in range(1000):
        assert server.start(np.concatenate([text(0, 1000), text(turn, 1500)])) is None
        assert server.cache.counts == before
    server.finish(running)
    pc.check(server.cache)
    assert server.cache.counts.idle


def test_an_abort_at_any_stage_gives_everything_back():
    """sgl-project/sglang 37833: requests of clients that hung up kept their slots."""
    server = Server(128, 16)
    server.serve(text(0, 500), text(1, 100))
    resting = server.cache.counts
    prompt = np.concatenate([text(0, 500), text(1, 100), text(2, 100)])

    server.abort(server.start(prompt, 100))
    assert server.cache.counts == resting

    run = server.start(prompt, 100)
    server.cache, left = pc.unlock_state(server.cache, run.lock)
    server.abort(run._replace(lock=left))
    assert server.cache.counts == resting

    run = server.start(prompt, 100)
    server.cache, put = pc.insert(
        server.cache,
        prompt,
        run.found.pages + run.pages,
        run.states,
        kv_lineage=0,
        plan_id="plan",
        lock=run.lock,
    )
    server.abort(
        run._replace(
            states=(),
            pages=tuple(page for page in run.pages if page not in put.adopted),
            lock=put.lock,
        )
    )
    assert server.cache.counts.idle
    pc.check(server.cache)


def test_a_waiting_request_gets_its_pages_when_another_ends():
    server = Server(40, 6)
    first = server.start(text(0, 1500))
    assert server.start(text(1, 1500)) is None
    server.finish(first)
    second = server.start(text(1, 1500))
    assert second is not None
    server.finish(second)


def test_every_conversation_of_a_full_cache_still_ends_and_nothing_is_lost():
    server = Server(100, 5)
    for turn in range(300):
        server.serve(np.concatenate([text(turn % 7, 64 * (turn % 5)), text(turn, 700)]))
    assert sum(server.cache.counts[:4]) == 99 and sum(server.cache.counts[4:8]) == 4


def test_the_benchmark_writes_one_line_a_measurement(tmp_path):
    script = Path(__file__).parents[1] / "scripts" / "bench_cache.py"
    sizes = "--prompt 256 --pages 40 --pools 40 80 --repeats 2".split()
    subprocess.run([sys.executable, script, "--out", tmp_path, *sizes], check=True)
    rows = [json.loads(line) for line in (tmp_path / "bench_cache.jsonl").read_text().splitlines()]
    assert {row["pages"] for row in rows if row["what"] == "evict one page"} == {40, 80}
    assert all(row["median"] > 0 for row in rows)
