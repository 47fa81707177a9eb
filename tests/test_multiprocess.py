"""Several processes serve as one; when one of them is gone, all end, and say which it was."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path

import httpx
import jax
import numpy as np
import pytest

from dasc_jax.cli import main
from dasc_jax.config import ConfigError, DascConfig
from dasc_jax.engine import dispatch
from dasc_jax.engine.config import EngineConfig
from dasc_jax.engine.engine import Engine
from dasc_jax.engine.lockstep import DivergedError, LeadingLoop, description, follow, position
from dasc_jax.engine.loop import Loop
from dasc_jax.engine.peers import Followers, Leader, Link, ProcessLost
from dasc_jax.engine.request import Request, SamplingParams
from dasc_jax.prefix_cache import check
from dasc_jax.programs.processes import check_processes, rank_mesh
from dasc_jax.tokenizer import tokenizer_files, write_byte_tokenizer
from dasc_jax.weights import save_native
from tests.fake_engine import wait_until
from tests.tiny import tiny_model

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 240
LOST_SECONDS = 30
SIZES = EngineConfig(DascConfig(policy="dense"), 256, 2, 64, pages=12)
PROMPTS = ["The state of the prefix. " * 4, "The state of the prefix. " * 4 + "More.", "b"]
PROMPTS += [f"{number} prompts fill the pool of pages. " * 4 for number in range(3)]


def pair() -> tuple[Followers, Leader]:
    """Both ends of a connection, in this process."""
    first, second = Pipe()
    return Followers({1: first}, lambda lost: None), Leader(second)


def ask(key: str, tokens, max_tokens: int = 4, **sampling) -> Request:
    return Request(key, tuple(tokens), SamplingParams(max_tokens, ignore_eos=True, **sampling))


def text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 250, length).tolist()


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Engine, Loop]]:
    """An engine that leads and a loop that follows it in another thread."""
    followers, leader = pair()
    engine, loop = Engine(tiny_model(), SIZES, None, followers), Loop(tiny_model(), SIZES)
    leader.built(description(loop))
    followers.await_built(description(engine.loop))
    thread = threading.Thread(target=follow, args=(loop, leader), daemon=True)
    thread.start()
    engine.start()
    yield engine, loop
    engine.stop()
    followers.close()
    thread.join(20)
    assert not thread.is_alive()
    check(loop.residency.cache)
    assert loop.residency.cache.counts.idle


def assert_alike(engine: Engine, loop: Loop) -> None:
    """The follower comes to where the engine is, the whole of its cache included."""
    wait_until(lambda: position(loop) == position(engine.loop), 20)
    assert loop.residency.cache == engine.loop.residency.cache
    assert loop.residency.meta == engine.loop.residency.meta
    assert loop.residency.free_slots == engine.loop.residency.free_slots


def test_a_follower_does_what_the_engine_did(both):
    engine, loop = both
    prefix = text(130)
    requests = [ask(f"{i}", prefix[: 40 * (i % 4)] + text(60 + i, i)) for i in range(9)]
    requests += [ask("warm", text(90, 3), temperature=0.9, seed=5, logprobs=3)]
    requests += [ask("scored", text(70, 4), prompt_logprobs=2)]
    for _ in range(2):
        engine.generate(requests)
    assert engine.stats()["lookup_hit"] and engine.stats()["evicted_pages"]
    assert_alike(engine, loop)


def test_aborts_and_receivers_that_raise_reach_the_follower(both):
    engine, loop = both

    def raises(event):
        raise ValueError("nobody listens")

    engine.submit(ask("raises", text(50), 100), raises)
    engine.submit(ask("aborted", text(60), 100), lambda event: None)
    engine.submit(ask("aborted", text(60), 100), lambda event: None)
    engine.generate([ask("a", text(20))])
    engine.abort("aborted")
    wait_until(lambda: engine.stats()["running"] == 0, 20)
    assert_alike(engine, loop)


def test_flush_keep_and_adopt_reach_the_follower(both):
    engine, loop = both
    assert engine.flush_cache()
    engine.generate([ask("a", text(140))])
    kept = engine.keep()
    engine.adopt(kept, DascConfig(policy="dense", quantization="int8"), engine.loop.plan)
    again = Request("b", (*text(140), 7), SamplingParams(2), state_policy="nr")
    assert engine.generate([again])[0].cached_tokens == 128
    assert_alike(engine, loop)
    assert loop.config.dasc.quantization == "int8"
    engine.adopt(None, DascConfig(policy="dense"))
    with pytest.raises(ValueError, match="warm up again"):
        engine.adopt(kept, DascConfig(policy="dense"))
    engine.generate([ask("c", text(70))])
    assert_alike(engine, loop)


def test_a_form_that_has_no_room_is_adopted_by_nobody(both, monkeypatch):
    engine, loop = both
    assert engine.flush_cache()
    int8, failed = DascConfig(policy="dense", quantization="int8"), []

    def fails(*args, **kwargs):
        failed.append(args)
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room")

    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "init_pool", fails)
        with pytest.raises(jax.errors.JaxRuntimeError, match="no room"):
            engine.adopt(None, int8)
        wait_until(lambda: len(failed) == 2, 20)
    assert engine.generate([ask("a", text(140))])[0].finish_reason == "length"
    assert_alike(engine, loop)
    assert engine.config == loop.config and loop.config.dasc.quantization is None
    before = engine.loop.digest
    engine.adopt(None, int8)
    assert engine.loop.digest != before, "one process that adopts alone is found out"
    assert_alike(engine, loop)
    engine.adopt(None, DascConfig(policy="dense"))


def test_what_changes_the_cache_is_refused_inside_on_event(both, caplog):
    engine, loop = both
    engine.submit(ask("asks", text(20), 8), lambda event: engine.flush_cache())
    wait_until(lambda: engine.stats()["running"] == engine.stats()["waiting"] == 0, 20)
    engine.generate([ask("a", text(20))])
    assert "ask outside on_event" in caplog.text
    assert_alike(engine, loop)


def test_a_follower_that_is_elsewhere_says_so():
    followers, leader = pair()
    loop = object.__new__(Loop)
    loop.digest, loop.residency = 1, type("R", (), {"cache": type("C", (), {"counts": (2,)})})
    followers.send("step", (7, 2))
    with pytest.raises(DivergedError, match=r"\(7, 2\), this one at \(1, 2\)"):
        follow(loop, leader)


def test_processes_of_other_sizes_are_refused_with_the_difference():
    followers, leader = pair()
    leader.built({"dtype": "float32", "sizes": "4"})
    with pytest.raises(ValueError, match="process 1 has sizes 4; process 0 has 8"):
        followers.await_built({"dtype": "float32", "sizes": "8"})


def test_a_failed_step_is_blamed_on_the_process_that_is_gone(monkeypatch):
    def fails(loop):
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(Loop, "step", fails)
    monkeypatch.setattr("dasc_jax.engine.lockstep.position", lambda loop: ())
    loop = object.__new__(LeadingLoop)
    loop._dropped, (loop.followers, leader) = [], pair()
    monkeypatch.setattr("dasc_jax.engine.lockstep.BLAME_SECONDS", 0.1)
    with pytest.raises(RuntimeError, match="closed by peer"):
        loop.step()
    leader._link._connection.close()
    with pytest.raises(ProcessLost, match="process 1 has ended"):
        loop.step()


def test_a_silent_process_is_lost():
    lost, (first, second) = [], Pipe()
    Link(first, 1, print, lost.append, silence=0.2)
    wait_until(lambda: lost, 5)
    assert str(lost[0]) == "process 1 was not heard of for 0.2 s"
    second.close()


def test_who_watches_late_hears_of_a_lost_process():
    first, second = Pipe()
    early, late = [], []
    followers = Followers({1: first}, early.append)
    second.close()
    wait_until(lambda: early, 5)
    followers.watch(late.append, lambda: None)
    assert early == late and str(late[0]) == "process 1 has ended"


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ((None, 2, 0), "coordinator is None for 2 processes"),
        (("h:1", 1, 0), "coordinator is h:1 for 1 processes"),
        (("h:1", 2, 2), "process-id is 2 of 2"),
        (("h", 2, 0), "must be HOST:PORT"),
        (("h:99999", 2, 0), "must be HOST:PORT"),
    ],
)
def test_a_place_that_does_not_exist_is_refused(place, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_processes(*place)


def test_more_ranks_than_devices_are_refused_with_the_numbers(capsys):
    assert rank_mesh(1) is None
    with pytest.raises(ConfigError, match="tp=999 takes 999 devices a process; process 0 has"):
        rank_mesh(999)
    for tp in (0, -1):
        with pytest.raises(ConfigError, match=f"tp={tp} must be at least 1"):
            rank_mesh(tp)
    assert main(["serve", "--tp", "999"]) == 1
    assert "tp=999 takes 999 devices" in capsys.readouterr().err


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Process:
    """A process whose output is read as it comes; killed at the end, whatever happened."""

    def __init__(self, *command: str) -> None:
        flags = os.environ.get("XLA_FLAGS", "")
        env = os.environ | {"XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count=4"}
        self.said, self._lines = "", threading.Condition()
        self.popen = subprocess.Popen(
            [sys.executable, "-u", *command],
            env=env,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.said += line
        self.popen.stdout.close()

    def await_text(self, pattern: str) -> re.Match[str]:
        found: list[re.Match[str]] = []

        def there() -> bool:
            assert self.popen.poll() is None, self.said
            found.extend(re.finditer(pattern, self.said))
            return bool(found)

        wait_until(there, START_SECONDS)
        return found[0]

    def ended(self, seconds: float = LOST_SECONDS) -> int:
        """The exit status."""
        code = self.popen.wait(seconds)
        self._reader.join(5)
        return code


@contextlib.contextmanager
def two(*command: str, place: tuple[str, str]) -> Iterator[list[Process]]:
    """Two processes of one coordinator; `place` are their last arguments, with {} for both."""
    coordinator, started = f"127.0.0.1:{free_port()}", []
    try:
        for at in ("0", "1"):
            started.append(Process(*command, *(part.format(coordinator, at) for part in place)))
        yield started
    finally:
        for process in started:
            process.popen.kill()
            process.popen.wait(20)


def alone() -> contextlib.AbstractContextManager[list[Process]]:
    return two("-m", "tests.processes_alone", place=("{0}", "{1}"))


@pytest.mark.parametrize("which", [0, 1])
def test_a_killed_process_ends_the_other_which_names_it(which):
    with alone() as processes:
        for process in processes:
            process.await_text("ready")
        processes[which].popen.kill()
        other = processes[1 - which]
        # JAX, too, ends a process whose coordinator is gone, with a status of its own.
        assert other.ended() == 1 or not which
        assert f"process {which} has ended" in other.said


def test_a_follower_asked_to_end_ends_all_processes_cleanly():
    with alone() as processes:
        for process in processes:
            process.await_text("ready")
        processes[1].popen.send_signal(signal.SIGTERM)
        assert [process.ended() for process in processes] == [0, 0], processes[0].said


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory, tokenizer = tmp_path_factory.mktemp("tiny"), tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(tokenizer)
    model = tiny_model()
    save_native(directory, model.config, model.params, tokenizer_files(tokenizer))
    return directory


def body(prompt: str, max_tokens: int = 5, **how) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **how}


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_two_processes_answer_as_one_until_one_of_them_is_killed(tp, checkpoint, both):
    one, _ = both
    assert one.flush_cache()
    sizes = ["--max-running=2", "--prefill-tokens=64", "--max-context=256", "--pages=12"]
    how = ["--policy=dense", "--dtype=float32", "--port=0", f"--tp={tp}", *sizes]
    how += ["--compilation-cache", os.environ["JAX_COMPILATION_CACHE_DIR"]]
    command = ["scripts/serve.py", "--model", str(checkpoint), "--served-name", "tiny", *how]
    sampling = [SamplingParams(5, ignore_eos=True, temperature=t, seed=3) for t in (0.0, 0.8)]
    place = ("--coordinator={0}", "--process-id={1}")
    with two(*command, "--processes", "2", place=place) as (first, second):
        url = first.await_text(r"ready: .* at (http://\S+)")[1]
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
            for prompt in PROMPTS:
                for params in sampling:
                    call = body(prompt, temperature=params.temperature, seed=3)
                    answer = http.post("/completions", json=call).json()
                    alone = one.generate([tuple(prompt.encode())], params)[0]
                    assert tuple(answer["choices"][0]["token_ids"]) == alone.tokens
                    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                    assert cached == alone.cached_tokens
            error = error_when_killed(http, second)
        assert "process 1 has ended" in error
        assert first.ended() == 1 and "process 1 has ended" in first.said


def error_when_killed(http: httpx.Client, process: Process) -> str:
    """What a client hears while `process` is killed behind it; within 30 seconds."""
    call = body("x" * 20, 230, stream=True)
    with http.stream("POST", "/completions", json=call) as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: {"))
        next(lines)
        process.popen.kill()
        killed = time.monotonic()
        *_, last = lines
    assert time.monotonic() - killed < LOST_SECONDS
    return json.loads(last.removeprefix("data: "))["error"]["message"]
