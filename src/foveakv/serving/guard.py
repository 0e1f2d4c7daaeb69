"""Checks of every HTTP request before it is routed: the Host header and the API key."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foveakv.serving.errors import ApiError

OPEN = ("/", "/health")
"""Paths that need no key; so do the page's files."""


class Guard:
    """ASGI middleware; see `foveakv.serving.app.create_app`. count: called with the status of every response of /v1."""

    def __init__(
        self, app: ASGIApp, *, api_key: str | None, hosts: tuple[str, ...] | None, count: Callable[[int], None]
    ) -> None:
        self.app = app
        self._key = None if api_key is None else _digest(api_key)
        self._hosts = None if hosts is None else {host.lower() for host in hosts}
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"]

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start" and path.startswith("/v1/"):
                self._count(message["status"])
            await send(message)

        error = self._refuse(path, Headers(scope=scope))
        if error is None:
            await self.app(scope, receive, counted)
        else:
            await JSONResponse(error.body(), error.status, error.headers())(scope, receive, counted)

    def _refuse(self, path: str, headers: Headers) -> ApiError | None:
        if self._hosts is not None and _host(headers.get("host", "")) not in self._hosts:
            return ApiError(421, "this server does not answer to this host name; see --allow-host", code="wrong_host")
        if self._key is None or path in OPEN or path.startswith("/page/"):
            return None
        kind, _, given = headers.get("authorization", "").partition(" ")
        # Digests have one length, so that the comparison takes the same time for every key.
        if kind.lower() != "bearer" or not hmac.compare_digest(_digest(given.strip()), self._key):
            message = "the API key is missing or wrong; send it as `Authorization: Bearer KEY`"
            return ApiError(401, message, kind="authentication_error", code="invalid_api_key")
        return None


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf8", "surrogateescape")).digest()


def _host(header: str) -> str:
    """The name in a Host header, without its port."""
    header = header.strip().lower()
    if header.startswith("["):
        return header.partition("]")[0] + "]"
    return header.partition(":")[0]
