"""The replay protocol of the quality tables, on the real engine: warm up once, replay every arm.

Appendix C.3 of the DASC paper: one pass fills the cache and is discarded, then three measured
rounds replay the same prompts. The pass runs cold (every prompt in a namespace of its own), so the
KV and the exact states at the boundaries it leaves are the same for every arm, and an arm's
checkpoints are those states packed anew. `Reuse` therefore warms up once with exact checkpoints and
derives each arm's pool from them; `warm_and_replay` is the protocol word for word, for one arm.
Checkpoints are prompt-only: what a replay generates leaves none.

    engine = Engine(model, sized(EngineConfig(max_running=64), prompts, 128))
    study = Reuse(engine, prompts, 128)
    replays = [study.replay(arm) for arm in (DENSE, Arm(nr16), *random_arms(nr16))]
"""

from collections.abc import Sequence
from dataclasses import replace

from dasc_jax.engine.config import EngineConfig
from dasc_jax.engine.engine import Engine
from dasc_jax.engine.request import Request, RequestResult, SamplingParams
from dasc_jax.engine.residency import Kept
from dasc_jax.evals.arms import DENSE, Arm
from dasc_jax.evals.rounds import Answer, Replay, Round, SlotBytes, slot_bytes
from dasc_jax.horizons import retention_horizons
from dasc_jax.types import PAGE

ROUNDS = 3
"""Measured rounds of the paper."""

Prompts = Sequence[Sequence[int]]


def sized(
    config: EngineConfig,
    prompts: Prompts,
    max_new_tokens: int | Sequence[int],
    rounds: int = ROUNDS,
) -> EngineConfig:
    """`config` with a pool in which these prompts stay, checkpoints and KV, through all rounds.

    Room for what replays add to the trie is included: each answer's whole pages, in every round.
    """
    limits = _limits(prompts, max_new_tokens)
    totals = [_pages(len(p) + n) for p, n in zip(prompts, limits, strict=True)]
    answers = sum(_pages(n) + 1 for n in limits)
    running = config.max_running * max(totals)
    return replace(
        config,
        dasc=DENSE.dasc,
        pages=1 + sum(_pages(len(p)) for p in prompts) + rounds * answers + running,
        checkpoint_slots=len(prompts),
        checkpoint_bytes=None,
        checkpoint_interval=None,
        max_lineage=None,
        prefix_cache=True,
    )


class Reuse:
    """Prompts cached once by an engine, and replayed under any arm.

    Whatever an arm caches is undone before the next: the trie goes back to its value after the
    warm-up. Where pages were given away since, because a replay evicted them or another study
    shares the engine, the warm-up is run again.

    Args:
        engine: idle, with a pool as `sized` makes it; its cache is flushed.
        prompts: token ids, one prompt an instance.
        max_new_tokens: most tokens an answer has, for all or each.
        stop_token_ids: tokens that end an answer beside the model's own.

    Raises:
        ValueError: a pool too small for the prompts, no prompt, or what `Engine.submit` refuses.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Prompts,
        max_new_tokens: int | Sequence[int],
        stop_token_ids: tuple[int, ...] = (),
    ):
        self.engine = engine
        self.requests = _requests(prompts, max_new_tokens, stop_token_ids)
        self.kept, self.dense = self._warm()

    def replay(self, arm: Arm, rounds: int = ROUNDS) -> Replay:
        """Replay all prompts `rounds` times under `arm`, from the state after the warm-up."""
        if self.engine.loop.residency.kept is not self.kept:
            self.kept, self.dense = self._warm()
        self.engine.adopt(self.kept, arm.dasc, arm.plan(_horizons(self.engine, arm)))
        return _replay(self.engine, self.requests, arm, rounds, self.dense)

    def _warm(self) -> tuple[Kept, SlotBytes]:
        _warm_up(self.engine, self.requests, DENSE)
        return self.engine.keep(), _slot_bytes(self.engine)


def warm_and_replay(
    engine: Engine,
    prompts: Prompts,
    max_new_tokens: int | Sequence[int],
    arm: Arm,
    *,
    rounds: int = ROUNDS,
    stop_token_ids: tuple[int, ...] = (),
) -> Replay:
    """The whole protocol for one arm, its warm-up stored as the arm says.

    Raises:
        ValueError: as `Reuse`.
    """
    requests = _requests(prompts, max_new_tokens, stop_token_ids)
    engine.adopt(None, DENSE.dasc)
    dense = _slot_bytes(engine)
    _warm_up(engine, requests, arm)
    return _replay(engine, requests, arm, rounds, dense)


def _limits(prompts: Prompts, max_new_tokens: int | Sequence[int]) -> list[int]:
    if not len(prompts):
        raise ValueError("no prompts to replay")
    if isinstance(max_new_tokens, int):
        return [max_new_tokens] * len(prompts)
    if len(max_new_tokens) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts, {len(max_new_tokens)} values of max_new_tokens")
    return list(max_new_tokens)


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE)


def _requests(
    prompts: Prompts, max_new_tokens: int | Sequence[int], stop: tuple[int, ...]
) -> tuple[Request, ...]:
    """One greedy request an instance. A namespace each: no prompt warms up from another's pages."""
    return tuple(
        Request(
            f"instance-{place}",
            tuple(tokens),
            SamplingParams(max_tokens=limit, temperature=0.0, stop_token_ids=stop),
            namespace=f"instance-{place}",
        )
        for place, (tokens, limit) in enumerate(
            zip(prompts, _limits(prompts, max_new_tokens), strict=True)
        )
    )


def _horizons(engine: Engine, arm: Arm) -> list:
    return retention_horizons(engine.model, eps=arm.dasc.eps, a=arm.dasc.a)


def _slot_bytes(engine: Engine) -> SlotBytes:
    return slot_bytes(engine.loop.device.memory.pool)


def _evictions(engine: Engine) -> tuple[int, int]:
    stats = engine.stats()
    return int(stats.get("evicted_pages", 0)), int(stats.get("evicted_checkpoints", 0))


def _warm_up(engine: Engine, requests: Sequence[Request], arm: Arm) -> None:
    """Fill an empty cache. One token each is enough: answers are discarded, and store nothing."""
    engine.adopt(None, arm.dasc, arm.plan(_horizons(engine, arm)))
    before = _evictions(engine)
    engine.generate([replace(r, sampling=replace(r.sampling, max_tokens=1)) for r in requests])
    pages, checkpoints = (b - a for a, b in zip(before, _evictions(engine), strict=True))
    if pages or checkpoints:
        config = engine.config
        raise ValueError(
            f"the warm-up of {len(requests)} prompts evicted {pages} pages and {checkpoints}"
            f" checkpoints: the pool of {config.num_pages} pages and {config.checkpoint_slots}"
            " checkpoint slots is too small"
        )


def _replay(
    engine: Engine, requests: Sequence[Request], arm: Arm, rounds: int, dense: SlotBytes
) -> Replay:
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; it must be at least 1")
    measured = tuple(_round(engine, requests) for _ in range(rounds))
    return Replay(arm, measured, _slot_bytes(engine), dense)


def _round(engine: Engine, requests: Sequence[Request]) -> Round:
    before = _evictions(engine)
    answers = tuple(_answer(result) for result in engine.generate(requests))
    pages, checkpoints = (b - a for a, b in zip(before, _evictions(engine), strict=True))
    return Round(answers, pages, checkpoints)


def _answer(result: RequestResult) -> Answer:
    return Answer(
        tokens=result.tokens,
        finish=result.finish_reason,
        reason=result.reason,
        prompt_tokens=result.prompt_tokens,
        cached_tokens=result.cached_tokens,
        replayed_tokens=result.report.replayed_tokens,
    )
