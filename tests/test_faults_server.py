"""A client that leaves frees a real engine behind the real server, wherever its request is."""

import json
import socket
import time
from urllib.parse import urlsplit

import pytest

from dasc_jax.config import DascConfig
from dasc_jax.engine.config import EngineConfig
from dasc_jax.engine.engine import Engine
from dasc_jax.prefix_cache import check
from tests.engines import MODELS, engine, golden_model, prompt, request, run
from tests.fake_engine import client, serving, wait_until

SECONDS = 2.0
PREFIX = prompt(150)


@pytest.fixture(scope="module")
def served():
    """A started engine with four places, whose steps take at least 5 ms, and its server."""
    made = Engine(
        golden_model(MODELS[0]), EngineConfig(DascConfig(policy="dense"), 512, 4, 64)
    ).start()
    step = made.loop.step

    def slow_step():
        worked = step()
        time.sleep(0.005 if worked else 0)
        return worked

    made.loop.step = slow_step
    with serving(made) as url, client(url) as http:
        yield made, url, http


def post(url, tokens, **body):
    """Send a completion request over a socket of our own, and read nothing yet."""
    address = urlsplit(url)
    connection = socket.create_connection((address.hostname, address.port), timeout=10)
    body = {"prompt": list(tokens), "max_tokens": 300, "ignore_eos": True} | body
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def after_first_chunk(connection):
    received = b""
    while b"data: " not in received:
        received += connection.recv(4096)


def assert_free(made):
    """Within two seconds nothing runs, and no lock, page or slot is in use."""
    wait_until(lambda: made.stats()["running"] == made.stats()["waiting"] == 0, SECONDS)
    residency = made.loop.residency
    check(residency.cache)
    assert residency.cache.counts.idle
    assert sorted(residency.free_slots) == [1, 2, 3, 4]


def assert_right(http, tokens):
    """The next request on the same prefix equals a run of its own."""
    body = {"prompt": list(tokens), "max_tokens": 5, "ignore_eos": True, "temperature": 0}
    answer = http.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]
    alone = engine(MODELS[0], policy="dense", prefill_tokens=64)
    assert tuple(answer) == run(alone, request("alone", tokens, max_tokens=5))[0].tokens


# https://github.com/sgl-project/sglang/issues/37833
@pytest.mark.parametrize("stream", [True, False])
def test_a_running_request_whose_client_left_gives_everything_back(served, stream):
    made, url, http = served
    connection = post(url, PREFIX, stream=stream)
    if stream:
        after_first_chunk(connection)
    wait_until(lambda: made.stats()["running"] == 1, 5)
    connection.close()
    assert_free(made)
    assert_right(http, PREFIX + (5,))


def test_a_queued_request_whose_client_left_gives_everything_back(served):
    made, url, http = served
    running = [post(url, PREFIX + (i,), stream=True) for i in range(4)]
    wait_until(lambda: made.stats()["running"] == 4, 5)
    queued = [post(url, PREFIX + (9,), stream=stream) for stream in (True, False)]
    wait_until(lambda: made.stats()["waiting"] == 2, 5)
    for connection in queued:
        connection.close()
    wait_until(lambda: made.stats()["waiting"] == 0, SECONDS)
    assert made.stats()["running"] == 4, "the others go on"
    for connection in running:
        connection.close()
    assert_free(made)
    assert_right(http, PREFIX + (9, 9))
