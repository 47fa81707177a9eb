"""From a `prompt` or `messages` field to token ids."""

from typing import Any, NamedTuple

import jinja2

from dasc_jax.server.errors import ApiError
from dasc_jax.server.fields import Fields, encodable, is_int, kind, show

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Accepted roles, and the role that the template sees."""

NO_TOKENIZER = (
    "this model was loaded without a tokenizer: send the prompt of /v1/completions as token ids"
)


class Prompt(NamedTuple):
    """One prompt: its tokens, and the text as the client sent it (None for token ids)."""

    tokens: tuple[int, ...]
    text: str | None


def completion_prompts(value: Any, tokenizer: Any, vocab_size: int) -> list[Prompt]:
    """The prompts in the field `prompt`: a string, strings, token ids or lists of token ids.

    Raises:
        ApiError: 400, for another form, an id outside [0, vocab_size), or text without a tokenizer.
    """
    if isinstance(value, str):
        return [_encode(value, tokenizer)]
    if isinstance(value, list) and value:
        if all(is_int(item) for item in value):
            return [_ids(value, "prompt", vocab_size)]
        if all(isinstance(item, str) for item in value):
            return [_encode(item, tokenizer) for item in value]
        if all(isinstance(item, list) for item in value):
            return [_ids(item, f"prompt[{i}]", vocab_size) for i, item in enumerate(value)]
    raise ApiError(
        f"prompt is {show(value)}; it must be a string, an array of strings, an array of token ids,"
        " or an array of such arrays, and not empty",
        param="prompt",
    )


def _encode(text: str, tokenizer: Any) -> Prompt:
    if tokenizer is None:
        raise ApiError(NO_TOKENIZER, param="prompt", code="no_tokenizer")
    if not encodable(text):
        raise ApiError("prompt holds half of a surrogate pair: it is no text", param="prompt")
    return Prompt(tuple(tokenizer.encode(text)), text)


def _ids(ids: list[Any], name: str, vocab_size: int) -> Prompt:
    for position, token in enumerate(ids):
        if not is_int(token) or not 0 <= token < vocab_size:
            raise ApiError(
                f"{name}[{position}] is {show(token)}; token ids are integers in [0, {vocab_size})",
                param="prompt",
            )
    return Prompt(tuple(ids), None)


def chat_prompt(messages: Any, tokenizer: Any) -> Prompt:
    """The chat template over `messages`, up to where the assistant's answer begins.

    Raises:
        ApiError: 400, for malformed messages, no tokenizer, or a template that refuses them.
    """
    if not isinstance(messages, list) or not messages:
        raise ApiError(
            f"messages is {show(messages)}; it must be an array with at least one message",
            param="messages",
        )
    read = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if tokenizer is None:
        raise ApiError(NO_TOKENIZER, param="messages", code="no_tokenizer")
    try:
        ids = tokenizer.apply_chat_template(read, add_generation_prompt=True, tokenize=True)
    except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
        raise ApiError(f"the chat template failed: {error}", param="messages") from error
    if hasattr(ids, "keys"):
        ids = ids["input_ids"]
    if ids and not is_int(ids[0]):
        ids = ids[0]
    return Prompt(tuple(int(token) for token in ids), None)


def _message(message: Any, path: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise ApiError(f"{path} is {kind(message)}; it must be an object", param="messages")
    fields = Fields(message, path)
    fields.neutral("tool_calls", lambda calls: calls == [], "[]")
    fields.refuse_unknown({"role", "content", "name", "tool_calls", "refusal", "annotations"})
    role = fields.choice("role", tuple(ROLES))
    if role is None:
        raise fields.refuse("role", f"one of {', '.join(ROLES)}")
    return {"role": ROLES[role], "content": _content(fields, path)}


def _content(fields: Fields, path: str) -> str:
    content = fields.body.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not parts:
        raise fields.refuse("content", "a string or an array of text parts")
    texts = []
    for i, part in enumerate(parts):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str) or not encodable(text):
            raise ApiError(
                f"{path}.content[{i}] is {show(part)}; only text parts are read",
                param="messages",
            )
        texts.append(text)
    return "\n".join(texts)
