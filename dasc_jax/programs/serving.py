"""A server around an engine: in the foreground until a signal, or in a thread for a while."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

from rich.console import Console

from dasc_jax.engine.engine import Engine
from dasc_jax.engine.peers import Followers
from dasc_jax.server import make_server

START_SECONDS = 30.0

LOOK_SECONDS = 0.05
"""How often a server in the foreground is looked at: whether it has started, whether it can go
on."""


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, taken before anything slow so that a port in use is known at once.

    Raises:
        OSError: naming host and port.
    """
    if not 0 <= port < 2**16:
        raise OSError(f"cannot listen on {host}:{port}: ports are 0..65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {error}") from error
    return listener


def serve(
    engine: Engine,
    name: str,
    listener: socket.socket,
    console: Console,
    followers: Followers | None = None,
) -> None:
    """Run the engine and its server until a signal; both have ended when this returns or raises.

    With followers they end as soon as the engine fails, too: nothing can go on without a process.
    """
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    server = make_server(engine.start(), name, host, port)

    def end() -> None:
        server.should_exit = True

    def look_after() -> None:
        while not server.started and not server.should_exit:
            time.sleep(LOOK_SECONDS)
        if server.started:
            where = f"ready: model {name!r} at http://{shown}:{port}/v1"
            console.print(where, highlight=False, soft_wrap=True)
        while followers and not server.should_exit:
            time.sleep(LOOK_SECONDS)
            if not engine.alive:
                end()

    threading.Thread(target=look_after, name="dasc-look-after", daemon=True).start()
    if followers:
        followers.watch(lose=engine.fail, leave=end)
    try:
        server.run(sockets=[listener])
    finally:
        end()
        engine.stop()


@contextlib.contextmanager
def serving(engine: Engine, name: str) -> Iterator[str]:
    """Serve from a thread on a free loopback port; gives the base URL. Both end with the block.

    Raises:
        RuntimeError: the server did not start.
    """
    with listen("127.0.0.1", 0) as listener:
        host, port = listener.getsockname()[:2]
        server = make_server(engine.start(), name, host, port)
        thread = threading.Thread(
            target=server.run, kwargs={"sockets": [listener]}, name="dasc-server", daemon=True
        )
        thread.start()
        try:
            patience = time.monotonic() + START_SECONDS
            while not server.started:
                if not thread.is_alive() or time.monotonic() > patience:
                    raise RuntimeError(f"the server on {host}:{port} did not start")
                time.sleep(0.01)
            yield f"http://{host}:{port}"
        finally:
            server.should_exit = True
            thread.join()
            engine.stop()
