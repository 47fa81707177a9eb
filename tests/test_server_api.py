"""Completions and chat as the OpenAI client sees them, over a real socket."""

import contextlib
import json

import openai
import pytest

from tests.fake_engine import (
    EOS,
    FakeEngine,
    byte_tokenizer,
    client,
    counts,
    says,
    serving,
    wait_until,
)

PROMPT = "x" * 100
EXTENSIONS = {"policy", "reason", "hit_depth", "kv_depth", "lineage", "units_loaded"} | {
    "units_zeroed",
    "units_refreshed",
    "replayed_tokens",
}


@pytest.fixture
def api():
    """Start a server over an engine with the given script; an OpenAI client of it."""
    with contextlib.ExitStack() as stack:

        def start(script=counts, **options):
            engine = FakeEngine(script, **{"tokenizer": byte_tokenizer(), **options})
            url = stack.enter_context(serving(engine))
            http = stack.enter_context(client(url))
            options = {"api_key": "none", "max_retries": 0, "http_client": http}
            ai = openai.OpenAI(base_url=f"{url}/v1", **options)
            return engine, ai, http

        yield start


def test_a_completion_has_text_usage_and_what_the_cache_did(api):
    _, ai, _ = api(says("héllo €"))
    first = ai.completions.create(model="tiny", prompt=PROMPT)
    again = ai.completions.create(model="tiny", prompt=PROMPT, extra_body={"state_policy": "wr"})
    for response in (first, again):
        assert response.object == "text_completion"
        assert response.choices[0].text == "héllo €"
        assert response.choices[0].finish_reason == "stop"
        assert response.choices[0].model_extra["token_ids"] == [*"héllo €".encode(), EOS]
        assert response.usage.prompt_tokens == 100
        assert response.usage.completion_tokens == len("héllo €".encode()) + 1
        assert response.usage.total_tokens == 100 + response.usage.completion_tokens
        assert set(response.model_extra["dasc"]) >= EXTENSIONS
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert first.model_extra["dasc"]["reason"] == "no_kv"
    assert again.usage.prompt_tokens_details.cached_tokens == 64
    dasc = again.model_extra["dasc"]
    assert (dasc["policy"], dasc["reason"], dasc["hit_depth"]) == ("wr", "hit", 64)
    assert (dasc["units_loaded"], dasc["units_zeroed"], dasc["replayed_tokens"]) == (3, 5, 16)


def test_a_streamed_completion_equals_the_whole_one(api):
    _, ai, _ = api(says("a😀b"))
    whole = ai.completions.create(model="tiny", prompt=PROMPT)
    chunks = list(
        ai.completions.create(
            model="tiny", prompt=PROMPT, stream=True, stream_options={"include_usage": True}
        )
    )
    texts = [chunk.choices[0].text for chunk in chunks[:-1]]
    assert texts == ["a", "😀", "b", ""]
    assert "".join(texts) == whole.choices[0].text
    ids = [token for chunk in chunks[:-1] for token in chunk.choices[0].model_extra["token_ids"]]
    assert ids == whole.choices[0].model_extra["token_ids"]
    reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert reasons == [None, None, None, "stop"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 64
    assert chunks[-1].model_extra["dasc"]["reason"] == "hit"
    assert chunks[-2].model_extra["dasc"]["reason"] == "hit"
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat_renders_the_template_and_answers(api):
    engine, ai, _ = api(says("Hello!"))
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    response = ai.chat.completions.create(model="tiny", messages=messages)
    prompt = "<|start|>system\nBe brief.<|end|><|start|>user\none\ntwo<|end|><|start|>assistant\n"
    assert engine.model.tokenizer.decode(engine.requests[0].prompt) == prompt
    assert response.object == "chat.completion"
    assert response.choices[0].message.role == "assistant"
    assert response.choices[0].message.content == "Hello!"
    assert response.choices[0].finish_reason == "stop"
    assert response.usage.prompt_tokens == len(engine.requests[0].prompt)
    assert response.usage.prompt_tokens_details.cached_tokens == 0
    assert response.model_extra["dasc"]["reason"] == "no_kv"


def test_streamed_chat_begins_with_the_role_and_ends_with_the_reason(api):
    _, ai, _ = api(says("Hi €"))
    chunks = list(
        ai.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "y" * 80}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hi €"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-2].model_extra["dasc"]["policy"] == "nr"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 7


def test_a_stream_is_server_sent_events_that_end_with_done(api):
    _, _, http = api(says("ab"))
    with http.stream("POST", "/v1/completions", json={"prompt": "p", "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = response.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b", ""]
    assert all("usage" not in chunk for chunk in chunks)


def test_several_prompts_and_samples_are_indexed_prompt_by_prompt(api):
    engine, ai, _ = api(counts)
    options = {"model": "tiny", "max_tokens": 5, "seed": 11, "temperature": 1.0}
    both = ai.completions.create(prompt=["one", "two two"], n=2, **options)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert [request.sampling.seed for request in engine.requests] == [11, 12, 11, 12]
    alone = [ai.completions.create(prompt=p, n=2, **options) for p in ("one", "two two")]
    texts = [choice.text for response in alone for choice in response.choices]
    assert [choice.text for choice in both.choices] == texts
    assert both.usage.prompt_tokens == 3 + 7
    assert both.usage.completion_tokens == 20
    streamed = dict.fromkeys(range(4), "")
    for chunk in ai.completions.create(prompt=["one", "two two"], n=2, stream=True, **options):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert list(streamed.values()) == texts


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_tokens_cuts_the_text_and_frees_the_engine(api, stream):
    engine, ai, _ = api(says("one STOP two" + "." * 400), step=0.002)
    options = {"model": "tiny", "prompt": "p", "stop": ["nothing", "STOP"], "max_tokens": 400}
    if stream:
        chunks = list(ai.completions.create(stream=True, **options))
        text = "".join(chunk.choices[0].text for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        response = ai.completions.create(**options)
        text, reason = response.choices[0].text, response.choices[0].finish_reason
        assert response.usage.completion_tokens == len("one STOP")
        assert len(response.choices[0].model_extra["token_ids"]) == len("one STOP")
    assert (text, reason) == ("one ", "stop")
    assert engine.aborted == [engine.requests[0].id]
    assert engine.deliveries[engine.requests[0].id] < 100


def test_what_a_stop_string_held_back_is_shown_when_it_does_not_come(api):
    _, ai, _ = api(says("wait for ST"))
    response = ai.completions.create(model="tiny", prompt="p", stop="STOP", max_tokens=50)
    assert response.choices[0].text == "wait for ST"


def test_a_stop_token_ends_the_text_and_ignore_eos_does_not(api):
    _, ai, _ = api(says("ab"))
    stopped = ai.completions.create(
        model="tiny", prompt="p", extra_body={"stop_token_ids": [ord("b")]}
    )
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("a", "stop")
    assert stopped.choices[0].model_extra["token_ids"] == [97, 98]
    on = ai.completions.create(
        model="tiny", prompt="p", max_tokens=6, extra_body={"ignore_eos": True}
    )
    assert (on.choices[0].text, on.choices[0].finish_reason) == ("ab", "length")
    assert on.usage.completion_tokens == 6


def test_echo_puts_the_prompt_first(api):
    _, ai, _ = api(says(" world"))
    for prompt in ("hello", list(b"hello")):
        response = ai.completions.create(model="tiny", prompt=prompt, echo=True, stop="hello")
        assert response.choices[0].text == "hello world"
        chunks = ai.completions.create(model="tiny", prompt=prompt, echo=True, stream=True)
        texts = [chunk.choices[0].text for chunk in chunks]
        assert texts[0] == "hello " and "".join(texts) == "hello world"


def test_completion_logprobs_align_with_the_text(api):
    _, ai, _ = api(says("a€"))
    logprobs = ai.completions.create(model="tiny", prompt="p", logprobs=2).choices[0].logprobs
    assert logprobs.tokens == ["a", "token_id:226", "token_id:130", "token_id:172", "<|end|>"]
    assert logprobs.token_logprobs == [-0.5, -0.5, -0.5, -0.5, -9999.0]
    assert logprobs.text_offset == [0, 1, 1, 1, 2]
    assert logprobs.top_logprobs[0] == {"\x00": -97.5, "\x01": -96.5, "a": -0.5}


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_list_the_likeliest_first(api, stream):
    _, ai, _ = api(says("ab"))
    options = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    options |= {"logprobs": True, "top_logprobs": 2}
    if stream:
        chunks = ai.chat.completions.create(stream=True, **options)
        parts = [chunk.choices[0].logprobs for chunk in chunks]
        content = [item for part in parts if part for item in part.content]
    else:
        content = ai.chat.completions.create(**options).choices[0].logprobs.content
    assert [item.token for item in content] == ["a", "b", "<|end|>"]
    assert content[0].bytes == [97]
    assert [top.token for top in content[0].top_logprobs] == ["\x01", "\x00"]


def test_sampling_reaches_the_engine_with_the_defaults_of_the_api(api):
    engine, ai, _ = api(says("a"))
    ai.completions.create(model="tiny", prompt="p")
    ai.completions.create(
        model="tiny",
        prompt="p",
        max_tokens=7,
        temperature=0,
        top_p=0.5,
        seed=3,
        extra_body={"top_k": 4, "cache_salt": "me", "state_policy": "dense"},
    )
    ai.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
    default, given, chat = engine.requests
    assert (default.sampling.max_tokens, default.sampling.temperature) == (16, 1.0)
    assert (default.state_policy, default.namespace) == (None, "")
    sampling = given.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (7, 0.0, 0.5)
    assert (sampling.top_k, sampling.seed) == (4, 3)
    assert (given.state_policy, given.namespace) == ("dense", "me")
    assert chat.sampling.max_tokens == 512 - len(chat.prompt)


def test_a_salt_separates_cached_prefixes(api):
    _, ai, _ = api(says("a"))
    cached = []
    for salt in ("a", "a", "b"):
        response = ai.completions.create(
            model="tiny", prompt=PROMPT, extra_body={"cache_salt": salt}
        )
        cached.append(response.usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, 64, 0]


@pytest.mark.parametrize("stream", [False, True])
def test_without_a_tokenizer_token_ids_still_work(api, stream):
    _, ai, _ = api(counts, tokenizer=None)
    options = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4}
    expected = [39, 40, 41, 42]
    if stream:
        chunks = list(ai.completions.create(stream=True, seed=0, **options))
        ids = [chunk.choices[0].model_extra["token_ids"] for chunk in chunks]
        assert ids == [[token] for token in expected]
    else:
        choice = ai.completions.create(seed=0, **options).choices[0]
        assert (choice.text, choice.model_extra["token_ids"]) == ("", expected)


def test_models_lists_the_one_it_serves(api):
    _, ai, _ = api()
    assert [model.id for model in ai.models.list()] == ["tiny"]
    assert ai.models.retrieve("tiny").model_extra["max_model_len"] == 512
    with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
        ai.models.retrieve("other")


def test_flush_is_refused_while_requests_run(api):
    engine, ai, http = api(counts, step=0.01)
    stream = ai.completions.create(model="tiny", prompt=PROMPT, max_tokens=300, stream=True)
    next(iter(stream))
    assert http.post("/flush_cache").status_code == 409
    stream.close()
    wait_until(lambda: engine.busy == 0, 2)
    assert http.post("/flush_cache").status_code == http.get("/flush_cache").status_code == 200
    again = ai.completions.create(model="tiny", prompt=PROMPT, max_tokens=1)
    assert again.usage.prompt_tokens_details.cached_tokens == 0
