"""Bodies of responses and chunks of streams, in the form of the OpenAI API with our extensions.

Extensions: `token_ids` and, once it has ended, `dasc` in every choice; `dasc` in the body (of the
first choice) and in the chunk that ends a choice.
"""

import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any

from dasc_jax.engine.request import RequestResult
from dasc_jax.server.choice import Choice, Delta
from dasc_jax.server.logprobs import chat_logprobs, completion_logprobs
from dasc_jax.server.protocol import Call, ServedModel


def encode(value: Any, ascii_only: bool = False) -> str:
    """Compact JSON; text stays as it is unless `ascii_only`."""
    return json.dumps(value, ensure_ascii=ascii_only, allow_nan=False, separators=(",", ":"))


def dasc_object(result: RequestResult) -> dict[str, Any]:
    """What the prefix cache did for a request, and the seconds to its first token."""
    return {**dataclasses.asdict(result.report), "ttft": result.ttft if result.tokens else None}


class ResponseForm:
    """How the response of one call is written: the same head on the body and on every chunk."""

    def __init__(self, call: Call, model: ServedModel) -> None:
        self._call, self._model = call, model
        self._chat = call.kind == "chat"
        self._created = int(time.time())
        self._begun: set[int] = set()

    def body(self, choices: Sequence[Choice], deltas: Sequence[Delta]) -> dict[str, Any]:
        """The whole response: one delta for each choice, holding all of it."""
        written = []
        for index, delta in enumerate(deltas):
            message = {"role": "assistant", "content": delta.text, "refusal": None}
            content = {"message": message} if self._chat else {"text": delta.text}
            written.append(self._choice(index, content, delta))
        kind = "chat.completion" if self._chat else "text_completion"
        extra = {"usage": self.usage(choices), "dasc": written[0]["dasc"]}
        return {**self._head(kind), "choices": written, **extra}

    def chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        """A chunk of a stream with what one choice gained."""
        content: dict[str, Any] = {"text": delta.text}
        if self._chat:
            begin = {} if index in self._begun else {"role": "assistant", "content": ""}
            content = {"delta": {**begin, **({"content": delta.text} if delta.text else {})}}
        self._begun.add(index)
        choice = self._choice(index, content, delta)
        extra: dict[str, Any] = {"usage": None} if self._call.include_usage else {}
        if delta.result is not None:
            extra["dasc"] = choice["dasc"]
        return {**self._head(self._chunk_kind), "choices": [choice], **extra}

    def usage_chunk(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The last chunk where the client asked for usage: no choices."""
        first = choices[0].result
        assert first is not None
        extra = {"usage": self.usage(choices), "dasc": dasc_object(first)}
        return {**self._head(self._chunk_kind), "choices": [], **extra}

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Token counts: a prompt counts once, with the hit of its first choice."""
        results = [choice.result for choice in choices[:: self._call.samples] if choice.result]
        prompt = sum(result.prompt_tokens for result in results)
        completion = sum(choice.generated for choice in choices)
        cached = sum(result.cached_tokens for result in results)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        head = {"id": self._call.id, "object": kind, "created": self._created}
        return {**head, "model": self._model.name}

    def _choice(self, index: int, content: dict[str, Any], delta: Delta) -> dict[str, Any]:
        logprobs, count = None, self._call.top_logprobs
        if count is not None and delta.logprobs:
            write = chat_logprobs if self._chat else completion_logprobs
            logprobs = write(delta.logprobs, count, self._model.tokenizer)
        ended = {} if delta.result is None else {"dasc": dasc_object(delta.result)}
        return {
            "index": index,
            **content,
            "logprobs": logprobs,
            "finish_reason": delta.finish,
            "token_ids": list(delta.tokens),
            **ended,
        }


def joined(deltas: Sequence[Delta]) -> Delta:
    """Successive deltas of one choice as one."""
    return Delta(
        "".join(delta.text for delta in deltas),
        tuple(token for delta in deltas for token in delta.tokens),
        tuple(entry for delta in deltas for entry in delta.logprobs),
        deltas[-1].finish,
        deltas[-1].result,
    )
