"""One arm of a comparison: a way to serve the same prompts, and what came of it against a cold run.

Everything is seen as a client sees it, through HTTP and the `openai` package.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float64

from dasc_jax.engine.request import StatePolicy


@dataclass(frozen=True)
class Arm:
    """A policy at a threshold; `cold` has no prefix cache."""

    policy: StatePolicy
    w_max: int = 0
    quantization: Literal["int8"] | None = None
    cold: bool = False

    @property
    def name(self) -> str:
        """As tables and figures call it."""
        if self.cold:
            return "cold"
        return f"{self.policy} {self.quantization}" if self.quantization else self.policy


class Answer(NamedTuple):
    """One response: `logprobs` has a mapping token text -> log-probability for every token; `ttft`
    is in seconds, from the server's submission of the request to its first token."""

    tokens: tuple[int, ...]
    logprobs: tuple[dict[str, float], ...]
    prompt_tokens: int
    cached_tokens: int
    replayed_tokens: int
    ttft: float


@dataclass(frozen=True)
class Outcome:
    """What an arm cost and how far it was from the cold run.

    `hit_rate` is Eq. 9, cached over prompt tokens of all requests; `ttft` a mean in seconds;
    `equal` the share of generated tokens that are the cold run's, each answer counted up to its
    first other token; `kl` the mean KL divergence in nats of the cold run's next-token
    distributions from this arm's, wherever both continue the same tokens; `replayed` tokens a hit.
    """

    arm: Arm
    checkpoint_bytes: int
    slots: int
    requests: int
    hits: int
    hit_rate: float
    ttft: float
    equal: float
    kl: float
    replayed: float


def ask(client: Any, model: str, prompt: Sequence[int], arm: Arm, reply: int, vocab: int) -> Answer:
    """Complete a prompt greedily by exactly `reply` tokens, with whole distributions."""
    response = client.completions.create(
        model=model,
        prompt=list(prompt),
        max_tokens=reply,
        temperature=0.0,
        logprobs=vocab,
        extra_body={"state_policy": arm.policy, "ignore_eos": True},
    )
    choice, cache = response.choices[0], response.model_extra["dasc"]
    return Answer(
        tuple(choice.model_extra["token_ids"]),
        tuple(choice.logprobs.top_logprobs),
        response.usage.prompt_tokens,
        response.usage.prompt_tokens_details.cached_tokens,
        cache["replayed_tokens"],
        cache["ttft"],
    )


def ask_all(
    prompts: Sequence[Sequence[int]],
    one: Callable[[Sequence[int]], Answer],
    progress: Callable[[], None],
) -> list[Answer]:
    """Answers to prompts one after the other."""
    answers = []
    for prompt in prompts:
        answers.append(one(prompt))
        progress()
    return answers


def outcome(
    arm: Arm, answers: Sequence[Answer], cold: Sequence[Answer], checkpoint_bytes: int, slots: int
) -> Outcome:
    """Compare an arm's answers with those of the cold run to the same prompts."""
    hits = [answer for answer in answers if answer.cached_tokens]
    agreed = [_agreement(a.tokens, c.tokens) for a, c in zip(answers, cold, strict=True)]
    divergences = [
        kl_divergence(c.logprobs[at], a.logprobs[at])
        for a, c, same in zip(answers, cold, agreed, strict=True)
        for at in range(min(same + 1, len(c.tokens)))
    ]
    return Outcome(
        arm,
        checkpoint_bytes,
        slots,
        requests=len(answers),
        hits=len(hits),
        hit_rate=sum(a.cached_tokens for a in answers) / sum(a.prompt_tokens for a in answers),
        ttft=float(np.mean([a.ttft for a in answers])),
        equal=sum(agreed) / sum(len(c.tokens) for c in cold),
        kl=float(np.mean(divergences)),
        replayed=sum(a.replayed_tokens for a in hits) / max(len(hits), 1),
    )


def _agreement(left: Sequence[int], right: Sequence[int]) -> int:
    """Tokens before the first difference."""
    pairs = zip(left, right, strict=True)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), len(left))


def kl_divergence(reference: dict[str, float], other: dict[str, float]) -> float:
    """KL(reference || other) in nats; both must cover the same whole vocabulary.

    Both are normalised anew in float64: float32 log-probabilities sum to 1 only roughly, which
    would show as a small negative divergence.
    """
    if reference.keys() != other.keys():
        raise ValueError("the distributions do not cover the same tokens")
    p = _log_normalised(np.array([reference[key] for key in reference], np.float64))
    q = _log_normalised(np.array([other[key] for key in reference], np.float64))
    return max(float(np.exp(p) @ (p - q)), 0.0)


def _log_normalised(x: Float64[np.ndarray, " vocab"]) -> Float64[np.ndarray, " vocab"]:
    return x - np.logaddexp.reduce(x)
