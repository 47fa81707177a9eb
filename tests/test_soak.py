"""Many clients at once, a third of them impatient: nothing leaks, all others get exact answers."""

import asyncio
import contextlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

import httpx

from dasc_jax.config import DascConfig
from dasc_jax.engine.config import EngineConfig
from dasc_jax.engine.engine import Engine
from dasc_jax.engine.request import Request, SamplingParams
from dasc_jax.model import Model
from dasc_jax.prefix_cache import check
from tests.engines import golden_model, prompt
from tests.fake_engine import serving, wait_until
from tests.tiny import tiny_model

LONGEST = 400
SHARED = [prompt(length, seed=length) for length in (64, 100, 128, 190, 256, 320)]


@dataclass(frozen=True)
class Ask:
    """One call. `leaves` says when its client hangs up: after so many seconds or stream lines."""

    request: Request
    stream: bool
    leaves: float | None

    @property
    def body(self) -> dict:
        sampling = self.request.sampling
        return {
            "prompt": list(self.request.prompt),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": sampling.seed,
            "ignore_eos": sampling.ignore_eos,
            "stream": self.stream,
            "state_policy": self.request.state_policy,
            "cache_salt": self.request.namespace,
        }


def asks(count: int, seed: int, salts: tuple[str, ...] = ("", "", "a", "b")) -> list[Ask]:
    """Mixed calls: fresh and shared prompts of 1..400 tokens, every policy, several namespaces."""
    draw = random.Random(seed)

    def one(number: int) -> Ask:
        shared = draw.choice([(), *SHARED])
        tail = draw.randint(1, LONGEST - len(shared))
        tail = draw.choice([tail, 1 + tail % 20, 1 + tail % 60])
        tokens = shared + prompt(tail, seed=draw.randint(1000, 1040))
        greedy = draw.random() < 0.4
        sampling = SamplingParams(
            max_tokens=draw.choice([1, 2, 3, 8]),
            temperature=0.0 if greedy else draw.uniform(0.3, 1.5),
            top_p=draw.choice([1.0, 0.9, 0.5]),
            top_k=draw.choice([0, 0, 1, 20]),
            seed=number,
            ignore_eos=draw.random() < 0.5,
        )
        policy = draw.choice([None, "dense", "nr", "wr"])
        namespace = draw.choice(salts)
        leaves = draw.choice([0.0, 0.01, 0.1, 0.3]) if number % 3 == 2 else None
        request = Request(f"serial-{number}", tokens, sampling, policy, namespace)
        return Ask(request, draw.random() < 0.5, leaves)

    return [one(number) for number in range(count)]


async def answer(http: httpx.AsyncClient, ask: Ask) -> tuple[int, ...] | None:
    """The generated tokens, None for a client that left."""
    if not ask.stream:
        response = await asyncio.wait_for(http.post("/v1/completions", json=ask.body), ask.leaves)
        assert response.status_code == 200, response.text
        return tuple(response.json()["choices"][0]["token_ids"])
    tokens: list[int] = []
    async with http.stream("POST", "/v1/completions", json=ask.body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if ask.leaves is not None and len(tokens) >= 10 * ask.leaves:
                return None
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                tokens += chunk["choices"][0]["token_ids"]
    return tuple(tokens)


async def storm(url: str, calls: list[Ask], clients: int) -> dict[str, tuple[int, ...] | None]:
    """All calls by so many clients, each taking the next one as soon as it is free."""
    answers: dict[str, tuple[int, ...] | None] = {}
    left = iter(calls)

    async def client() -> None:
        for ask in left:
            async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http:
                answers[ask.request.id] = None
                with contextlib.suppress(TimeoutError):
                    answers[ask.request.id] = await answer(http, ask)

    await asyncio.gather(*(client() for _ in range(clients)))
    return answers


def assert_nothing_left(engine: Engine) -> None:
    """No request anywhere, every page and slot free or evictable, all invariants of the cache."""

    def idle() -> bool:
        stats = engine.stats()
        return stats["running"] == stats["waiting"] == 0

    wait_until(idle, 20)
    stats, cache = engine.stats(), engine.loop.residency.cache
    check(cache)
    assert stats["free_pages"] + stats["evictable_pages"] == cache.pages - 1
    assert stats["free_slots"] + stats["evictable_slots"] == cache.slots - 1
    for used in ("locked_pages", "private_pages", "locked_slots", "pending_slots", "locks"):
        assert stats[used] == 0, used
    assert len(engine.loop.residency.free_slots) == engine.config.max_running
    assert set(engine.loop.residency.meta) <= set(range(1, cache.slots))
    assert len(engine.loop.residency.meta) == stats["evictable_slots"]


def assert_answered_as_alone(engine: Engine, calls: list[Ask], answers: dict) -> None:
    """Whoever stayed got what the request alone, on an empty cache, generates."""
    stayed = [ask for ask in calls if ask.leaves is None]
    assert len(stayed) > len(calls) // 2
    for ask in stayed:
        assert engine.flush_cache()
        (alone,) = engine.generate([ask.request])
        assert answers[ask.request.id] == alone.tokens, ask.request


@contextlib.contextmanager
def started(model: Model, policy: str, **options: int) -> Iterator[Engine]:
    """A running engine of its own: a shared one could not be stopped."""
    sizes = {"max_context": LONGEST + 16, "prefill_tokens": 256, "strict_compile": True}
    config = EngineConfig(dasc=DascConfig(policy=policy), **{**sizes, **options})
    engine = Engine(model, config).start()
    try:
        yield engine
    finally:
        engine.stop()


@contextlib.contextmanager
def weathered(engine: Engine, calls: list[Ask], clients: int) -> Iterator[dict]:
    """The answers of a storm against a server over `engine`, once nothing of it is left."""
    with serving(engine) as url:
        answers = asyncio.run(storm(url, calls, clients))
        assert_nothing_left(engine)
        gone = sum(answer is None for answer in answers.values())
        assert len(calls) // 6 < gone <= len(calls) // 3
        yield answers


def test_200_calls_of_32_clients_leave_nothing_and_are_answered_as_alone():
    calls = asks(200, seed=1)
    with started(golden_model("kimi_linear_a"), "dense", max_running=8) as engine:
        with weathered(engine, calls, 32) as answers:
            assert engine.stats()["lookup_hit"] > 50
            assert_answered_as_alone(engine, calls, answers)


def test_they_do_so_where_pages_and_slots_are_scarce():
    """Pages for one long request, two checkpoint slots: requests wait, checkpoints are skipped."""
    calls, scarce = asks(36, seed=2), {"pages": 8, "checkpoint_slots": 2, "max_running": 4}
    with started(tiny_model("qwen3_next_a"), "dense", checkpoint_interval=64, **scarce) as engine:
        with weathered(engine, calls, 16) as answers:
            assert engine.stats()["evicted_pages"] > 20
            assert engine.stats()["checkpoints_skipped"] > 0
            assert_answered_as_alone(engine, calls, answers)


def test_lossy_policies_side_by_side_leave_nothing():
    calls, sizes = (
        asks(36, seed=3, salts=("",)),
        {"pages": 48, "checkpoint_slots": 12, "max_running": 4},
    )
    with started(tiny_model(), "wr", max_lineage=2, **sizes) as engine:
        with weathered(engine, calls, 16) as answers:
            assert engine.stats()["lookup_hit"] > 0
            for ask in calls:
                if ask.leaves is None:
                    tokens, sampling = answers[ask.request.id], ask.request.sampling
                    assert 1 <= len(tokens) <= sampling.max_tokens
