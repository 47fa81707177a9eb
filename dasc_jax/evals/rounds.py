"""What a replay measured: rounds of answers, Eq. 9 token hits, bytes, and whether it may count.

Appendix C.3 of the DASC paper: a replay counts only if every round evicted nothing, had a token hit
above 0.70 and loaded a checkpoint for at least 95 % of its requests, and the arm for at least 99 %
of all of them. A replay that breaks a rule is kept, with the reasons: it never passes silently.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from dasc_jax.checkpoint_state import CheckpointPool
from dasc_jax.engine.request import FinishReason
from dasc_jax.evals.arms import Arm

TOKEN_HIT = 0.70
"""A round's token hit must exceed this."""

LOADED = 0.95
"""Least share of a round's requests that resume from a checkpoint."""

ARM_LOADED = 0.99
"""Least share of the requests of all rounds."""

COMMON_LOADED = 0.95
"""Least share of (instance, round) pairs that every compared arm loaded: see `common_loaded`."""


class SlotBytes(NamedTuple):
    """Bytes of one slot in the arrays of a checkpoint pool."""

    rows: int
    scales: int
    conv: int

    @property
    def temporal(self) -> int:
        """The recurrent states: rows and, for int8, their scales."""
        return self.rows + self.scales

    @property
    def total(self) -> int:
        """The complete checkpoint."""
        return self.temporal + self.conv


def slot_bytes(pool: CheckpointPool) -> SlotBytes:
    """What a slot takes in the arrays that are allocated, read from the arrays themselves.

    On a mesh, of all ranks together.
    """
    slots = pool.rows.shape[0]
    scales = 0 if pool.scales is None else pool.scales.nbytes
    return SlotBytes(pool.rows.nbytes // slots, scales // slots, pool.conv.nbytes // slots)


class Answer(NamedTuple):
    """One replayed request: what it generated, and what of its prompt came from the cache.

    Tokens are counted as in Eq. 9: those replayed by `wr` are cached ones.
    """

    tokens: tuple[int, ...]
    finish: FinishReason
    reason: str
    prompt_tokens: int
    cached_tokens: int
    replayed_tokens: int

    @property
    def loaded(self) -> bool:
        """Whether it resumed from a checkpoint."""
        return self.reason == "hit" and self.cached_tokens > 0


@dataclass(frozen=True)
class Round:
    """One pass over all instances, in their order; evictions counted while it ran."""

    answers: tuple[Answer, ...]
    evicted_pages: int
    evicted_checkpoints: int

    @property
    def token_hit(self) -> float:
        """Cached over prompt tokens, summed over the requests (Eq. 9)."""
        return token_hit(self.answers)

    @property
    def loaded(self) -> float:
        """Share of requests that resumed from a checkpoint."""
        return _loaded(self.answers)

    @property
    def faults(self) -> tuple[str, ...]:
        """The rules of a strict round that this one breaks, with the numbers."""
        failed = [a.finish for a in self.answers if a.finish not in ("stop", "length")]
        checks = (
            (not self.evicted_pages, f"{self.evicted_pages} pages evicted"),
            (not self.evicted_checkpoints, f"{self.evicted_checkpoints} checkpoints evicted"),
            (self.token_hit > TOKEN_HIT, f"token hit {self.token_hit:.3f}, not above {TOKEN_HIT}"),
            (self.loaded >= LOADED, f"{self.loaded:.3f} of requests loaded, below {LOADED}"),
            (not failed, f"{len(failed)} requests ended with {sorted(set(failed))}"),
        )
        return tuple(text for fine, text in checks if not fine)


@dataclass(frozen=True)
class Replay:
    """An arm's measured rounds over the same instances; warm-up is not among them.

    `slot` and `dense` are the bytes of a checkpoint in the arm's pool and in an exact one.
    """

    arm: Arm
    rounds: tuple[Round, ...]
    slot: SlotBytes
    dense: SlotBytes

    @cached_property
    def answers(self) -> tuple[Answer, ...]:
        """All answers of all rounds."""
        return tuple(answer for one in self.rounds for answer in one.answers)

    @property
    def token_hit(self) -> float:
        """Eq. 9 with the tokens of all rounds pooled."""
        return token_hit(self.answers)

    @property
    def loaded(self) -> float:
        """Share of the requests of all rounds that resumed from a checkpoint."""
        return _loaded(self.answers)

    @property
    def compression(self) -> float:
        """How many of the arm's checkpoints fit where one exact checkpoint does (Eq. 7)."""
        return self.dense.total / self.slot.total

    @property
    def temporal_compression(self) -> float:
        """The same without convolution windows (Eq. 6); infinite where nothing is kept."""
        kept = self.slot.temporal
        return self.dense.temporal / kept if kept else float("inf")

    @property
    def faults(self) -> tuple[str, ...]:
        """Everything that keeps the replay from counting, rounds numbered from 1."""
        found = [
            f"round {number}: {fault}"
            for number, one in enumerate(self.rounds, 1)
            for fault in one.faults
        ]
        if self.loaded < ARM_LOADED:
            found.append(f"{self.loaded:.3f} of all requests loaded, below {ARM_LOADED}")
        return tuple(found)

    @property
    def strict(self) -> bool:
        """Whether the replay may count."""
        return not self.faults

    def instance_scores(
        self, score: Callable[[int, tuple[int, ...]], float]
    ) -> Float64[np.ndarray, "N"]:
        """Mean score of every instance over the rounds: N values, whatever the rounds.

        `score` takes an instance's place and the tokens generated for it.
        """
        return np.array(
            [
                np.mean([score(place, one.answers[place].tokens) for one in self.rounds])
                for place in range(len(self.rounds[0].answers))
            ],
            np.float64,
        )


def token_hit(answers: Sequence[Answer]) -> float:
    """sum of C_i / sum of L_i: cached over prompt tokens of all requests (Eq. 9)."""
    return sum(a.cached_tokens for a in answers) / sum(a.prompt_tokens for a in answers)


def common_loaded(replays: Sequence[Replay]) -> float:
    """Share of (instance, round) pairs that every arm loaded.

    A comparison of these arms is strict if it is at least `COMMON_LOADED`.

    Raises:
        ValueError: replays of different rounds or instances, or none.
    """
    if not replays:
        raise ValueError("no replays to compare")
    loaded = [[answer.loaded for answer in replay.answers] for replay in replays]
    return float(np.mean([all(pair) for pair in zip(*loaded, strict=True)]))


def _loaded(answers: Sequence[Answer]) -> float:
    return sum(a.loaded for a in answers) / len(answers)
