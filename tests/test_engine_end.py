"""How requests and engines end: aborted, stopped, failed, or told so from inside."""

import threading

import numpy as np
import pytest

from dasc_jax.engine.engine import Engine
from tests.engines import prompt
from tests.fake_engine import wait_until
from tests.test_engine import ask, assert_idle
from tests.tiny import tiny_engine


@pytest.fixture(scope="module")
def shared() -> Engine:
    """An engine without a thread, for tests that leave it idle."""
    return tiny_engine(prefill_tokens=64, checkpoint_interval=64, policy="dense")


@pytest.fixture
def engine(shared: Engine) -> Engine:
    """The shared engine, cold."""
    assert shared.flush_cache()
    return shared


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("steps", range(8))
def test_an_abort_at_any_step_gives_everything_back(engine, steps, warm):
    """Waiting, after each of the four pieces of the prompt, while decoding; a hit and a miss."""
    tokens, events = prompt(250), []
    if warm:
        engine.generate([ask("warm", tokens[:129], 1)])
    engine.submit(ask("a", tokens[:249], 7), events.append)
    assert engine.stats()["waiting"] == 1
    for _ in range(steps):
        engine.loop.step()
    if steps:
        assert engine.stats()["running"] == 1
        assert not engine.loop.residency.cache.counts.idle
    engine.abort("a")
    assert_idle(engine)
    result = events[-1].result
    assert (result.finish_reason, result.id) == ("abort", "a")
    assert len(result.tokens) == len(events) - 1 == max(0, steps - (1 if warm else 3))
    assert result.report.reason == ("not_admitted" if not steps else "hit" if warm else "no_kv")
    engine.abort("a")
    assert_idle(engine)
    assert len(engine.generate([ask("a", tokens, 6)])[0].tokens) == 6


def test_the_others_go_on_when_one_is_aborted(engine):
    expected = engine.generate([ask("b", 70, 20)])[0].tokens
    engine.flush_cache()
    a, b = [], []
    engine.submit(ask("a", 100, 100), a.append)
    engine.submit(ask("b", 70, 20), b.append)
    while len(b) < 5:
        engine.loop.step() if engine.stats()["running"] + engine.stats()["waiting"] else None
    engine.abort("a")
    while b[-1].result is None:
        engine.stats()
        engine.loop.step()
    assert b[-1].result.tokens == expected and a[-1].result.finish_reason == "abort"
    assert_idle(engine)


def test_stop_ends_everything_once_and_for_all():
    engine = tiny_engine().start()
    assert engine.start() is engine and engine.alive
    events = [[] for _ in range(7)]
    for key, received in enumerate(events):
        engine.submit(ask(f"{key}", 50 + key, 200), received.append)
    wait_until(lambda: len(events[0]) > 3, 20)
    threads = [threading.Thread(target=engine.stop) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not engine.alive
    assert [received[-1].result.finish_reason for received in events] == ["abort"] * 7
    assert_idle(engine)
    for refused in (
        engine.start,
        lambda: engine.submit(ask("late"), print),
        lambda: engine.generate([ask("late")]),
    ):
        with pytest.raises(RuntimeError, match="the engine has stopped"):
            refused()
    engine.abort("0")
    engine.stop()


def test_stop_while_another_thread_generates_without_a_thread_of_the_engine():
    engine, results = tiny_engine(), []
    caller = threading.Thread(
        target=lambda: results.extend(engine.generate([ask("a", 50, 180), ask("b", 60, 180)]))
    )
    caller.start()
    wait_until(lambda: engine.stats().get("generated_tokens", 0) > 3, 20)
    engine.stop()
    caller.join(20)
    assert [result.finish_reason for result in results] == ["abort", "abort"]
    assert_idle(engine)


@pytest.mark.parametrize("threaded", [False, True])
def test_a_step_that_fails_ends_all_requests_with_the_reason(threaded, monkeypatch, caplog):
    engine, events = tiny_engine(), [[] for _ in range(6)]
    real, calls = engine.loop.device.decode, []

    def decode(rows):
        calls.append(rows)
        if len(calls) == 5:
            raise RuntimeError("device lost")
        return real(rows)

    monkeypatch.setattr(engine.loop.device, "decode", decode)
    if threaded:
        engine.start()
    for key, received in enumerate(events):
        engine.submit(ask(f"{key}", 50 + key, 100), received.append)
    with pytest.raises(RuntimeError, match="the engine has (failed|stopped)"):
        engine.generate([ask("caller", 10, 100)])
    wait_until(lambda: all(received and received[-1].result for received in events), 10)
    assert {received[-1].result.finish_reason for received in events} == {"error"}
    assert events[0][-1].result.error == "the engine failed: RuntimeError: device lost"
    assert "the engine's loop failed" in caplog.text
    assert not engine.alive and str(engine.failure) == "device lost"
    for refused in (engine.stats, engine.flush_cache, lambda: engine.submit(ask("late"), print)):
        with pytest.raises(RuntimeError, match="the engine has stopped"):
            refused()
    assert engine.loop.residency.cache.counts.idle
    engine.stop()


@pytest.mark.parametrize("at", [1, 3])
def test_a_receiver_that_raises_loses_its_request_only(engine, at, caplog):
    """Its request ends as aborted; at its last event, there is nothing left to abort."""
    seen, others = [], []

    def broken(event) -> None:
        seen.append(event)
        if len(seen) >= at:
            raise KeyError("nobody home")

    expected = engine.generate([ask("b", 60, 8)])[0].tokens
    engine.submit(ask("a", 50, 3), broken)
    engine.submit(ask("b", 60, 8), others.append)
    engine.generate([ask("c", 20, 8)])
    assert others[-1].result.tokens == expected
    assert seen[-1].result.finish_reason == ("abort" if at == 1 else "length")
    assert len(seen) == max(at, 2)
    assert "on_event of request 'a' failed" in caplog.text
    assert_idle(engine)


@pytest.mark.parametrize("threaded", [False, True])
def test_a_receiver_may_ask_submit_abort_and_stop(threaded):
    engine, answers, done = tiny_engine(), [], threading.Event()

    def on_event(event) -> None:
        if event.id == "a" and not answers:
            answers.append(engine.stats()["running"])
            answers.append(engine.flush_cache())
            for refused in (engine.start, lambda: engine.generate([ask("x")])):
                with pytest.raises(RuntimeError, match="inside on_event"):
                    refused()
            engine.submit(ask("b", 20, 200), on_event)
            engine.abort("a")
        if event.id == "a" and event.result is not None:
            answers.append(event.result.finish_reason)
        if event.id == "b" and event.token is not None:
            engine.stop()
        if event.id == "b" and event.result is not None:
            answers.append(event.result.finish_reason)
            done.set()

    if threaded:
        engine.start()
    engine.submit(ask("a", 20, 200), on_event)
    if not threaded:
        engine.generate([ask("c", 20, 200)])
    assert done.wait(20)
    assert answers == [1 if threaded else answers[0], False, "abort", "abort"]
    engine.stop()
    assert_idle(engine)


def test_threads_that_submit_abort_flush_and_ask_leave_nothing():
    """Each of 120 requests gets one result, whatever four threads do at the same time."""
    engine = tiny_engine(pages=9, checkpoint_slots=2).start()
    events, lock = {}, threading.Lock()

    def on_event(event) -> None:
        if event.result is not None:
            with lock:
                events.setdefault(event.id, []).append(event.result.finish_reason)

    def work(thread: int) -> None:
        draw = np.random.default_rng(thread)
        for number in range(30):
            key = f"{thread}-{number}"
            length = int(draw.integers(1, 240))
            engine.submit(ask(key, prompt(240)[:length], int(draw.integers(1, 9))), on_event)
            match draw.integers(4):
                case 0:
                    engine.abort(key)
                case 1:
                    engine.abort(f"{(thread + 1) % 4}-{number}")
                case 2:
                    engine.flush_cache()
            assert engine.stats()["free_pages"] >= 0

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    engine.generate([ask("last", 3, 1)])
    engine.stop()
    assert_idle(engine)
    assert len(events) == 120 and {len(reasons) for reasons in events.values()} == {1}
    assert {reason for (reason,) in events.values()} == {"length", "abort"}
