"""Build a service from a model, and run it with uvicorn."""

from __future__ import annotations

import ipaddress
import logging
import socket
from typing import Any

from foveakv.errors import InputError, MissingDependencyError
from foveakv.serving.choice import Policy
from foveakv.serving.errors import INSTALL
from foveakv.serving.limits import Limits

try:
    import fastapi
    import uvicorn
except ImportError as error:
    raise MissingDependencyError(f"the server needs fastapi and uvicorn: {INSTALL}") from error

from foveakv.serving.app import create_app
from foveakv.serving.images import ImageReader
from foveakv.serving.metrics import Metrics
from foveakv.serving.service import Service
from foveakv.serving.transformers_engine import TransformersEngine

MAX_CONNECTIONS = 512
"""Open connections; uvicorn answers more with status 503."""


def build_service(
    loaded: Any,
    name: str,
    *,
    policy: Policy | None = None,
    limits: Limits | None = None,
    images: ImageReader | None = None,
    is_demo: bool = False,
) -> Service:
    """Start an engine for a model and describe the service.

    loaded: model and processor, from `foveakv.load`. name: the model's name in requests. The other arguments: see
    `Service`; by default nothing but data URLs is read.
    """
    policy, limits, metrics = policy or Policy(), limits or Limits(), Metrics()
    engine = TransformersEngine(loaded[0], loaded[1], policy=policy, limits=limits, metrics=metrics)
    metrics.watch(engine.status, engine.kv_bytes)
    return Service(
        name=name,
        engine=engine,
        model=loaded[0],
        processor=loaded[1],
        policy=policy,
        limits=limits,
        images=images or ImageReader(limits),
        metrics=metrics,
        positions=engine.sizes.positions,
        is_demo=is_demo,
    )


def hosts_for(address: str, more: tuple[str, ...] = ()) -> tuple[str, ...] | None:
    """The Host headers to answer: on a loopback address its names and `more`; elsewhere `more`, or any."""
    if is_loopback(address):
        return ("localhost", "127.0.0.1", "[::1]", address, *more)
    return more or None


def is_loopback(address: str) -> bool:
    """Whether an address to bind to is reachable from this machine alone."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """Bind before the model is loaded, so that a port in use is known at once.

    Raises:
        InputError: the address is unknown or in use.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, proto)
    except (OSError, UnicodeError) as error:  # UnicodeError: no host name can be that long
        raise InputError(f"cannot listen on {host}: {getattr(error, 'strerror', None) or error}") from error
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        found.close()
        raise InputError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    return found


def make_server(app: fastapi.FastAPI) -> uvicorn.Server:
    """A uvicorn server for an application. `run(sockets=[...])` runs it until a signal or `should_exit`."""
    config = uvicorn.Config(
        app,
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=5,
        limit_concurrency=MAX_CONNECTIONS,
        ws="none",
    )
    return uvicorn.Server(config)


__all__ = ["build_service", "create_app", "hosts_for", "is_loopback", "listen", "make_server"]
