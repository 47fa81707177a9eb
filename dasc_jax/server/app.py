"""The HTTP application over one engine: OpenAI's `/v1`, health, metrics and the cache flush."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from dasc_jax.engine.request import RequestResult
from dasc_jax.server.bridge import ClientGone, Generation, OpenCalls, ServingEngine
from dasc_jax.server.choice import Choice, Delta
from dasc_jax.server.errors import ApiError
from dasc_jax.server.fields import parse_object
from dasc_jax.server.metrics import EngineStats, Metrics
from dasc_jax.server.protocol import Call, ServedModel, parse_chat, parse_completion
from dasc_jax.server.responses import ResponseForm, encode, joined

CLIENT_CLOSED = 499
"""Status of a response that nobody reads."""

EVENT_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


def create_app(engine: ServingEngine, model_name: str) -> Starlette:
    """The ASGI application over a running engine. `app.state.calls.stop()` ends every open call.

    Args:
        engine: see `ServingEngine`; its life is the caller's business.
        model_name: the name that clients ask for, and `/v1/models` lists.
    """
    service = Service(engine, model_name)
    endpoints: tuple[tuple[str, Any, list[str]], ...] = (
        ("/v1/completions", service.completions, ["POST"]),
        ("/v1/chat/completions", service.chat, ["POST"]),
        ("/v1/models", service.models, ["GET"]),
        ("/v1/models/{name:path}", service.model, ["GET"]),
        ("/health", service.health, ["GET"]),
        ("/metrics", service.expose_metrics, ["GET"]),
        ("/flush_cache", service.flush_cache, ["GET", "POST"]),
    )
    app = Starlette(
        routes=[Route(path, endpoint, methods=methods) for path, endpoint, methods in endpoints],
        exception_handlers={
            ApiError: service.refuse,
            HTTPException: service.refuse_http,
            ClientDisconnect: service.forget,
            Exception: service.refuse_fault,
        },
        lifespan=service.lifespan,
    )
    app.state.calls = service.calls
    return app


class Service:
    """The endpoints of one application."""

    def __init__(self, engine: ServingEngine, model_name: str) -> None:
        model = engine.model
        self._engine = engine
        self._model = ServedModel(
            name=model_name,
            vocab_size=model.config.vocab_size,
            max_context=min(model.config.max_context, engine.config.max_context),
            stop_ids=frozenset(model.config.eos_token_ids),
            tokenizer=model.tokenizer,
        )
        self._created = int(time.time())
        self._metrics = Metrics(EngineStats(engine.stats, lambda: engine.alive))
        self.calls = OpenCalls(engine, self._metrics)
        # One thread: prompts of any length are tokenised off the event loop, one after the other.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="dasc-prompts")

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """End the open calls with the application."""
        try:
            yield
        finally:
            self.calls.stop()
            self._reader.shutdown(wait=False)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._answer(request, parse_completion)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._answer(request, parse_chat)

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        name = request.path_params["name"]
        if name != self._model.name:
            raise ApiError(f"the model {name!r} does not exist", status=404, code="model_not_found")
        return JSONResponse(self._card())

    async def health(self, request: Request) -> Response:
        """GET /health: 503 once the engine's thread has ended."""
        alive = self._engine.alive
        status = "ok" if alive else "the engine has stopped"
        return JSONResponse({"status": status}, status_code=200 if alive else 503)

    async def expose_metrics(self, request: Request) -> Response:
        """GET /metrics."""
        accept = request.headers.get("accept")
        content, content_type = await asyncio.to_thread(self._metrics.expose, accept)
        return Response(content, headers={"content-type": content_type})

    async def flush_cache(self, request: Request) -> Response:
        """POST (or GET) /flush_cache: 409, with nothing done, while requests run."""
        stopped = ApiError("the engine has stopped", status=503, code="engine_stopped")
        if not self._engine.alive:
            raise stopped
        try:
            flushed = await asyncio.to_thread(self._engine.flush_cache)
        except RuntimeError as error:
            raise stopped from error
        if not flushed:
            raise ApiError("requests are running; nothing was flushed", status=409, code="busy")
        return JSONResponse({"status": "flushed"})

    async def refuse(self, request: Request, error: Exception) -> Response:
        """An ApiError as its response."""
        assert isinstance(error, ApiError)
        self._metrics.refused(error.status)
        return AsciiResponse(error.body, status_code=error.status)

    async def refuse_http(self, request: Request, error: Exception) -> Response:
        """No such path, or no such method, in the form of every other error."""
        assert isinstance(error, HTTPException)
        reason = f"{request.method} {request.url.path}: {error.detail}"
        response = await self.refuse(request, ApiError(reason, status=error.status_code))
        response.headers.update(error.headers or {})
        return response

    async def forget(self, request: Request, error: Exception) -> Response:
        """The client left before its request was complete: nobody reads the response."""
        return Response(status_code=CLIENT_CLOSED)

    async def refuse_fault(self, request: Request, error: Exception) -> Response:
        """A fault of ours: the log has the trace, the client its kind."""
        message = f"internal error ({type(error).__name__})"
        return await self.refuse(request, ApiError(message, status=500, code="internal_error"))

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "dasc_jax",
            "max_model_len": self._model.max_context,
        }

    async def _answer(
        self, request: Request, parse: Callable[[dict[str, Any], ServedModel], Call]
    ) -> Response:
        body = await request.body()
        loop = asyncio.get_running_loop()
        call = await loop.run_in_executor(
            self._reader, lambda: parse(parse_object(body), self._model)
        )
        generation = Generation(self.calls, call.requests)
        generation.submit()
        choices = [Choice(call, index, self._model) for index in range(len(call.requests))]
        form = ResponseForm(call, self._model)
        if call.stream:
            lines = _lines(generation, choices, form, call.include_usage)
            return EventStream(generation, lines)
        deltas: list[list[Delta]] = [[] for _ in choices]
        try:
            async with generation.watched(request.receive):
                async for index, delta in _deltas(generation, choices):
                    deltas[index].append(delta)
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED)
        content = form.body(choices, [joined(parts) for parts in deltas])
        return Response(encode(content), media_type="application/json")


class AsciiResponse(JSONResponse):
    """JSON in ASCII: an error may quote what the client sent, and that need not be Unicode text."""

    def render(self, content: Any) -> bytes:
        """The encoded body."""
        return encode(content, ascii_only=True).encode()


class EventStream(Response):
    """A server-sent event stream that ends its generation when it ends itself, however it ends."""

    def __init__(self, generation: Generation, lines: AsyncIterator[str]) -> None:
        self.status_code, self.background = 200, None
        self.init_headers(EVENT_HEADERS)
        self._generation, self._lines = generation, lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events as they come; a client that is gone gets no more."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        part = {"type": "http.response.body"}
        with contextlib.suppress(OSError, ClientGone):
            async with self._generation.watched(receive):
                await send(start)
                async for line in self._lines:
                    await send({**part, "body": line.encode(), "more_body": True})
                await send({**part, "body": b"", "more_body": False})


async def _deltas(
    generation: Generation, choices: list[Choice]
) -> AsyncIterator[tuple[int, Delta]]:
    """What each choice gains until all have ended; a stop string ends its request in the engine."""
    async for index, event in generation.events():
        delta = choices[index].push(event)
        if choices[index].stopped:
            generation.stop(index)
        if delta is not None:
            _check(delta)
            yield index, delta


def _check(delta: Delta) -> None:
    result: RequestResult | None = delta.result
    if delta.finish == "error":
        reason = (result and result.error) or "the engine gave no reason"
        raise ApiError(f"the request failed: {reason}", status=500, code="engine_error")
    if delta.finish == "abort":
        raise ApiError("the request was aborted", status=503, code="aborted")


async def _lines(
    generation: Generation, choices: list[Choice], form: ResponseForm, include_usage: bool
) -> AsyncIterator[str]:
    """The stream: a chunk a delta, usage where asked for; an error in place of what it prevents."""
    try:
        async for index, delta in _deltas(generation, choices):
            yield f"data: {encode(form.chunk(index, delta))}\n\n"
        if include_usage:
            yield f"data: {encode(form.usage_chunk(choices))}\n\n"
    except ApiError as error:
        yield f"data: {encode(error.body, ascii_only=True)}\n\n"
    yield "data: [DONE]\n\n"
