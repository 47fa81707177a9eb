"""A request on its way through the loop, and how its next tokens are laid out for a step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32

from dasc_jax.engine.request import (
    FinishReason,
    OnEvent,
    PromptLogprobs,
    Request,
    SamplingParams,
)
from dasc_jax.engine.residency import Holding
from dasc_jax.engine.scheduler import Piece, Prefilling
from dasc_jax.models.packing import MERGE, SLOT, ZERO, Segment


@dataclass
class Active:
    """An admitted or waiting request.

    `tokens` are its prompt and what was generated; the first `done` of them are in its state and
    pages. Times are seconds of `time.perf_counter`.
    """

    request: Request
    on_event: OnEvent
    submitted: float
    tokens: list[int]
    done: int = 0
    held: Holding | None = None
    first_token: float | None = None
    logprobs: list[tuple[float, dict[int, float]]] = field(default_factory=list)
    prompt_logprobs: list[tuple[float, dict[int, float]]] = field(default_factory=list)

    @property
    def holding(self) -> Holding:
        """What it holds. Legal once admitted."""
        if self.held is None:
            raise ValueError(f"request {self.request.id!r} is not admitted")
        return self.held

    @property
    def generated(self) -> tuple[int, ...]:
        """The tokens sampled so far."""
        return tuple(self.tokens[len(self.request.prompt) :])

    def prompt_scores(self) -> PromptLogprobs | None:
        """What is known of the prompt's tokens; None where nobody asked."""
        wanted = self.request.sampling.prompt_logprobs is not None
        return tuple(self.prompt_logprobs) if wanted else None

    def progress(self) -> Prefilling:
        """What the scheduler sees of it."""
        held = self.holding
        return Prefilling(
            self.request.id, len(self.request.prompt), self.done, held.replay, held.checkpoints
        )

    def ends_with(self, token: int, eos: Sequence[int]) -> FinishReason | None:
        """Whether `token`, just sampled, ends it."""
        sampling = self.request.sampling
        if token in sampling.stop_token_ids or (token in eos and not sampling.ignore_eos):
            return "stop"
        return "length" if len(self.generated) >= sampling.max_tokens else None


class PrefillWork(NamedTuple):
    """The arguments of a prefill step: see `Device.prefill`."""

    segments: list[Segment]
    boundaries: list[tuple[int, int]]
    store_slots: list[int]
    rows: list[int]
    sampling: list[SamplingParams]
    positions: list[int]


def lay_out(
    pieces: Sequence[Piece],
    actives: Mapping[str, Active],
    checkpoint_slot: Callable[[Holding, int], int],
) -> PrefillWork:
    """Segments of the pieces (two for one that replays), their checkpoints, their last tokens."""
    work = PrefillWork([], [], [], [], [], [])
    packed = 0
    for piece in pieces:
        active = actives[piece.id]
        held = active.holding
        tokens = np.asarray(active.tokens[: piece.stop], np.int32)
        if piece.replay:
            start = piece.start - piece.replay
            replayed = tokens[start : piece.start]
            work.segments.append(
                Segment(replayed, start, held.pages, 0, 0, ZERO, writes_pages=False)
            )
        mode = MERGE if piece.replay else SLOT if piece.start else ZERO
        new = tokens[piece.start :]
        work.segments.append(Segment(new, piece.start, held.pages, held.slot, held.slot, mode))
        # Where slots are scarce the deepest boundary matters most.
        for depth in reversed(piece.checkpoints):
            work.boundaries.append((len(work.segments) - 1, depth))
            work.store_slots.append(checkpoint_slot(held, depth))
        packed += piece.replay + len(new)
        work.rows.append(packed - 1)
        work.sampling.append(active.request.sampling)
        work.positions.append(piece.stop)
    return work


def most_likely(logprobs: Float32[np.ndarray, " vocab"], count: int) -> dict[int, float]:
    """The `count` most likely tokens and their log-probabilities, most likely first."""
    count = min(count, len(logprobs))
    best = np.argpartition(-logprobs, count - 1)[:count] if count else np.array([], np.int64)
    return {int(t): float(logprobs[t]) for t in best[np.argsort(-logprobs[best], kind="stable")]}
