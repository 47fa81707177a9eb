"""What Prometheus and the log see of requests."""

import logging

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse

from tests.fake_engine import FakeEngine, byte_tokenizer, client, says, serving, wait_until


@pytest.fixture
def served():
    engine = FakeEngine(says("abc"), tokenizer=byte_tokenizer())
    with serving(engine) as url, client(url) as http:
        yield engine, http


def samples(text: str) -> dict[tuple, float]:
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in parse(text)
        for sample in family.samples
    }


def test_requests_are_counted_by_what_happened_to_them(served):
    _, http = served
    for extra in ({}, {"state_policy": "wr"}, {"stop": "b"}, {"max_tokens": 0}):
        http.post("/v1/completions", json={"prompt": "x" * 100, **extra})
    found = samples(http.get("/metrics").text)
    assert found["dasc_request_finished_total", "stop"] == 3
    assert found["dasc_request_refused_total", "400"] == 1
    assert found["dasc_request_lookups_total", "no_kv", "nr"] == 1
    assert found["dasc_request_lookups_total", "hit", "wr"] == 1
    assert found["dasc_request_prompt_tokens_total",] == 300
    assert found["dasc_request_cached_tokens_total",] == 128
    assert found["dasc_request_replayed_tokens_total",] == 16
    assert found["dasc_request_generated_tokens_total",] >= 4 + 4 + 2
    assert found["dasc_request_seconds_count",] == 3
    assert found["dasc_request_time_to_first_token_seconds_count",] == 3
    assert found["dasc_request_inter_token_seconds_count",] >= 3 + 3 + 1


def test_the_engine_s_statistics_are_gauges_with_help(served):
    _, http = served
    text = http.get("/metrics").text
    found = samples(text)
    assert found["dasc_slots_free",] == 4
    assert found["dasc_compiles_after_warmup",] == 0
    assert ("dasc_odd_key_ratio",) in found
    for family in parse(text):
        assert family.documentation and family.name.startswith("dasc_")


def test_open_metrics_are_spoken_where_asked_for(served):
    _, http = served
    accept = "application/openmetrics-text; version=1.0.0"
    response = http.get("/metrics", headers={"accept": accept})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert {family.name for family in parse_open(response.text)} >= {"dasc_slots_free"}


def test_two_servers_count_apart(served):
    _, http = served
    http.post("/v1/completions", json={"prompt": "p"})
    other = FakeEngine(says("a"), tokenizer=byte_tokenizer())
    with serving(other) as url, client(url) as second:
        assert ("dasc_request_finished_total", "stop") not in samples(second.get("/metrics").text)


def test_every_request_is_one_line_of_the_log(served, caplog):
    engine, http = served
    with caplog.at_level(logging.INFO, logger="dasc_jax.server"):
        http.post("/v1/completions", json={"prompt": "x" * 100})
        wait_until(lambda: bool(caplog.records), 2)
    (record,) = [record for record in caplog.records if record.name == "dasc_jax.server"]
    line = record.getMessage()
    assert line.startswith(f"{engine.requests[0].id} stop: prompt 100, cached 0 (no_kv, nr)")
    assert "generated 4, ttft" in line
