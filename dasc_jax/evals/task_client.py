"""One question to an OpenAI-compatible server, one answer back with its token counts.

Uses httpx2, which the hub client of transformers brings along in any case: unlike urllib it keeps
connections open between requests, and it sends fields that are not OpenAI's as they are.
"""

import hashlib
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import httpx2

Api = Literal["chat", "completions"]


@dataclass(frozen=True)
class Sampling:
    """How tokens are picked; `top_k` 0 keeps the whole vocabulary."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0


SAMPLING = {"kimi": Sampling(1.0), "qwen": Sampling(0.7, 0.8, 20), "greedy": Sampling(0.0)}
"""Appendix C.3 of the DASC paper, for either model. There Qwen also has a presence penalty of 1.5,
which this repository's server does not take and which is therefore not sent."""


@dataclass(frozen=True)
class Reply:
    """An answer. Token counts are the server's `usage`; `reason` is why its cache served what it
    did, where it says so. `error` is set, and the rest empty, where the server refused the request.
    """

    text: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reason: str | None = None
    error: str | None = None


class ServerError(RuntimeError):
    """No server, or one that fails: nothing that another question would change."""


def seed_of(question: str, attempt: int) -> int:
    """The seed of one generation, 0 <= seed < 2^31: the same in every arm and every run."""
    digest = hashlib.sha256(f"{question}/{attempt}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


class Client:
    """A server at `url` (with or without `/v1`). Its methods may be called from many threads.

    Args:
        model: the name to ask for; None takes the first that the server lists.
        connections: most requests at once.
        timeout: seconds to wait for one answer.

    Raises:
        ServerError: no server answers there.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        api: Api = "chat",
        connections: int = 32,
        timeout: float = 3600.0,
        state_policy: str | None = None,
    ) -> None:
        # Servers close connections that idle; one is given up here before that can happen.
        limits = httpx2.Limits(max_connections=connections, keepalive_expiry=2.0)
        waits = httpx2.Timeout(timeout, connect=10.0)
        base = url.rstrip("/").removesuffix("/v1")
        self._http = httpx2.Client(base_url=base, limits=limits, timeout=waits)
        self.api, self.state_policy = api, state_policy
        self.model = model or self._first_model()

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def ask(
        self,
        prompt: str,
        sampling: Sampling,
        seed: int,
        max_tokens: int,
        stop: tuple[str, ...] = (),
    ) -> Reply:
        """The answer to `prompt`; `stop` strings end one of the completions API.

        Raises:
            ServerError: the server is gone, or failed (status 5xx).
        """
        body: dict[str, Any] = {
            "model": self.model,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": seed,
            "max_tokens": max_tokens,
        }
        body |= {"top_k": sampling.top_k} if sampling.top_k else {}
        body |= {"state_policy": self.state_policy} if self.state_policy else {}
        if self.api == "chat":
            body |= {"messages": [{"role": "user", "content": prompt}]}
            return _reply(self._send("POST", "/v1/chat/completions", body))
        body |= {"prompt": prompt, **({"stop": list(stop)} if stop else {})}
        return _reply(self._send("POST", "/v1/completions", body))

    def _first_model(self) -> str:
        answer = self._send("GET", "/v1/models", None)
        models = answer.json().get("data") if answer.is_success else None
        if not models:
            raise ServerError(f"{answer.url} lists no model (status {answer.status_code})")
        return models[0]["id"]

    def _send(self, method: str, path: str, body: Any) -> httpx2.Response:
        try:
            answer = self._http.request(method, path, json=body)
        except httpx2.HTTPError as error:
            where = f"{self._http.base_url}{path}"
            raise ServerError(f"{where}: {type(error).__name__}: {error}") from error
        if answer.is_server_error:
            raise ServerError(f"{answer.url} failed with {answer.status_code}: {answer.text[:500]}")
        return answer


def _reply(answer: httpx2.Response) -> Reply:
    if not answer.is_success:
        return Reply(error=f"{answer.status_code}: {answer.text[:500]}")
    value = answer.json()
    choice, usage = value["choices"][0], value.get("usage") or {}
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    details = usage.get("prompt_tokens_details") or {}
    return Reply(
        text=text or "",
        finish_reason=choice.get("finish_reason") or "",
        prompt_tokens=usage.get("prompt_tokens", 0),
        cached_tokens=details.get("cached_tokens") or 0,
        completion_tokens=usage.get("completion_tokens", 0),
        reason=(choice.get("dasc") or {}).get("reason"),
    )
