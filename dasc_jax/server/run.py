"""Serve an engine until a signal, and leave no request behind."""

import socket

import uvicorn

from dasc_jax.server.app import create_app
from dasc_jax.server.bridge import ServingEngine

DRAIN_SECONDS = 10


class DrainingServer(uvicorn.Server):
    """uvicorn waits at its end for open responses; ours are told to end first."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the open calls, then everything else."""
        app = self.config.app
        app.state.calls.stop()  # type: ignore[union-attr]
        await super().shutdown(sockets)


def make_server(
    engine: ServingEngine, model_name: str, host: str = "127.0.0.1", port: int = 8000
) -> DrainingServer:
    """A server that `run()` blocks in until SIGINT or SIGTERM, or until `should_exit` is set.

    Args:
        engine: a running engine; stopping it afterwards is the caller's business.
        model_name: the name that clients ask for.
        host, port: where to listen.
    """
    config = uvicorn.Config(
        create_app(engine, model_name),
        host=host,
        port=port,
        log_level="warning",
        log_config=None,  # the process's logging stays as its owner set it up
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )
    return DrainingServer(config)
