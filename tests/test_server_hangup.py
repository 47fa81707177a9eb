"""Whoever leaves frees the engine: clients that hang up, servers that stop, engines that die."""

import json
import socket
import threading
from urllib.parse import urlsplit

import httpx
import pytest

from tests.fake_engine import FakeEngine, byte_tokenizer, client, counts, says, serving, wait_until

SECONDS = 2.0
USER = [{"role": "user", "content": "hi"}]


def post(url: str, path: str = "/v1/completions", **body) -> socket.socket:
    """Send a request over a socket of our own, and read nothing yet."""
    address = urlsplit(url)
    connection = socket.create_connection((address.hostname, address.port), timeout=10)
    content = json.dumps({"prompt": "p", "max_tokens": 500, "ignore_eos": True} | body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


@pytest.fixture
def served():
    """A slow engine with two places, and its server."""
    engine = FakeEngine(counts, tokenizer=byte_tokenizer(), step=0.01, slots=2)
    with serving(engine) as url, client(url) as http:
        yield engine, url, http


def test_a_stream_closed_after_its_first_chunk_is_aborted(served):
    engine, url, http = served
    connection = post(url, stream=True)
    received = b""
    while b"data: " not in received:
        received += connection.recv(4096)
    assert engine.busy == 1
    connection.close()
    wait_until(lambda: engine.busy == 0, SECONDS)
    again = http.post("/v1/completions", json={"prompt": "p", "max_tokens": 2, "seed": 0})
    assert again.json()["choices"][0]["token_ids"] == [55, 56]


def test_a_call_without_a_stream_is_aborted(served):
    engine, url, _ = served
    connection = post(url, n=2)
    wait_until(lambda: engine.busy == 2, 5)
    connection.close()
    wait_until(lambda: engine.busy == 0, SECONDS)
    assert sorted(engine.aborted) == sorted(request.id for request in engine.requests)


@pytest.mark.parametrize("stream", [False, True])
def test_a_queued_call_is_aborted_and_the_running_ones_go_on(served, stream):
    engine, url, _ = served
    running = [post(url, stream=True), post(url)]
    wait_until(lambda: engine.busy == 2, 5)
    queued = post(url, stream=stream)
    wait_until(lambda: engine.busy == 3, 5)
    queued.close()
    wait_until(lambda: engine.busy == 2, SECONDS)
    assert engine.aborted == [engine.requests[2].id]
    assert engine.deliveries[engine.requests[2].id] <= 1
    for connection in running:
        connection.close()
    wait_until(lambda: engine.busy == 0, SECONDS)


def test_a_reset_connection_is_aborted(served):
    engine, url, _ = served
    chat = {"path": "/v1/chat/completions", "prompt": None, "messages": USER}
    connection = post(url, **chat, max_tokens=300, stream=True)
    wait_until(lambda: engine.busy == 1, 5)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()
    wait_until(lambda: engine.busy == 0, SECONDS)


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_fault(served, caplog):
    engine, url, http = served
    address = urlsplit(url)
    connection = socket.create_connection((address.hostname, address.port), timeout=10)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    connection.sendall(head + b'{"prompt": ')
    connection.close()
    body = {"prompt": "p", "max_tokens": 1}
    assert http.post("/v1/completions", json=body).status_code == 200
    assert len(engine.requests) == 1
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_an_aborted_call_is_counted_as_one(served):
    engine, url, http = served
    post(url, stream=True).close()
    wait_until(lambda: len(engine.requests) == 1 and engine.busy == 0, SECONDS)
    line = 'dasc_request_finished_total{reason="abort"} 1.0'
    wait_until(lambda: line in http.get("/metrics").text, SECONDS)


def test_a_finished_call_aborts_nothing(served):
    engine, _, http = served
    body = {"prompt": "p", "max_tokens": 3, "stream": True}
    assert http.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
    assert http.post("/v1/completions", json=body | {"stream": False}).status_code == 200
    assert engine.aborted == []


def test_a_stopping_server_ends_its_calls_with_an_error():
    engine = FakeEngine(counts, tokenizer=byte_tokenizer(), step=0.01)
    answers: list[httpx.Response] = []

    def ask(url: str, stream: bool) -> None:
        body = {"prompt": "p", "max_tokens": 500, "stream": stream}
        with client(url) as http:
            answers.append(http.post("/v1/completions", json=body))

    with serving(engine) as url:
        threads = [threading.Thread(target=ask, args=(url, stream)) for stream in (True, False)]
        for thread in threads:
            thread.start()
        wait_until(lambda: engine.busy == 2, 5)
    for thread in threads:
        thread.join(5)
    assert len(engine.aborted) == 2
    assert sorted(answer.status_code for answer in answers) == [200, 503]
    assert all("the server is stopping" in answer.text for answer in answers)


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies_fails_its_calls_and_health(served, stream):
    engine, url, http = served
    assert http.get("/health").status_code == 200
    connection = post(url, stream=stream)
    wait_until(lambda: engine.busy == 1, 5)
    engine.stop()
    received = b""
    while b"the engine has stopped" not in received:
        part = connection.recv(4096)
        assert part, received
        received += part
    connection.close()
    assert http.get("/health").status_code == 503
    assert http.post("/v1/completions", json={"prompt": "p"}).status_code == 503
    assert http.post("/flush_cache").status_code == 503
    metrics = http.get("/metrics")
    assert metrics.status_code == 200 and "dasc_engine_up 0.0" in metrics.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_request_leaves_the_server_up(stream):
    engine = FakeEngine(says("abc"), tokenizer=byte_tokenizer(), fails=2)
    with serving(engine) as url, client(url) as http:
        body = {"prompt": "p", "stream": stream}
        response = http.post("/v1/completions", json=body)
        assert response.status_code == (200 if stream else 500)
        assert "the request failed: no luck" in response.text
        assert 'finish_reason":"error' not in response.text
        assert http.post("/v1/completions", json=body | {"max_tokens": 2}).status_code == 200
