"""What goes into the engine and what comes out: plain host values, no arrays of the device."""

from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral
from typing import Literal, NamedTuple

from dasc_jax.engine.config import EngineConfig
from dasc_jax.types import PAGE

StatePolicy = Literal["dense", "nr", "wr"]
FinishReason = Literal["stop", "length", "abort", "error"]

MOST_PROMPT_LOGPROBS = 20
"""Most likely tokens that can be asked for at each position of a prompt: a fixed shape on the
device."""


@dataclass(frozen=True)
class SamplingParams:
    """How to pick tokens.

    `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 keep the whole vocabulary. `seed` fixes the
    random stream of this request whatever else runs beside it. `logprobs` asks for the
    log-probabilities of that many most likely tokens at every generated position,
    `prompt_logprobs` for the same at every prompt position but the first. A request that asks for
    those runs cold: cached positions have no logits.

    Raises:
        ValueError: a value outside its range, with the value and the range.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        checks = (
            ("max_tokens", self.max_tokens, self.max_tokens >= 1, ">= 1"),
            ("temperature", self.temperature, 0.0 <= self.temperature <= 100.0, "in [0, 100]"),
            ("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("top_k", self.top_k, 0 <= self.top_k < 2**31, "in [0, 2**31) (0 keeps every token)"),
            ("seed", self.seed, 0 <= self.seed < 2**63, "in [0, 2**63)"),
            ("logprobs", self.logprobs, self.logprobs is None or self.logprobs >= 0, ">= 0"),
            (
                "prompt_logprobs",
                self.prompt_logprobs,
                self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MOST_PROMPT_LOGPROBS,
                f"in [0, {MOST_PROMPT_LOGPROBS}]",
            ),
        )
        for name, value, fine, bound in checks:
            if not fine:
                raise ValueError(f"{name} is {value}; it must be {bound}")
        for name in ("max_tokens", "top_k", "seed"):
            if not isinstance(getattr(self, name), Integral):
                raise ValueError(f"{name} is {getattr(self, name)}; it must be an integer")


@dataclass(frozen=True)
class Request:
    """One prompt to continue. `namespace` (a salt) separates prefixes that must not be shared."""

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    state_policy: StatePolicy | None = None
    namespace: str = ""


@dataclass(frozen=True)
class CacheReport:
    """What the prefix cache did for one request: the `dasc` object of a response.

    Depths and replayed tokens count tokens; units count over all recurrent layers. `lineage` is the
    number of lossy loads behind the state the request ran from, its own included (0: exact).
    """

    policy: StatePolicy
    reason: str
    hit_depth: int = 0
    kv_depth: int = 0
    lineage: int = 0
    units_loaded: int = 0
    units_zeroed: int = 0
    units_refreshed: int = 0
    replayed_tokens: int = 0


PromptLogprobs = tuple[tuple[float, dict[int, float]], ...]
"""Entry i is about prompt token i + 1: its log-probability given all before it, and {token id:
log-probability} of the most likely ones there, most likely first."""


@dataclass(frozen=True)
class RequestResult:
    """A finished request.

    `ttft` and `latency` are seconds from `submit`; `error` is set with finish reason "error".
    `logprobs[i]` is (log-probability of `tokens[i]`, {token id: log-probability} of the most likely
    ones), kept only when the request asked for it; so are `prompt_logprobs`.
    """

    id: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    report: CacheReport
    ttft: float
    latency: float
    logprobs: tuple[tuple[float, dict[int, float]], ...] | None = None
    error: str | None = None
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def reason(self) -> str:
        """Why the prefix cache served what it did: `report.reason`."""
        return self.report.reason


class TokenEvent(NamedTuple):
    """One generated token, the last with the result; `token` is None if a request ends without.

    `prompt_logprobs` come with the first token of a request that asked for them.
    """

    id: str
    token: int | None
    logprob: float | None
    top_logprobs: dict[int, float] | None
    result: RequestResult | None
    prompt_logprobs: PromptLogprobs | None = None


OnEvent = Callable[[TokenEvent], None]


def check_request(request: Request, config: EngineConfig, vocabulary: int) -> None:
    """Refuse what an engine of these sizes can never run.

    Raises:
        ValueError: a prompt that is empty, past the context or outside the vocabulary, an unknown
            state policy, or a pool too small for the request.
    """
    prompt = request.prompt
    total, limit = len(prompt) + request.sampling.max_tokens, config.max_context
    if not prompt:
        raise ValueError("the prompt is empty; it must have at least 1 token")
    kinds = {type(token) for token in prompt}
    if not all(issubclass(kind, Integral) for kind in kinds):
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(f"the prompt holds {names}; token ids are integers")
    if min(prompt) < 0 or max(prompt) >= vocabulary:
        bad = next(t for t in prompt if not 0 <= t < vocabulary)
        raise ValueError(f"token id {bad} is outside the vocabulary of {vocabulary}")
    if total > limit:
        raise ValueError(
            f"{len(prompt)} prompt tokens and max_tokens {request.sampling.max_tokens}"
            f" make {total}; the context is {limit}"
        )
    need, have = -(-total // PAGE), config.num_pages - 1
    if need > have:
        raise ValueError(f"the request needs {need} attention pages; the pool has {have}")
    if request.state_policy not in (None, "dense", "nr", "wr"):
        raise ValueError(f"state_policy {request.state_policy!r}: expected 'dense', 'nr' or 'wr'")
    request.namespace.encode()  # half of a surrogate pair: UnicodeError, a ValueError
