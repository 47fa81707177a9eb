"""Log-probabilities in the two forms of the OpenAI API."""

from collections.abc import Sequence
from typing import Any

from dasc_jax.server.choice import TokenLogprob
from dasc_jax.server.detokenize import REPLACEMENT

LOWEST = -9999.0
"""Stands for a log-probability of minus infinity, which JSON cannot carry."""


def token_text(token: int, tokenizer: Any | None) -> str:
    """A token as text; `token_id:N` where it is no text by itself, or without a tokenizer."""
    text = "" if tokenizer is None else tokenizer.decode([token])
    return f"token_id:{token}" if not text or REPLACEMENT in text else text


def completion_logprobs(
    entries: Sequence[TokenLogprob], count: int, tokenizer: Any | None
) -> dict[str, list[Any]]:
    """The form of `/v1/completions`: each position's `count` likeliest tokens and its own.

    The first token of an echoed prompt has null for both.
    """
    return {
        "tokens": [token_text(entry.token, tokenizer) for entry in entries],
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [_by_text(entry, count, tokenizer) for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOWEST)


def _by_text(entry: TokenLogprob, count: int, tokenizer: Any | None) -> dict[str, float] | None:
    if entry.logprob is None:
        return None
    found: dict[str, float] = {}
    for token, logprob in [*_likeliest(entry, count), (entry.token, entry.logprob)]:
        text = token_text(token, tokenizer)
        taken = text in found and found[text] != max(logprob, LOWEST)
        found[f"token_id:{token}" if taken else text] = max(logprob, LOWEST)
    return found


def chat_logprobs(
    entries: Sequence[TokenLogprob], count: int, tokenizer: Any | None
) -> dict[str, Any]:
    """The form of `/v1/chat/completions`: each position's `count` likeliest tokens."""
    content = []
    for entry in entries:
        assert entry.logprob is not None  # a chat echoes no prompt
        item = _chat_item(entry.token, entry.logprob, tokenizer)
        top = [_chat_item(t, logprob, tokenizer) for t, logprob in _likeliest(entry, count)]
        content.append({**item, "top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_item(token: int, logprob: float, tokenizer: Any | None) -> dict[str, Any]:
    text = token_text(token, tokenizer)
    known = tokenizer is not None and text != f"token_id:{token}"
    encoded = list(text.encode()) if known else None
    return {"token": text, "logprob": max(logprob, LOWEST), "bytes": encoded}


def _likeliest(entry: TokenLogprob, count: int) -> list[tuple[int, float]]:
    return sorted((entry.top or {}).items(), key=lambda item: (-item[1], item[0]))[:count]
