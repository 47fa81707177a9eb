"""Between the event loop of the server and the thread of the engine.

Every request that enters the engine leaves it: it ends by itself, or `close` aborts it, whatever
happens to the call that wanted it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol, runtime_checkable

from starlette.types import Receive

from dasc_jax.engine.request import OnEvent, Request, RequestResult, TokenEvent
from dasc_jax.server.errors import ApiError
from dasc_jax.server.metrics import Metrics

logger = logging.getLogger("dasc_jax.server")

ALIVE_SECONDS = 0.5
"""How often a call that hears nothing asks whether the engine still runs."""


@runtime_checkable
class ServingEngine(Protocol):
    """What the server needs of an engine; all of it is called from threads of the server.

    `submit` returns at once; it raises ValueError for a request that can never run and RuntimeError
    when the engine has stopped. `abort` takes the id of any request, waiting, running or long gone.
    `alive` is false once the thread has ended or failed, in which case `failure` says why.
    `flush_cache` returns False, having done nothing, while requests run.
    """

    model: Any
    config: Any
    failure: BaseException | None

    @property
    def alive(self) -> bool: ...
    def submit(self, request: Request, on_event: OnEvent) -> Any: ...
    def abort(self, request_id: str) -> Any: ...
    def flush_cache(self) -> bool: ...
    def stats(self) -> Mapping[str, float]: ...


class OpenCalls:
    """The calls that a server has open, and where their results are counted."""

    def __init__(self, engine: ServingEngine, metrics: Metrics) -> None:
        self.engine, self.metrics = engine, metrics
        self._open: set[Generation] = set()
        self._stopping = False

    def enter(self, generation: "Generation") -> None:
        """Note an open call.

        Raises:
            ApiError: 503, when the server is stopping.
        """
        if self._stopping:
            raise ApiError("the server is stopping", status=503, code="server_stopping")
        self._open.add(generation)

    def leave(self, generation: "Generation") -> None:
        """Forget a call."""
        self._open.discard(generation)

    def stop(self) -> None:
        """Refuse new calls, and end the open ones with an error that says why."""
        self._stopping = True
        for generation in tuple(self._open):
            error = ApiError("the server is stopping", status=503, code="server_stopping")
            generation.fail(self.stopped() if self.engine.failure else error)

    def stopped(self) -> ApiError:
        """What a call hears of an engine that runs no longer."""
        failure = self.engine.failure
        reason = f": {type(failure).__name__}: {failure}" if failure else ""
        return ApiError(f"the engine has stopped{reason}", status=503, code="engine_stopped")

    def finished(self, result: RequestResult, reason: str) -> None:
        """Count and log a request that has ended, `reason` as the client sees it."""
        self.metrics.finished(result, reason)
        report = result.report
        logger.info(
            "%s %s: prompt %d, cached %d (%s, %s), generated %d, ttft %.1f ms, latency %.1f ms",
            result.id,
            reason,
            result.prompt_tokens,
            result.cached_tokens,
            report.reason,
            report.policy,
            len(result.tokens),
            1e3 * result.ttft,
            1e3 * result.latency,
        )


class ClientGone(Exception):
    """The client closed the connection: nobody reads the response."""


class Generation:
    """The requests of one call while the engine has them."""

    def __init__(self, server: "OpenCalls", requests: tuple[Request, ...]) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, TokenEvent] | Exception] = asyncio.Queue()
        self._requests = requests
        self._index = {request.id: index for index, request in enumerate(requests)}
        self._running: set[str] = set()
        self._last_token: dict[str, float] = {}
        self._complete: set[str] = set()  # ended by a stop string
        self._aborted: set[str] = set()

    def submit(self) -> None:
        """Hand every request to the engine, or none.

        Raises:
            ApiError: 400 for a request that can never run, 503 when the engine has stopped.
        """
        self._server.enter(self)
        try:
            for request in self._requests:
                self._running.add(request.id)
                self._server.engine.submit(request, self._on_event)
        except ValueError as error:
            self._running.discard(request.id)
            self.close()
            raise ApiError(str(error)) from error
        except RuntimeError as error:
            self.close()
            raise self._server.stopped() from error

    async def events(self) -> AsyncIterator[tuple[int, TokenEvent]]:
        """Events with the index of their request, until each has ended.

        Raises:
            ClientGone: the client hung up.
            ApiError: 503, when the engine or the server stops.
        """
        ended = 0
        while ended < len(self._requests):
            item = await self._next()
            if isinstance(item, Exception):
                raise item
            ended += item[1].result is not None
            yield item

    def stop(self, index: int) -> None:
        """End a request whose text is complete, ahead of the engine's own reasons."""
        name = self._requests[index].id
        if name in self._running and name not in self._complete:
            self._complete.add(name)
            self._server.engine.abort(name)

    def fail(self, error: Exception) -> None:
        """Abort what still runs, and raise `error` where the events are read."""
        self._abort()
        self._queue.put_nowait(error)

    def close(self) -> None:
        """Abort what still runs. The engine's last word on it is still counted."""
        self._abort()
        self._server.leave(self)

    @contextlib.asynccontextmanager
    async def watched(self, receive: Receive) -> AsyncIterator[None]:
        """Abort as soon as the client hangs up, and in any case at the end."""
        watcher = asyncio.create_task(self._watch(receive))
        try:
            yield
        finally:
            watcher.cancel()
            self.close()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.fail(ClientGone())

    async def _next(self) -> tuple[int, TokenEvent] | Exception:
        while self._queue.empty():
            try:
                return await asyncio.wait_for(self._queue.get(), ALIVE_SECONDS)
            except TimeoutError:
                if not self._server.engine.alive:
                    return self._server.stopped()
        return self._queue.get_nowait()

    def _abort(self) -> None:
        for name in self._running - self._complete - self._aborted:
            self._aborted.add(name)
            self._server.engine.abort(name)

    def _on_event(self, event: TokenEvent) -> None:
        # The loop is closed when a server has shut down before its engine: nobody listens any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._deliver, event, time.monotonic())

    def _deliver(self, event: TokenEvent, now: float) -> None:
        if event.token is not None:
            last = self._last_token.get(event.id)
            self._last_token[event.id] = now
            if last is not None:
                self._server.metrics.between_tokens(now - last)
        if event.result is not None:
            self._running.discard(event.id)
            complete = event.id in self._complete
            self._server.finished(event.result, "stop" if complete else event.result.finish_reason)
        self._queue.put_nowait((self._index[event.id], event))
