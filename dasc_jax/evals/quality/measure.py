"""Measuring arms of the quality study: RULER suites, the engine they fit in, lines of results."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float64

from dasc_jax.config import DascConfig
from dasc_jax.engine.config import EngineConfig
from dasc_jax.engine.engine import Engine
from dasc_jax.engine.request import Request, SamplingParams
from dasc_jax.evals.arms import DENSE, Arm, random_arms
from dasc_jax.evals.quality.cells import COLD, ArmKey, Cell, Run
from dasc_jax.evals.reuse import sized
from dasc_jax.evals.rounds import Replay
from dasc_jax.evals.ruler import Generator, Instance, score
from dasc_jax.evals.stats import holm, mean_interval, paired_difference
from dasc_jax.horizons import retention_horizons
from dasc_jax.model import Model
from dasc_jax.plan import make_plan
from dasc_jax.tokenizer import Tokenizer
from dasc_jax.types import PAGE

Scores = Float64[np.ndarray, "N"]


@dataclass(frozen=True)
class Suite:
    """The instances of several tasks at one length, a task after the other, `n` each."""

    length: int
    n: int
    seed: int
    instances: tuple[Instance, ...]
    prompts: tuple[tuple[int, ...], ...]
    left_out: tuple[str, ...]
    """Why tasks are missing: they do not fit into the length."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """In their order."""
        return tuple(instance.task for instance in self.instances[:: self.n])

    @property
    def limits(self) -> list[int]:
        """Most tokens of every answer."""
        return [instance.max_new_tokens for instance in self.instances]


def make_suite(tokenizer: Tokenizer, tasks: Sequence[str], length: int, n: int, seed: int) -> Suite:
    """Generate a suite; a task without room at this length is left out, with the numbers."""
    generator = Generator(tokenizer, split="eval", seed=seed)
    made: list[Instance] = []
    left_out = []
    for task in tasks:
        try:
            made += [generator.instance(task, length, index) for index in range(n)]
        except ValueError as error:
            made = [instance for instance in made if instance.task != task]
            left_out.append(str(error))
    prompts = tuple(tuple(tokenizer.encode(instance.prompt)) for instance in made)
    return Suite(length, n, seed, tuple(made), prompts, tuple(left_out))


def arms_of(
    w_max: Sequence[int], quantizations: Sequence[str], seeds: Sequence[int]
) -> tuple[Arm, ...]:
    """Dense first, then nr, int8 nr and Random masks; wr and int8 wr, which take longest, last.

    `w_max` 0 is the dense arm where nothing is quantized, and int8 alone where it is.
    """
    plain = [DascConfig(w_max=w) for w in sorted({w for w in w_max if w})]
    refreshed = [replace(dasc, policy="wr") for dasc in plain]
    alone = [DascConfig(w_max=0)] if 0 in w_max else []
    float32 = "float32" in quantizations
    int8 = "int8" if "int8" in quantizations else None
    arms = [DENSE, *(Arm(dasc) for dasc in plain if float32)]
    arms += [Arm(replace(dasc, quantization=int8)) for dasc in (*alone, *plain) if int8]
    arms += [arm for dasc in plain if float32 for arm in random_arms(dasc, seeds)]
    arms += [Arm(dasc) for dasc in refreshed if float32]
    arms += [Arm(replace(dasc, quantization=int8)) for dasc in refreshed if int8]
    return tuple(arms)


def key_of(arm: Arm) -> ArmKey:
    """The arm as lines name it."""
    return ArmKey(arm.dasc.policy, arm.w_max, arm.dasc.quantization, arm.selector, arm.seed)


def engine_config(
    sizes: EngineConfig, suites: Sequence[Suite], rounds: int, window: int
) -> EngineConfig:
    """An engine in which each of the suites stays cached through all rounds of an arm.

    `sizes` gives max_running, prefill_tokens and prefill_requests; `window` is the longest refresh
    of any arm, for which a prefill step must have room.
    """
    longest = max(len(p) + n for s in suites for p, n in zip(s.prompts, s.limits, strict=True))
    room = -(-(window + 3) // PAGE) * PAGE + PAGE
    sizes = replace(
        sizes,
        max_context=-(-longest // PAGE) * PAGE,
        prefill_tokens=max(sizes.prefill_tokens, room),
    )
    each = [sized(sizes, suite.prompts, suite.limits, rounds) for suite in suites]
    return replace(
        each[0],
        pages=max(config.num_pages for config in each),
        checkpoint_slots=max(len(suite.prompts) for suite in suites),
    )


def longest_window(model: Model, w_max: Sequence[int]) -> int:
    """Tokens of the longest refresh among these thresholds."""
    horizons = retention_horizons(model)
    return max((make_plan(horizons, w).window for w in w_max), default=0)


@dataclass(frozen=True)
class Lines:
    """Makes the lines of one model; `weights` tells checkpoints of one name apart."""

    model: Model
    name: str
    weights: str
    run: Run

    def cold(self, engine: Engine, suite: Suite) -> Iterator[Cell]:
        """Answer a suite with an empty cache, no prompt sharing pages with another."""
        engine.adopt(None, DENSE.dasc)
        requests = [
            Request(f"cold-{at}", prompt, SamplingParams(max_tokens=limit, temperature=0.0),
                    namespace=f"cold-{at}")
            for at, (prompt, limit) in enumerate(zip(suite.prompts, suite.limits, strict=True))
        ]  # fmt: skip
        results = engine.generate(requests)
        if failed := [r.error for r in results if r.finish_reason not in ("stop", "length")]:
            raise ValueError(f"{len(failed)} cold requests failed, the first with {failed[0]}")
        for at, task in enumerate(suite.tasks):
            place = slice(at * suite.n, (at + 1) * suite.n)
            pairs = zip(suite.instances[place], results[place], strict=True)
            values = np.array([self._score(i, r.tokens) for i, r in pairs])
            yield self._cell(suite, task, COLD, values, None, 1)

    def replayed(
        self, suite: Suite, replay: Replay, dense: dict[str, Scores] | None
    ) -> Iterator[Cell]:
        """The lines of an arm, paired with the `dense` scores by task (None: it is dense)."""
        made = []
        for at, task in enumerate(suite.tasks):
            first = at * suite.n
            part = part_of(replay, first, first + suite.n)
            values = part.instance_scores(
                lambda place, tokens, first=first: self._score(
                    suite.instances[first + place], tokens
                )
            )
            reference = None if dense is None else dense[task]
            cell = self._cell(suite, task, key_of(replay.arm), values, reference, len(part.rounds))
            made.append(replace(cell, **_cache_fields(part)))
        yield from adjusted(made)

    def _score(self, instance: Instance, tokens: Sequence[int]) -> float:
        assert self.model.tokenizer is not None
        text = self.model.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return score(instance, instance.references, text)

    def _cell(
        self,
        suite: Suite,
        task: str,
        arm: ArmKey,
        scores: Scores,
        dense: Scores | None,
        rounds: int,
    ) -> Cell:
        # Lines are paired from the file too: what is compared must be what is written.
        scores = scores.round(6)
        mean = mean_interval(scores)
        paired = None if dense is None else paired_difference(scores, dense)
        return Cell(
            model=self.name,
            weights=self.weights,
            family=self.model.config.delta.kind,
            dtype=self.model.dtype,
            task=task,
            length=suite.length,
            **arm._asdict(),
            generator_seed=suite.seed,
            n=mean.n,
            rounds=rounds,
            score=mean.mean,
            low=_finite(mean.low),
            high=_finite(mean.high),
            difference=paired and paired.mean,
            difference_low=paired and _finite(paired.low),
            difference_high=paired and _finite(paired.high),
            p=paired and paired.p,
            p_sign=paired and paired.p_sign,
            p_holm=None,
            token_hit=0.0,
            loaded=0.0,
            replayed=0.0,
            strict=None,
            faults=(),
            compression=None,
            temporal_compression=None,
            slot_bytes=None,
            dense_bytes=None,
            scores=tuple(scores.tolist()),
            **self.run._asdict(),
        )


def part_of(replay: Replay, start: int, stop: int) -> Replay:
    """The replay of some of the instances; what was evicted counts against each of them."""
    rounds = tuple(replace(one, answers=one.answers[start:stop]) for one in replay.rounds)
    return replace(replay, rounds=rounds)


def adjusted(cells: Sequence[Cell]) -> list[Cell]:
    """The lines of one arm with `p` adjusted by Holm over them; dense ones as they are."""
    p = [cell.p for cell in cells if cell.p is not None]
    if len(p) != len(cells):
        return list(cells)
    return [replace(cell, p_holm=float(value)) for cell, value in zip(cells, holm(p), strict=True)]


def _cache_fields(replay: Replay) -> dict[str, object]:
    loaded = [answer for answer in replay.answers if answer.loaded]
    tokens = sum(answer.replayed_tokens for answer in loaded)
    return {
        "token_hit": replay.token_hit,
        "loaded": replay.loaded,
        "replayed": tokens / len(loaded) if loaded else 0.0,
        "strict": replay.strict,
        "faults": replay.faults,
        "compression": replay.compression,
        "temporal_compression": _finite(replay.temporal_compression),
        "slot_bytes": replay.slot.total,
        "dense_bytes": replay.dense.total,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
