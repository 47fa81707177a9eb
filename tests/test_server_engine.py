"""The real server over the real engine: what a client sees is what the engine did."""

import contextlib
import json
from collections.abc import Iterator

import httpx
import openai
import pytest

from dasc_jax.engine.engine import Engine
from dasc_jax.engine.request import Request, SamplingParams
from tests.engines import prompt
from tests.fake_engine import client, serving, wait_until
from tests.test_engine import assert_idle
from tests.test_server_metrics import samples
from tests.tiny import tiny_engine

TEXT = (
    "The quick brown fox jumps over the lazy dog; the dog does not mind at all, it sleeps on. " * 2
)
GREEDY = {"model": "tiny", "temperature": 0.0, "max_tokens": 12}


@contextlib.contextmanager
def served(engine: Engine) -> Iterator[tuple[openai.OpenAI, httpx.Client]]:
    with serving(engine.start()) as url, client(url) as http:
        options = {"api_key": "none", "max_retries": 0, "http_client": http}
        yield openai.OpenAI(base_url=f"{url}/v1", **options), http


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Engine, openai.OpenAI, httpx.Client]]:
    """One engine and server for the tests of this file that leave both running."""
    engine = tiny_engine(max_context=512, prefill_tokens=128)
    with served(engine) as (ai, http):
        yield engine, ai, http


@pytest.fixture
def api(running) -> tuple[Engine, openai.OpenAI, httpx.Client]:
    """The running server with nothing in its cache."""
    engine, _, _ = running
    wait_until(engine.flush_cache, 10)
    return running


def generated(engine: Engine, tokens, max_tokens: int = 12, **how) -> tuple[int, ...]:
    sampling = SamplingParams(max_tokens, **how)
    return engine.generate([Request("direct", tuple(tokens), sampling)])[0].tokens


def test_the_second_call_says_what_it_took_from_the_cache(api):
    engine, ai, _ = api
    first, again = (ai.completions.create(prompt=TEXT, **GREEDY) for _ in range(2))
    tokens = TEXT.encode()
    assert first.usage.prompt_tokens == again.usage.prompt_tokens == len(tokens)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert again.usage.prompt_tokens_details.cached_tokens == 128
    plan = engine.loop.plan
    cold, warm = (response.model_extra["dasc"] for response in (first, again))
    assert (cold["policy"], cold["reason"], cold["units_loaded"]) == ("nr", "no_kv", 0)
    assert (warm["policy"], warm["reason"], warm["hit_depth"]) == ("nr", "hit", 128)
    assert (warm["units_loaded"], warm["units_zeroed"]) == (plan.total, plan.units - plan.total)
    assert (warm["units_refreshed"], warm["replayed_tokens"], warm["lineage"]) == (0, 0, 1)
    assert 0 < cold["ttft"]


def test_policies_are_chosen_per_request(api):
    engine, ai, _ = api
    plan, dasc = engine.loop.plan, {}
    for policy in ("nr", "nr", "wr", "dense"):
        extra = {"state_policy": policy}
        response = ai.completions.create(prompt=TEXT, extra_body=extra, **GREEDY)
        dasc[policy] = response.model_extra["dasc"]
        assert dasc[policy]["policy"] == policy
    assert dasc["wr"]["reason"] == "hit" and dasc["wr"]["replayed_tokens"] == plan.window
    assert dasc["wr"]["units_refreshed"] == plan.units - plan.total > 0
    assert dasc["dense"]["reason"] == "plan_mismatch" and dasc["dense"]["hit_depth"] == 0


def test_a_salt_keeps_prefixes_apart(api):
    _, ai, _ = api
    hits = []
    for salt in ("", "a", "a", "b", ""):
        response = ai.completions.create(prompt=TEXT, extra_body={"cache_salt": salt}, **GREEDY)
        hits.append(response.usage.prompt_tokens_details.cached_tokens)
    assert hits == [0, 0, 128, 0, 128]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.2, "seed": 5, "top_p": 0.9}])
def test_stream_and_whole_answer_are_what_the_engine_generates(api, sampling):
    engine, ai, http = api
    options = {**GREEDY, **sampling}
    expected = generated(engine, TEXT.encode(), **{"temperature": 0.0, **sampling})
    text = engine.model.tokenizer.decode(list(expected), skip_special_tokens=True)
    for _ in range(2):
        assert http.post("/flush_cache").status_code == 200
        whole = ai.completions.create(prompt=TEXT, **options).choices[0]
        assert (whole.text, tuple(whole.model_extra["token_ids"])) == (text, expected)
    assert http.post("/flush_cache").status_code == 200
    chunks = list(ai.completions.create(prompt=TEXT, stream=True, **options))
    assert "".join(chunk.choices[0].text for chunk in chunks) == text
    ids = [token for chunk in chunks for token in chunk.choices[0].model_extra["token_ids"]]
    assert tuple(ids) == expected
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason
    assert http.post("/flush_cache").status_code == 200
    by_ids = ai.completions.create(prompt=list(TEXT.encode()), **options).choices[0]
    assert by_ids.text == text


def test_chat_continues_the_rendered_template(api):
    engine, ai, _ = api
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
    rendered = engine.model.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    tokens = engine.model.tokenizer.encode(rendered)
    expected = generated(engine, tokens)
    engine.flush_cache()
    first = ai.chat.completions.create(messages=messages, **GREEDY)
    assert first.usage.prompt_tokens == len(tokens)
    assert tuple(first.choices[0].model_extra["token_ids"]) == expected
    again = ai.chat.completions.create(messages=messages, **GREEDY)
    boundary = (len(tokens) - 1) // 64 * 64
    assert again.usage.prompt_tokens_details.cached_tokens == boundary
    engine.flush_cache()
    chunks = list(ai.chat.completions.create(messages=messages, stream=True, **GREEDY))
    content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert content == first.choices[0].message.content


def test_a_stop_string_ends_the_request_in_the_engine(api):
    engine, ai, _ = api
    whole = ai.completions.create(prompt="Once", **{**GREEDY, "max_tokens": 200}).choices[0].text
    stop = next(whole[i : i + 2] for i in range(8, len(whole)) if whole[i : i + 2].isascii())
    before = engine.stats()["generated_tokens"]
    cut = ai.completions.create(prompt="Once", stop=stop, **{**GREEDY, "max_tokens": 200})
    assert cut.choices[0].text == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    wait_until(lambda: engine.stats()["running"] == 0, 10)
    assert engine.stats()["generated_tokens"] - before < 150
    assert_idle(engine)


def test_logprobs_are_those_of_the_engine(api):
    engine, ai, _ = api
    tokens = prompt(70)
    sampling = SamplingParams(4, logprobs=3)
    (direct,) = engine.generate([Request("direct", tokens, sampling)])
    engine.flush_cache()
    options = {**GREEDY, "prompt": list(tokens), "max_tokens": 4}
    given = ai.completions.create(logprobs=3, **options).choices[0].logprobs
    expected = [logprob for logprob, _ in direct.logprobs]
    assert given.token_logprobs == pytest.approx(expected, abs=1e-5)
    assert [sorted(top.values(), reverse=True) for top in given.top_logprobs] == [
        pytest.approx(list(top.values()), abs=1e-5) for _, top in direct.logprobs
    ]


def test_seeds_and_samples_repeat(api):
    _, ai, _ = api
    options = {"model": "tiny", "max_tokens": 8, "temperature": 1.0, "prompt": TEXT}
    both = ai.completions.create(n=2, seed=3, **options).choices
    one, other = (choice.model_extra["token_ids"] for choice in both)
    assert one != other
    alone = ai.completions.create(seed=4, extra_body={"cache_salt": "cold"}, **options)
    assert alone.choices[0].model_extra["token_ids"] == other


def test_flush_is_refused_while_a_request_runs_and_then_forgets(api):
    engine, ai, http = api
    ai.completions.create(prompt=TEXT, **GREEDY)
    extra = {"ignore_eos": True}
    options = {**GREEDY, "max_tokens": 300}
    stream = ai.completions.create(prompt=TEXT, stream=True, extra_body=extra, **options)
    next(iter(stream))
    refused = http.post("/flush_cache")
    assert refused.status_code == 409 and "nothing was flushed" in refused.text
    stream.close()
    wait_until(lambda: engine.stats()["running"] == 0, 10)
    again = ai.completions.create(prompt=TEXT, **GREEDY)
    assert again.usage.prompt_tokens_details.cached_tokens == 128
    assert http.post("/flush_cache").status_code == 200
    again = ai.completions.create(prompt=TEXT, **GREEDY)
    assert again.usage.prompt_tokens_details.cached_tokens == 0


def test_metrics_agree_with_what_was_sent(api):
    engine, ai, http = api
    before = samples(http.get("/metrics").text)
    usages = [ai.completions.create(prompt=TEXT, **GREEDY).usage for _ in range(3)]
    http.post("/v1/completions", json={"prompt": TEXT * 9})
    after = samples(http.get("/metrics").text)

    def grown(*name: str) -> float:
        return after[name] - before.get(name, 0)

    prompts = sum(usage.prompt_tokens for usage in usages)
    answers = sum(usage.completion_tokens for usage in usages)
    assert grown("dasc_request_prompt_tokens_total") == grown("dasc_prompt_tokens") == prompts
    assert grown("dasc_request_generated_tokens_total") == answers
    assert grown("dasc_generated_tokens") == answers
    assert grown("dasc_request_cached_tokens_total") == grown("dasc_cached_tokens") == 256
    assert grown("dasc_request_lookups_total", "hit", "nr") == 2
    assert grown("dasc_request_lookups_total", "no_kv", "nr") == 1
    assert grown("dasc_request_refused_total", "400") == 1
    assert grown("dasc_request_seconds_count") == 3
    assert after["dasc_engine_up",] == 1 and after["dasc_compiled_after_warmup",] == 0
    assert after["dasc_running",] == after["dasc_waiting",] == after["dasc_locks",] == 0
    pages = after["dasc_free_pages",] + after["dasc_evictable_pages",]
    assert pages == engine.config.num_pages - 1


def test_a_prompt_over_the_context_is_refused_with_limit_and_count(api):
    _, ai, _ = api
    with pytest.raises(openai.BadRequestError, match="has 600 tokens; .* holds 512"):
        ai.completions.create(model="tiny", prompt="x" * 600)
    most = ai.completions.create(model="tiny", prompt="x" * 511, max_tokens=1, temperature=0)
    assert most.usage.completion_tokens == 1


def test_a_server_whose_engine_fails_says_so(monkeypatch):
    engine = tiny_engine()
    real, calls = engine.loop.device.decode, []

    def decode(rows):
        calls.append(rows)
        if len(calls) == 3:
            raise RuntimeError("device lost")
        return real(rows)

    monkeypatch.setattr(engine.loop.device, "decode", decode)
    with served(engine) as (_, http):
        body = {"prompt": "p", "max_tokens": 50, "ignore_eos": True, "temperature": 0}
        assert http.get("/health").status_code == 200
        with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            events = stream.read().decode().split("\n\n")
        error = json.loads(events[-3].removeprefix("data: "))["error"]
        assert "device lost" in error["message"] and events[-2] == "data: [DONE]"
        assert http.get("/health").status_code == 503
        refused = http.post("/v1/completions", json=body)
        assert refused.status_code == 503 and "the engine has stopped" in refused.text
        assert http.post("/flush_cache").status_code == 503
        assert "dasc_engine_up 0.0" in http.get("/metrics").text


def test_an_engine_stopped_mid_stream_ends_the_stream_with_an_error():
    engine = tiny_engine()
    with served(engine) as (ai, http):
        options = {**GREEDY, "max_tokens": 240}
        stream = ai.completions.create(
            prompt="x", stream=True, extra_body={"ignore_eos": True}, **options
        )
        next(iter(stream))
        engine.stop()
        with pytest.raises(openai.APIError):
            list(stream)
        assert http.get("/health").status_code == 503
    assert_idle(engine)
