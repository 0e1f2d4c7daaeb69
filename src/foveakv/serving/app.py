"""The HTTP application: OpenAI's Chat Completions, metrics and the page."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import fastapi
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from foveakv.serving import page
from foveakv.serving.engine import Done, Event, Failed
from foveakv.serving.errors import ApiError, of_exception, overloaded
from foveakv.serving.guard import Guard
from foveakv.serving.replies import Reply
from foveakv.serving.schema import ChatRequest, parse_request
from foveakv.serving.service import Service

log = logging.getLogger("foveakv.serving")

READERS = 4
"""Requests whose images are read at the same time."""


def create_app(
    service: Service, *, api_key: str | None = None, hosts: tuple[str, ...] | None = None
) -> fastapi.FastAPI:
    """Create the application.

    Args:
        service: what it offers.
        api_key: requests to /v1 and /metrics must bring it as a bearer token; None: no key.
        hosts: the names in the Host header that are answered; None: any. On a loopback address this keeps web pages of
            other sites out that point their own name at it.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: fastapi.FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.engine.close)

    app = fastapi.FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    chat = _Chat(service)
    app.add_exception_handler(Exception, _failed)
    app.add_exception_handler(ApiError, _failed)
    app.add_exception_handler(HTTPException, _not_found)
    app.add_middleware(Guard, api_key=api_key, hosts=hosts, count=service.metrics.response)

    @app.post("/v1/chat/completions")
    async def completions(request: Request) -> Response:
        return await chat.answer(request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name != service.name:
            raise ApiError(404, f"the model {name!r} does not exist", param="model", code="model_not_found")
        return _model(service)

    @app.get("/health")
    async def health() -> JSONResponse:
        alive = service.engine.status().alive
        return JSONResponse({"status": "ok" if alive else "stopped"}, 200 if alive else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=service.metrics.content_type)

    app.include_router(page.router(service))
    return app


def _model(service: Service) -> dict[str, Any]:
    own = {"method": service.policy.method, "methods": list(service.policy.methods), "max_model_len": service.positions}
    return {"id": service.name, "object": "model", "created": 0, "owned_by": "foveakv", "foveakv": own}


class _Chat:
    """Answers chat requests."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._preparing = 0  # requests between their first byte and the engine's queue
        self._reading = asyncio.Semaphore(READERS)

    async def answer(self, request: Request) -> Response:
        service, limits = self.service, self.service.limits
        if self._preparing + service.engine.status().queue >= limits.max_queue:
            raise overloaded("the server is busy; try again later")
        self._preparing += 1
        try:
            if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
                raise ApiError(415, "the Content-Type must be application/json")
            body = await _body(request, limits.max_body_bytes, limits.body_seconds)
            # Off the event loop: a body may take a while to parse.
            asked = await asyncio.to_thread(parse_request, body)
            del body
            choice = service.check(asked)
            events = _Events()
            async with self._reading:
                generation = await asyncio.to_thread(service.prepare, asked, choice)
            handle = service.engine.submit(generation, events.sink)
            del generation
        except ClientDisconnect:
            raise ApiError(499, "the client has gone") from None
        finally:
            self._preparing -= 1
        options = asked.stream_options
        reply = Reply(
            service.name,
            asked.n or 1,
            logprobs=bool(asked.logprobs),
            usage=bool(options and options.include_usage),
        )
        return _answer(asked, reply, events, lambda: service.engine.cancel(handle), limits.write_seconds)


def _answer(
    asked: ChatRequest, reply: Reply, events: _Events, cancel: Callable[[], None], write_seconds: float
) -> Response:
    kind = _Stream if asked.stream else _Whole
    return kind(reply, events, cancel, write_seconds)


async def _body(request: Request, most: int, seconds: float) -> bytes:
    """Read the body. ApiError: it is too large, or the client is too slow."""
    too_large = ApiError(413, f"the request is larger than {most:,} bytes", code="request_too_large")
    with contextlib.suppress(ValueError):
        if int(request.headers.get("content-length", "0")) > most:
            raise too_large
    found = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                found += piece
                if len(found) > most:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the request was not complete after {seconds:g} seconds") from None
    return bytes(found)


class _Events:
    """The events of a request, from the engine's thread to the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Event] = asyncio.Queue()

    def sink(self, event: Event) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            event = await self._queue.get()
            yield event
            if isinstance(event, (Done, Failed)):
                return


class _Running(Response):
    """The reply to a request that the engine runs; the engine is told when the client goes."""

    def __init__(self, reply: Reply, events: _Events, cancel: Callable[[], None], write_seconds: float) -> None:
        super().__init__()
        self.reply = reply
        self.events = events
        self.cancel = cancel
        self.write_seconds = write_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def patient(message: Any) -> None:
            async with asyncio.timeout(self.write_seconds):
                await send(message)

        work = asyncio.ensure_future(self.write(scope, patient))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                with contextlib.suppress(TimeoutError, OSError):  # a client that does not read, or has gone
                    await work
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            self.cancel()

    async def write(self, scope: Scope, send: Send) -> None:
        raise NotImplementedError


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Whole(_Running):
    """The reply at once."""

    async def write(self, scope: Scope, send: Send) -> None:
        events = [event async for event in self.events]
        last = events[-1]
        if isinstance(last, Failed):
            response: Response = error_response(last.error)
        else:
            response = JSONResponse(self.reply.whole(events))
        await response(scope, _never, send)


class _Stream(_Running):
    """Server-sent events. An error before the first text is a plain JSON error."""

    async def write(self, scope: Scope, send: Send) -> None:
        started = False
        async for event in self.events:
            if not started and isinstance(event, Failed):
                await error_response(event.error)(scope, _never, send)
                return
            if not started:
                started = True
                headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                await _parts(send, self.reply.opening())
            await _parts(send, self.reply.chunks(event))
        await send({"type": "http.response.body", "body": b""})


async def _parts(send: Send, chunks: list[bytes]) -> None:
    for chunk in chunks:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})


async def _never() -> Any:
    await asyncio.Event().wait()


def error_response(error: ApiError) -> JSONResponse:
    """An error as OpenAI's JSON."""
    return JSONResponse(error.body(), error.status, error.headers())


async def _failed(request: Request, error: Exception) -> Response:
    found = of_exception(error)
    if found.status >= 500 and not isinstance(error, ApiError):
        log.error("a request has failed", exc_info=error)
    return error_response(found)


async def _not_found(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 500)
    what = {404: "there is nothing here", 405: "this method is not allowed here"}.get(status, "the request failed")
    return error_response(ApiError(status, f"{request.method} {request.url.path[:200]}: {what}"))
