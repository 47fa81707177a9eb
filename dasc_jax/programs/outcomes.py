"""What came of the same questions under one policy, as a client of the server sees it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dasc_jax.evals.arms import Arm
from dasc_jax.programs.documents import Question


class Answer(NamedTuple):
    """One response: `ttft` is in seconds, from the server's submission of the request to its first
    token; token counts are the prompt's."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    replayed_tokens: int
    ttft: float


@dataclass(frozen=True)
class Outcome:
    """Answers under an arm (None: nothing cached), in the order of the questions.

    `slot` and `dense` are bytes of a checkpoint in the arm's pool and of an exact one.
    """

    arm: Arm | None
    questions: tuple[Question, ...]
    answers: tuple[Answer, ...]
    slot: int
    dense: int

    @property
    def name(self) -> str:
        """As tables and figures call it."""
        return self.arm.name if self.arm else "cold"

    @property
    def right(self) -> tuple[bool, ...]:
        """Which answers are the expected ones, word for word."""
        pairs = zip(self.questions, self.answers, strict=True)
        return tuple(answer.text == question.answer for question, answer in pairs)

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(answer.prompt_tokens for answer in self.answers)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the cache; over all of them, the token hit rate of Eq. 9."""
        return sum(answer.cached_tokens for answer in self.answers)

    @property
    def replayed(self) -> float:
        """Mean tokens computed again a request, to refresh what checkpoints omit."""
        return float(np.mean([answer.replayed_tokens for answer in self.answers]))

    @property
    def ttft(self) -> float:
        """Median, in seconds: other work on the machine moves it less than a mean."""
        return float(np.median([answer.ttft for answer in self.answers]))

    @property
    def compression(self) -> float:
        """Complete checkpoints that fit where one exact one does (Eq. 7)."""
        return self.dense / self.slot


def ask(client: Any, model: str, prompt: str, max_tokens: int) -> Answer:
    """Continue a prompt greedily, through the `openai` package."""
    response = client.completions.create(
        model=model, prompt=prompt, max_tokens=max_tokens, temperature=0.0
    )
    cache = response.model_extra["dasc"]
    return Answer(
        response.choices[0].text.strip(),
        response.usage.prompt_tokens,
        response.usage.prompt_tokens_details.cached_tokens,
        cache["replayed_tokens"],
        cache["ttft"],
    )


def wrong(outcomes: Sequence[Outcome], place: int) -> dict[str, str]:
    """What the arms that answered a question wrongly said, by name; `place` counts from 0."""
    return {one.name: one.answers[place].text for one in outcomes if not one.right[place]}
