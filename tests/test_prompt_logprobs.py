"""Log-probabilities of the prompt: those of the model, however the prompt was cut or cached."""

from collections.abc import Iterator

import jax
import numpy as np
import openai
import pytest

from dasc_jax.engine.engine import Engine
from dasc_jax.engine.request import MOST_PROMPT_LOGPROBS, Request, RequestResult, SamplingParams
from dasc_jax.model import forward
from dasc_jax.prefix_cache import check
from tests.engines import prompt
from tests.test_server_engine import served
from tests.tiny import tiny_engine, tiny_model

LENGTHS = (1, 2, 64, 65, 128, 200, 301)


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Prompts past 128 tokens are cut."""
    return tiny_engine(max_context=512, prefill_tokens=128)


@pytest.fixture(scope="module")
def ai(engine: Engine) -> Iterator[openai.OpenAI]:
    with served(engine) as (client, _):
        yield client


def asked(key: str, tokens, count: int = 3) -> Request:
    return Request(key, tuple(tokens), SamplingParams(1, prompt_logprobs=count))


def expected(tokens) -> np.ndarray:
    """Log-probabilities `[T - 1, vocab]` of what follows on each token but the last."""
    # One width, so that one program computes them all.
    padded = np.zeros((1, 384), np.int32)
    padded[0, : len(tokens)] = tokens
    logits, _ = forward(tiny_model(), padded, lengths=np.array([len(tokens)]))
    return np.asarray(jax.nn.log_softmax(logits[0, : len(tokens) - 1]))


def assert_those_of_the_model(result: RequestResult, tokens, count: int = 3) -> None:
    known = expected(tokens)
    found = result.prompt_logprobs
    assert found is not None and len(found) == len(tokens) - 1
    for row, token, (chosen, top) in zip(known, tokens[1:], found, strict=True):
        assert chosen == pytest.approx(row[token], abs=1e-5)
        assert list(top.values()) == pytest.approx(np.sort(row)[::-1][:count].tolist(), abs=1e-5)
        assert [row[t] for t in top] == pytest.approx(list(top.values()), abs=1e-5)
        if token in top:
            assert chosen == top[token]


def test_they_equal_the_whole_forward_at_every_length_and_together(engine):
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    requests = [asked(f"p{len(tokens)}", tokens) for tokens in prompts]
    for result, tokens in zip(engine.generate(requests), prompts, strict=True):
        assert_those_of_the_model(result, tokens)
    assert engine.stats()["compiled_after_warmup"] == 0


def test_likely_tokens_are_first_and_are_as_likely_as_themselves(engine):
    start = prompt(5)
    (answer,) = engine.generate([Request("a", start, SamplingParams(80, ignore_eos=True))])
    (result,) = engine.generate([asked("greedy", (*start, *answer.tokens), 1)])
    found = zip(answer.tokens, result.prompt_logprobs[4:], strict=True)
    assert all(top == {token: chosen} for token, (chosen, top) in found)


def test_a_scored_prompt_runs_cold_and_serves_later_ones(engine):
    assert engine.flush_cache()
    tokens = prompt(200)
    (cold,) = engine.generate([asked("first", tokens)])
    (again,) = engine.generate([asked("again", tokens)])
    assert again.prompt_logprobs == cold.prompt_logprobs
    assert (again.cached_tokens, again.reason) == (0, "prompt_logprobs")
    (later,) = engine.generate([Request("later", tokens, SamplingParams(1))])
    assert (later.cached_tokens, later.prompt_logprobs) == (192, None)
    (after,) = engine.generate([asked("after", tokens)])
    assert after.prompt_logprobs == cold.prompt_logprobs
    check(engine.loop.residency.cache)
    assert engine.loop.residency.cache.counts.idle


def test_they_come_once_with_the_first_token(engine):
    events = []
    sampling = SamplingParams(3, prompt_logprobs=2, ignore_eos=True)
    engine.submit(Request("events", prompt(150), sampling), events.append)
    while not events or events[-1].result is None:
        engine._step_here()
    assert [event.prompt_logprobs is None for event in events] == [False, True, True]
    assert events[-1].result.prompt_logprobs == events[0].prompt_logprobs


@pytest.mark.parametrize("count", [-1, MOST_PROMPT_LOGPROBS + 1])
def test_a_count_outside_its_range_is_refused(count):
    with pytest.raises(ValueError, match=f"prompt_logprobs is {count}; it must be in \\[0, 20\\]"):
        SamplingParams(prompt_logprobs=count)


ECHO = {"model": "tiny", "temperature": 0.0, "echo": True, "logprobs": 2}


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_returns_prompt_and_answer_in_one_form(ai, max_tokens):
    prompts = [list(prompt(length, 7)) for length in (1, 90, 200)]
    response = ai.completions.create(prompt=prompts, max_tokens=max_tokens, **ECHO)
    tokenizer = tiny_model().tokenizer
    assert response.usage.completion_tokens == max_tokens * len(prompts)
    for tokens, choice in zip(prompts, response.choices, strict=True):
        generated = choice.model_extra["token_ids"]
        assert len(generated) == max_tokens and choice.finish_reason == "length"
        scores, every = choice.logprobs, [*tokens, *generated]
        assert scores.token_logprobs[0] is scores.top_logprobs[0] is None
        wanted = [row[t] for row, t in zip(expected(every), every[1:], strict=True)]
        assert scores.token_logprobs[1:] == pytest.approx(wanted, abs=1e-5)
        assert all(2 <= len(top) <= 3 for top in scores.top_logprobs[1:])
        sizes = {len(x) for x in (scores.tokens, scores.text_offset, scores.top_logprobs)}
        assert sizes == {len(every)}
        assert choice.text == tokenizer.decode(every)
        if generated:
            assert scores.text_offset[-1] == len(tokenizer.decode(tokens))


def test_offsets_point_at_the_text_of_each_token(ai):
    text = "Naïve ☂ <|im_start|>x"
    (choice,) = ai.completions.create(prompt=text, max_tokens=0, **ECHO).choices
    assert choice.text == text
    scores = choice.logprobs
    places = zip(scores.tokens, scores.text_offset, strict=True)
    assert all(
        choice.text[at:].startswith(token) for token, at in places if "token_id" not in token
    )
    assert scores.text_offset == sorted(scores.text_offset)


def test_a_stream_begins_with_the_echoed_prompt_and_its_logprobs(ai):
    options = {**ECHO, "prompt": "Once upon a time", "max_tokens": 4}
    (whole,) = ai.completions.create(**options).choices
    parts = [chunk.choices[0] for chunk in ai.completions.create(stream=True, **options)]
    assert parts[0].text.startswith("Once upon a time")
    assert "".join(part.text for part in parts) == whole.text
    for field in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        joined = [x for part in parts if part.logprobs for x in getattr(part.logprobs, field)]
        assert joined == getattr(whole.logprobs, field)


def test_echo_alone_may_ask_for_no_token_and_still_uses_the_cache(ai):
    options = {"model": "tiny", "prompt": "x" * 100, "echo": True, "max_tokens": 0}
    for cached in (0, 64):
        response = ai.completions.create(**options)
        assert response.choices[0].text == "x" * 100
        assert response.choices[0].logprobs is None
        assert response.usage.prompt_tokens_details.cached_tokens == cached
