"""The HTTP server: OpenAI-compatible completions and chat over an engine, cache made visible."""

from dasc_jax.server.app import create_app
from dasc_jax.server.bridge import ServingEngine
from dasc_jax.server.run import make_server

__all__ = ["ServingEngine", "create_app", "make_server"]
