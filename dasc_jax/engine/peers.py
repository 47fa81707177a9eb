"""The processes of one server: messages in order from the first, and word of one that is gone.

They talk over sockets of the standard library. JAX's public calls between processes are
collectives, in which all must meet: an idle server would wait in one, and a server with a dead
process for ever; the store behind its coordinator is not public. One collective at the start tells
everybody the port and a random key, so that there is no second port to choose, and nothing is
unpickled that a stranger sent.
"""

import contextlib
import multiprocessing
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

BEAT_SECONDS = 1.0
"""How often a process says that it lives."""

SILENCE_SECONDS = 15.0
"""A process not heard of for so long is lost. One that is killed is known at once: its kernel
closes the connection."""

CONNECT_SECONDS = 60.0
"""How long the first process waits for the others to connect, once all take part in JAX."""

_KEY_BYTES = 32


class ProcessLost(RuntimeError):
    """Another process of the server has ended, failed or fallen silent; the message names it."""


class Link:
    """One end of a connection, with a thread that listens and one that gives signs of life.

    Args:
        connection: to the other process.
        number: the other's number, for messages.
        hear: called with every message, by the listening thread.
        lose: called once, by the same thread, when the other is gone and `close` was not called.
        silence: seconds without a message after which it is.
    """

    def __init__(
        self,
        connection: Connection,
        number: int,
        hear: Callable[[Any], None],
        lose: Callable[[ProcessLost], None],
        silence: float = SILENCE_SECONDS,
    ):
        self.number, self.beat = number, ("alive",)
        self._connection, self._hear, self._lose = connection, hear, lose
        self._silence = silence
        self._sending, self._closed = threading.Lock(), threading.Event()
        for work in (self._listen, self._live):
            threading.Thread(target=work, name=f"dasc-process-{number}", daemon=True).start()

    def send(self, *message: Any) -> None:
        """Send plain values. Where the connection is broken, the listening thread says so."""
        with self._sending, contextlib.suppress(OSError):
            self._connection.send(message)

    def close(self) -> None:
        """From now on the other may go."""
        self._closed.set()

    def _listen(self) -> None:
        try:
            while self._connection.poll(self._silence):
                message = self._connection.recv()
                if message != ("alive",):
                    self._hear(message)
            reason = f"was not heard of for {self._silence:g} s"
        except (EOFError, OSError):
            reason = "has ended"
        if not self._closed.is_set():
            self._lose(ProcessLost(f"process {self.number} {reason}"))

    def _live(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            self.send(*self.beat)


class Followers:
    """All processes but the first, as the first has them; `serving` once it watches them.

    Args:
        connections: by process number.
        lose: called once, when the first of them is lost, from a thread; see `watch`.
    """

    def __init__(
        self, connections: Mapping[int, Connection], lose: Callable[[ProcessLost], None]
    ) -> None:
        self._lose, self._leave = lose, lambda: None
        self._built: dict[int, Mapping[str, str]] = {}
        self._lost: ProcessLost | None = None
        self.serving, self._closed = False, False
        self._news = threading.Condition()
        self._links = [
            Link(connection, number, self._ear(number), self._note)
            for number, connection in sorted(connections.items())
        ]

    def watch(self, lose: Callable[[ProcessLost], None], leave: Callable[[], None]) -> None:
        """Call `lose` when a process is lost, `leave` when one was asked to end; from threads."""
        with self._news:
            self.serving, lost = True, self._lost
            self._lose, self._leave = lose, leave
        if lost:
            lose(lost)

    def send(self, *message: Any) -> None:
        """Send plain values to all."""
        for link in self._links:
            link.send(*message)

    def await_built(self, built: Mapping[str, str]) -> None:
        """Wait until every process has built its engine like this one, which `built` describes.

        Raises:
            ProcessLost: one is gone.
            ValueError: one was built otherwise, with the difference.
        """
        with self._news:
            self._news.wait_for(lambda: self._lost or len(self._built) == len(self._links))
            if self._lost:
                raise self._lost
        for number, theirs in sorted(self._built.items()):
            for name in sorted(built.keys() | theirs.keys()):
                if (there := theirs.get(name)) != (here := built.get(name)):
                    raise ValueError(f"process {number} has {name} {there}; process 0 has {here}")

    def lost_within(self, seconds: float) -> ProcessLost | None:
        """The first process lost, now or within so many seconds."""
        with self._news:
            self._news.wait_for(lambda: self._lost, seconds)
            return self._lost

    def close(self) -> None:
        """Tell all to end behind what they were told before."""
        self._closed = True
        for link in self._links:
            link.close()
            link.send("stop")

    def _ear(self, number: int) -> Callable[[tuple[Any, ...]], None]:
        def hear(message: tuple[Any, ...]) -> None:
            match message:
                case ("built", built):
                    with self._news:
                        self._built[number] = built
                        self._news.notify_all()
                case ("leave",):
                    self._leave()
                case ("failed", reason):
                    self._note(ProcessLost(f"process {number} failed: {reason}"))

        return hear

    def _note(self, lost: ProcessLost) -> None:
        with self._news:
            if self._lost or self._closed:
                return
            self._lost, lose = lost, self._lose
            self._news.notify_all()
        lose(lost)


class Leader:
    """The first process, as another one has it; `lose` is called from a thread when it is gone."""

    def __init__(
        self, connection: Connection, lose: Callable[[ProcessLost], None] = lambda lost: None
    ) -> None:
        self._messages: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._link = Link(connection, 0, self._hear, lose)

    def next(self) -> tuple[Any, ...]:
        """The next message; waits for it. The last one is ("stop",)."""
        return self._messages.get()

    def built(self, built: Mapping[str, str]) -> None:
        """Say that the engine is built, and how."""
        self._link.send("built", dict(built))

    def failed(self, reason: str) -> None:
        """Say that this process cannot go on.

        Where one process is lost, a collective step fails in all of them; the lost one is to be
        named, hence the wait.
        """
        time.sleep(BEAT_SECONDS)
        self._link.send("failed", reason)

    def leave(self) -> None:
        """Ask the first process to end the server; from a signal handler, say."""
        self._link.beat = ("leave",)

    def _hear(self, message: tuple[Any, ...]) -> None:
        if message == ("stop",):
            self._link.close()
        self._messages.put(message)


def connect(coordinator: str, lose: Callable[[ProcessLost], None]) -> Followers | Leader:
    """Connect all processes of an initialised `jax.distributed` with the first one; all call it.

    Args:
        coordinator: HOST:PORT as `jax.distributed` has it; process 0 listens on a free port of it.
        lose: called from a thread when another process is gone.

    Raises:
        OSError: the host is not this machine's, a process did not connect in time.
    """
    host, number = coordinator.rpartition(":")[0], jax.process_index()
    if number == 0:
        return Followers(_accept(host, jax.process_count() - 1), lose)
    port, *key = multihost_utils.broadcast_one_to_all(np.zeros(1 + _KEY_BYTES, np.uint32))
    connection = Client((host, int(port)), authkey=bytes(map(int, key)))
    connection.send(number)
    return Leader(connection, lose)


def _accept(host: str, count: int) -> dict[int, Connection]:
    key, arrived = secrets.token_bytes(_KEY_BYTES), queue.SimpleQueue()
    with Listener((host, 0), backlog=count, authkey=key) as listener:
        told = np.array([listener.address[1], *key], np.uint32)
        multihost_utils.broadcast_one_to_all(told)
        take = threading.Thread(target=_take, args=(listener, arrived, count), daemon=True)
        take.start()
        connections: dict[int, Connection] = {}
        deadline = time.monotonic() + CONNECT_SECONDS
        while len(connections) < count:
            try:
                connection = arrived.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                missing = sorted(set(range(1, count + 1)) - connections.keys())
                raise TimeoutError(
                    f"processes {missing} did not connect within {CONNECT_SECONDS:.0f} s"
                ) from None
            connections[connection.recv()] = connection
        return connections


def _take(listener: Listener, arrived: "queue.SimpleQueue[Connection]", count: int) -> None:
    """Accept so many connections; what does not know the key is turned away."""
    while count:
        with contextlib.suppress(multiprocessing.AuthenticationError, EOFError, OSError):
            arrived.put(listener.accept())
            count -= 1
