"""From a JSON body to requests of the engine: every field read, checked, or refused by name."""

import secrets
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from dasc_jax.engine.request import (
    MOST_PROMPT_LOGPROBS,
    Request,
    SamplingParams,
    StatePolicy,
)
from dasc_jax.server.errors import ApiError
from dasc_jax.server.fields import Fields, encodable, is_int
from dasc_jax.server.prompts import Prompt, chat_prompt, completion_prompts

MOST_CHOICES = 128
MOST_STOPS = 16
COMPLETION_TOKENS = 16
CHAT_TOKENS = 4096
"""Output tokens where the client names no number: `/v1/completions`, and at most for chat."""

HARMLESS = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention"
    " parallel_tool_calls".split()
)
"""Fields of the OpenAI API that do not change the output; read by nobody."""

COMMON = frozenset(
    "model n max_tokens temperature top_p top_k seed stop stream stream_options logprobs ignore_eos"
    " stop_token_ids state_policy cache_salt presence_penalty frequency_penalty repetition_penalty"
    " logit_bias tools tool_choice functions response_format modalities".split()
)
COMPLETION_FIELDS = COMMON | HARMLESS | {"prompt", "echo", "best_of", "suffix"}
CHAT_FIELDS = COMMON | HARMLESS | {"messages", "max_completion_tokens", "top_logprobs"}


@dataclass(frozen=True)
class ServedModel:
    """What checks need of the model: `max_context` counts prompt and output together."""

    name: str
    vocab_size: int
    max_context: int
    stop_ids: frozenset[int]
    tokenizer: Any | None


@dataclass(frozen=True)
class Call:
    """One HTTP call: a request per choice, prompt-major, and how to answer.

    `echoes` holds the text to put before each choice; `top_logprobs` is None without logprobs, of
    the prompt as well where it is echoed. The engine generates at least one token: with
    `prompt_only` (max_tokens 0) the response leaves it out.
    """

    kind: Literal["completion", "chat"]
    id: str
    requests: tuple[Request, ...]
    samples: int
    stops: tuple[str, ...] = ()
    echoes: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    top_logprobs: int | None = None
    prompt_only: bool = False


def parse_completion(body: dict[str, Any], model: ServedModel) -> Call:
    """A call of `/v1/completions`.

    Raises:
        ApiError: 400 naming field, value and bound; 404 for another model.
    """
    fields = Fields(body)
    _check_common(fields, model, COMPLETION_FIELDS)
    samples = _samples(fields)
    fields.neutral("best_of", lambda best: is_int(best) and best == samples, f"n ({samples})")
    fields.neutral("suffix", lambda suffix: suffix == "", '""')
    top = fields.integer("logprobs", None, 0, model.vocab_size)
    echo = fields.boolean("echo")
    if echo and (top or 0) > MOST_PROMPT_LOGPROBS:
        raise fields.refuse("logprobs", f"at most {MOST_PROMPT_LOGPROBS} together with echo")
    prompts = completion_prompts(fields.body.get("prompt"), model.tokenizer, model.vocab_size)
    if echo and model.tokenizer is None:
        raise ApiError("echo needs a tokenizer, which this model lacks", param="echo")
    echoes = tuple(_echo(prompt, model) for prompt in prompts for _ in range(samples) if echo)
    limit = fields.integer("max_tokens", None, 0 if echo else 1, model.max_context)
    call = _call("completion", fields, model, prompts, (limit, COMPLETION_TOKENS), top, echoes)
    return replace(call, prompt_only=limit == 0)


def parse_chat(body: dict[str, Any], model: ServedModel) -> Call:
    """A call of `/v1/chat/completions`.

    Raises:
        ApiError: 400 naming field, value and bound; 404 for another model.
    """
    fields = Fields(body)
    _check_common(fields, model, CHAT_FIELDS)
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", None, 0, model.vocab_size)
    if top is not None and not wanted:
        raise ApiError("top_logprobs needs logprobs: true", param="top_logprobs")
    limits = [
        fields.integer(name, None, 1, model.max_context)
        for name in ("max_completion_tokens", "max_tokens")
    ]
    limit = limits[1] if limits[0] is None else limits[0]
    prompt = chat_prompt(fields.body.get("messages"), model.tokenizer)
    return _call(
        "chat", fields, model, [prompt], (limit, CHAT_TOKENS), (top or 0) if wanted else None
    )


def _check_common(fields: Fields, model: ServedModel, known: frozenset[str]) -> None:
    name = fields.string("model", model.name, 1000)
    if name != model.name:
        raise ApiError(
            f"the model {name!r} does not exist; this server has {model.name!r}",
            status=404,
            param="model",
            code="model_not_found",
        )
    for penalty in ("presence_penalty", "frequency_penalty"):
        fields.neutral(penalty, lambda value: value == 0, "0")
    fields.neutral("repetition_penalty", lambda value: value == 1, "1")
    fields.neutral("logit_bias", lambda value: value == {}, "{}")
    for tools in ("tools", "functions"):
        fields.neutral(tools, lambda value: value == [], "[]")
    fields.neutral("tool_choice", lambda value: value in ("none", "auto"), '"none"')
    fields.neutral("response_format", lambda value: value == {"type": "text"}, '{"type": "text"}')
    fields.neutral("modalities", lambda value: value == ["text"], '["text"]')
    fields.refuse_unknown(known)


def _samples(fields: Fields) -> int:
    samples = fields.integer("n", 1, 1, MOST_CHOICES)
    assert samples is not None
    return samples


def _echo(prompt: Prompt, model: ServedModel) -> str:
    if prompt.text is not None or model.tokenizer is None:
        return prompt.text or ""
    return model.tokenizer.decode(list(prompt.tokens))


def _call(
    form: Literal["completion", "chat"],
    fields: Fields,
    model: ServedModel,
    prompts: list[Prompt],
    limits: tuple[int | None, int],
    top_logprobs: int | None,
    echoes: tuple[str, ...] = (),
) -> Call:
    samples = _samples(fields)
    if len(prompts) * samples > MOST_CHOICES:
        raise ApiError(
            f"{len(prompts)} prompts with n={samples} make {len(prompts) * samples} choices;"
            f" at most {MOST_CHOICES} are answered in one call",
            param="n",
        )
    lengths = [_output_limit(len(prompt.tokens), limits, model.max_context) for prompt in prompts]
    seed = fields.integer("seed", secrets.randbits(62), 0, 2**63 - 1 - MOST_CHOICES)
    policy = fields.choice("state_policy", get_args(StatePolicy))
    namespace = fields.string("cache_salt", "", 256)
    call_id = f"{'cmpl' if form == 'completion' else 'chatcmpl'}-{secrets.token_hex(16)}"
    requests = []
    for prompt, length in zip(prompts, lengths, strict=True):
        for sample in range(samples):
            sampling = _sampling(fields, model, max(length, 1), (seed or 0) + sample, top_logprobs)
            if echoes:
                sampling = replace(sampling, prompt_logprobs=top_logprobs)
            name = f"{call_id}-{len(requests)}"
            requests.append(Request(name, prompt.tokens, sampling, policy, namespace))  # type: ignore[arg-type]
    stream = fields.boolean("stream")
    return Call(
        kind=form,
        id=call_id,
        requests=tuple(requests),
        samples=samples,
        stops=_stops(fields, model),
        echoes=echoes,
        stream=stream,
        include_usage=_include_usage(fields, stream),
        top_logprobs=top_logprobs,
    )


def _output_limit(prompt: int, limits: tuple[int | None, int], context: int) -> int:
    """Tokens a request may generate; refuses what the context cannot hold."""
    if prompt == 0:
        raise ApiError("the prompt has no tokens", param="prompt")
    wanted, default = limits
    if prompt >= context or (wanted is not None and prompt + wanted > context):
        asked = "" if wanted is None else f" and max_tokens asks for {wanted} more"
        raise ApiError(
            f"the prompt has {prompt} tokens{asked}; the context of this server holds {context}"
            " tokens, prompt and output together",
            param="prompt" if prompt >= context else "max_tokens",
            code="context_length_exceeded",
        )
    return min(context - prompt, default) if wanted is None else wanted


def _sampling(
    fields: Fields, model: ServedModel, max_tokens: int, seed: int, logprobs: int | None
) -> SamplingParams:
    ids = fields.body.get("stop_token_ids", [])
    fine = isinstance(ids, list) and all(is_int(i) and 0 <= i < model.vocab_size for i in ids)
    if not fine:
        raise fields.refuse("stop_token_ids", f"an array of token ids in [0, {model.vocab_size})")
    top_k = fields.integer("top_k", 0, -1, 2**31 - 1) or 0
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=fields.number("temperature", 1.0),
            top_p=fields.number("top_p", 1.0),
            top_k=max(top_k, 0),
            seed=seed,
            stop_token_ids=tuple(ids),
            ignore_eos=fields.boolean("ignore_eos"),
            logprobs=logprobs,
        )
    except ValueError as error:
        raise ApiError(str(error), param=str(error).split(" ", 1)[0]) from None


def _stops(fields: Fields, model: ServedModel) -> tuple[str, ...]:
    value = fields.body.get("stop", [])
    stops = [value] if isinstance(value, str) else value
    fine = isinstance(stops, list) and all(isinstance(s, str) and s and encodable(s) for s in stops)
    if not fine or len(stops) > MOST_STOPS:
        raise fields.refuse("stop", f"a string or an array of at most {MOST_STOPS}, none empty")
    if stops and model.tokenizer is None:
        raise ApiError("stop strings need a tokenizer; use stop_token_ids", param="stop")
    return tuple(stops)


def _include_usage(fields: Fields, stream: bool) -> bool:
    options = fields.body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict) or not stream:
        raise fields.refuse("stream_options", "an object, and only where stream is true")
    inner = Fields(options, "stream_options")
    inner.refuse_unknown({"include_usage", "include_obfuscation"})
    return inner.boolean("include_usage")
