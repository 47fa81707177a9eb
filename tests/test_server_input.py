"""Bad input gets an error that names the field and the numbers, before the engine sees it."""

import json

import pytest

from tests.fake_engine import FakeEngine, byte_tokenizer, client, counts, serving

COMPLETION = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
PNG = {"type": "image_url", "image_url": {"url": "data:,"}}


@pytest.fixture(scope="module")
def served():
    engine = FakeEngine(counts, tokenizer=byte_tokenizer())
    with serving(engine) as url, client(url) as http:
        yield engine, http


@pytest.fixture(scope="module")
def served_ids():
    engine = FakeEngine(counts)
    with serving(engine) as url, client(url) as http:
        yield engine, http


def refused(server, path, body, status=400):
    engine, http = server
    before = len(engine.requests)
    response = http.post(path, json=body)
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert len(engine.requests) == before
    return error


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "prompt", "prompt is null; it must be a string"),
        ({"prompt": []}, "prompt", "prompt is []"),
        ({"prompt": ""}, "prompt", "no tokens"),
        ({"prompt": [[1], []]}, "prompt", "no tokens"),
        ({"prompt": [1, "a"]}, "prompt", 'prompt is [1, "a"]'),
        ({"prompt": [1, True]}, "prompt", "prompt is [1, true]"),
        ({"prompt": {"a": 1}}, "prompt", 'prompt is {"a": 1}'),
        ({"prompt": [1, 258]}, "prompt", "prompt[1] is 258; token ids are integers in [0, 258)"),
        ({"prompt": [[1], [-1]]}, "prompt", "prompt[1][0] is -1"),
        ({"prompt": [1] * 512}, "prompt", "has 512 tokens; the context of this server holds 512"),
        (
            {"prompt": [1] * 300, "max_tokens": 213},
            "max_tokens",
            "has 300 tokens and max_tokens asks for 213 more; the context of this server holds 512",
        ),
        ({"prompt": [1] * 401}, None, "the pool holds 400 tokens, not 401"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0; it must be an integer in [1, 512]"),
        ({"max_tokens": "9"}, "max_tokens", 'max_tokens is "9"'),
        ({"max_tokens": True}, "max_tokens", "max_tokens is true"),
        ({"temperature": -1}, "temperature", "temperature is -1.0; it must be in [0, 100]"),
        ({"temperature": "hot"}, "temperature", 'temperature is "hot"; it must be a finite number'),
        ({"temperature": 10**400}, "temperature", "it must be a finite number"),
        ({"top_p": 0}, "top_p", "top_p is 0.0; it must be in (0, 1]"),
        ({"top_p": 1.5}, "top_p", "top_p is 1.5"),
        ({"top_k": -2}, "top_k", "top_k is -2"),
        ({"seed": -1}, "seed", "seed is -1"),
        ({"n": 0}, "n", "n is 0; it must be an integer in [1, 128]"),
        ({"n": 2, "prompt": ["a"] * 65}, "n", "65 prompts with n=2 make 130 choices; at most 128"),
        ({"n": 2, "best_of": 3}, "best_of", "best_of is not supported"),
        ({"logprobs": 259}, "logprobs", "logprobs is 259; it must be an integer in [0, 258]"),
        ({"logprobs": 21, "echo": True}, "logprobs", "at most 20 together with echo"),
        ({"max_tokens": -1, "echo": True}, "max_tokens", "an integer in [0, 512]"),
        ({"echo": "yes"}, "echo", 'echo is "yes"; it must be true or false'),
        ({"suffix": "end"}, "suffix", "suffix is not supported"),
        ({"stop": ""}, "stop", 'stop is ""'),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop": [1]}, "stop", "stop is [1]"),
        ({"stop_token_ids": [258]}, "stop_token_ids", "an array of token ids in [0, 258)"),
        ({"stop_token_ids": 3}, "stop_token_ids", "stop_token_ids is 3"),
        ({"stream": 1}, "stream", "stream is 1; it must be true or false"),
        ({"stream_options": {}}, "stream_options", "only where stream is true"),
        (
            {"stream": True, "stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
            "stream_options.include_usage is 1",
        ),
        (
            {"stream": True, "stream_options": {"all": True}},
            "stream_options.all",
            "unknown field stream_options.all",
        ),
        ({"state_policy": "lossy"}, "state_policy", "it must be one of dense, nr, wr"),
        ({"cache_salt": "x" * 257}, "cache_salt", "at most 256 characters"),
        ({"presence_penalty": 0.1}, "presence_penalty", "presence_penalty is not supported"),
        ({"frequency_penalty": 1}, "frequency_penalty", "frequency_penalty is not supported"),
        ({"repetition_penalty": 1.1}, "repetition_penalty", "repetition_penalty is not supported"),
        ({"logit_bias": {"1": 5}}, "logit_bias", "logit_bias is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "is not supported"),
        ({"min_p": 0.1, "beam": 3}, "beam", "unknown fields beam, min_p"),
        ({"messages": USER}, "messages", "unknown field messages"),
    ],
)
def test_a_bad_completion_names_the_field(served, body, param, message):
    prompt = {} if "prompt" in body or body in ({}, {"messages": USER}) else {"prompt": "p"}
    error = refused(served, COMPLETION, prompt | body)
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "messages", "messages is null; it must be an array"),
        ({"messages": []}, "messages", "messages is []"),
        ({"messages": ["hi"]}, "messages", "messages[0] is a string; it must be an object"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role", "messages[0].role is null"),
        (
            {"messages": [*USER, {"role": "tool", "content": "4"}]},
            "messages[1].role",
            'messages[1].role is "tool"; it must be one of system, developer, user, assistant',
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "messages[0].content is null"),
        (
            {"messages": [{"role": "user", "content": [PNG]}]},
            "messages",
            "messages[0].content[0] is",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]},
            "messages[0].tool_calls",
            "messages[0].tool_calls is not supported",
        ),
        ({"messages": USER, "top_logprobs": 2}, "top_logprobs", "needs logprobs: true"),
        ({"messages": USER, "logprobs": 2}, "logprobs", "logprobs is 2; it must be true or false"),
        ({"messages": USER, "tools": [{}]}, "tools", "tools is not supported"),
        ({"messages": USER, "tool_choice": "required"}, "tool_choice", "is not supported"),
        ({"messages": USER, "max_completion_tokens": 0}, "max_completion_tokens", "is 0"),
        ({"messages": USER, "prompt": "p"}, "prompt", "unknown field prompt"),
        ({"messages": [{"role": "user", "content": "x" * 512}]}, "prompt", "holds 512"),
    ],
)
def test_a_bad_chat_names_the_field(served, body, param, message):
    error = refused(served, CHAT, body)
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
def test_harmless_and_neutral_fields_are_accepted(served, path):
    _, http = served
    prompt = {"prompt": "p"} if path == COMPLETION else {"messages": USER}
    body = {
        "model": "tiny",
        "user": "me",
        "metadata": {},
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": None,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "stop": None,
        "top_k": -1,
        "max_tokens": 2,
    }
    response = http.post(path, json=prompt | body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
def test_another_model_is_not_found(served, path):
    error = refused(served, path, {"model": "gpt"}, 404)
    assert error["message"] == "the model 'gpt' does not exist; this server has 'tiny'"
    assert error["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe{", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[1]", "must be a JSON object, not an array"),
        (b'"p"', "must be a JSON object, not a string"),
        (b'{"prompt": "p", "temperature": NaN}', "temperature is NaN; it must be a finite number"),
        (b'{"prompt": "p", "temperature": 1e999}', "temperature is Infinity"),
        (b'{"prompt": [' + b"9" * 5000 + b"]}", "not valid JSON"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "p", "\\ud800": 1}', "unknown field"),
        (b'{"prompt": "p", "stop": "\\ud800"}', "stop is"),
    ],
)
def test_a_body_that_is_no_request_is_refused(served, body, message):
    _, http = served
    response = http.post(COMPLETION, content=body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (COMPLETION, {"prompt": "p"}, "without a tokenizer: send the prompt"),
        (CHAT, {"messages": USER}, "without a tokenizer: send the prompt"),
        (COMPLETION, {"prompt": [1], "stop": "x"}, "stop strings need a tokenizer"),
        (COMPLETION, {"prompt": [1], "echo": True}, "echo needs a tokenizer"),
    ],
)
def test_text_without_a_tokenizer_is_refused(served_ids, path, body, message):
    assert message in refused(served_ids, path, body)["message"]


def test_a_template_that_refuses_is_quoted():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    engine = FakeEngine(counts, tokenizer=tokenizer)
    with serving(engine) as url, client(url) as http:
        error = refused((engine, http), CHAT, {"messages": USER})
        assert "roles must alternate" in error["message"]
        tokenizer.chat_template = None
        error = refused((engine, http), CHAT, {"messages": USER})
        assert "chat_template is not set" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", COMPLETION, 405), ("GET", "/v2", 404)]
)
def test_unknown_paths_and_methods_have_the_same_form(served, method, path, status):
    response = served[1].request(method, path)
    assert response.status_code == status
    assert path in response.json()["error"]["message"]


def test_a_refused_prompt_takes_its_siblings_along(served):
    engine, http = served
    body = {"prompt": [[1] * 10, [1] * 401], "max_tokens": 50}
    response = http.post(COMPLETION, content=json.dumps(body))
    assert response.status_code == 400
    assert engine.aborted[-1] == engine.requests[-1].id
