"""A server on a free port of 127.0.0.1, in a thread of the test's process. Skips where the extra `serve` is missing."""

from __future__ import annotations

import base64
import contextlib
import io
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server's packages are missing: pip install 'foveakv[serve,test]'")
pytest.importorskip("uvicorn", reason="the server's packages are missing: pip install 'foveakv[serve,test]'")
pytest.importorskip("prometheus_client", reason="the server's packages are missing: pip install 'foveakv[serve,test]'")
pytest.importorskip("openai", reason="the server's packages are missing: pip install 'foveakv[serve,test]'")
pytest.importorskip("httpx", reason="the server's packages are missing: pip install 'foveakv[serve,test]'")

import families
import httpx
import openai
import tiny_folder

from foveakv.models import Loaded
from foveakv.serving import server
from foveakv.serving.images import ImageReader
from foveakv.serving.limits import Limits
from foveakv.serving.service import Service

MODEL = "tiny"
SNAPKV = {"method": "snapkv", "options": {"window": 4, "budget": 0.5}}
SMALL = {"window": 4, "kernel": 1}


class Running:
    """A server that runs. service: what it offers; url: its address; client: an openai client for it."""

    def __init__(self, service: Service, port: int, api_key: str | None) -> None:
        self.service = service
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key or "none", max_retries=0, timeout=60)

    def chat(self, content: Any = "What is it?", **options: Any) -> Any:
        """A completion for one user message; greedy, short."""
        options = {"temperature": 0, "max_tokens": 6, **options}
        messages = [{"role": "user", "content": content}]
        return self.client.chat.completions.create(model=MODEL, messages=messages, **options)

    def post(self, body: Any, **headers: str) -> httpx.Response:
        """A raw request."""
        raw = {"content": body} if isinstance(body, (bytes, str)) else {"json": body}
        return httpx.post(
            f"{self.url}/v1/chat/completions",
            headers={"content-type": "application/json", **headers},
            timeout=60,
            **raw,
        )

    def error(self, content: Any, status: int = 400, **fields: Any) -> dict[str, Any]:
        """The error of a request that must fail, in OpenAI's form."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}
        return error_of(self.post(body), status)

    def idle(self, seconds: float = 30) -> bool:
        """Wait until nothing runs, and nothing is stored."""
        return eventually(lambda: _counts(self.service) == (0, 0, 0, 0), seconds)


def _counts(service: Service) -> tuple[int, int, int, int]:
    status = service.engine.status()
    return status.queue, status.running, status.stored_bytes, status.reserved_bytes


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error in a response; every error has the same form, and a message."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def eventually(true: Callable[[], bool], seconds: float = 30) -> bool:
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@contextlib.contextmanager
def running(
    loaded: Any = None,
    *,
    limits: Limits | None = None,
    api_key: str | None = None,
    images: dict[str, Any] | None = None,
    hosts: tuple[str, ...] | None = None,
    is_demo: bool = False,
    **options: Any,
) -> Iterator[Running]:
    """Run a server with a tiny model, or with another one."""
    limits = limits or Limits()
    loaded = loaded or Loaded(families.build("llava"), tiny_folder.processor(chat=True))
    service = server.build_service(
        loaded, MODEL, limits=limits, images=ImageReader(limits, **(images or {})), is_demo=is_demo, **options
    )
    app = server.create_app(service, api_key=api_key, hosts=hosts or server.hosts_for("127.0.0.1"))
    listening = server.listen("127.0.0.1", 0)
    running_server = server.make_server(app)
    thread = threading.Thread(target=running_server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        assert eventually(lambda: running_server.started)
        yield Running(service, listening.getsockname()[1], api_key)
    finally:
        running_server.should_exit = True
        thread.join(30)
        service.engine.close()
        listening.close()
        assert not thread.is_alive()


def data_url(image: Any, kind: str = "png") -> str:
    """An image as a data URL."""
    content = io.BytesIO()
    image.save(content, kind)
    return f"data:image/{kind};base64," + base64.b64encode(content.getvalue()).decode()


def picture_part(seed: int = 0, **options: Any) -> dict[str, Any]:
    return part(data_url(tiny_folder.picture(seed, **options)))


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def connect(port: int) -> socket.socket:
    """A plain connection."""
    return socket.create_connection(("127.0.0.1", port), 30)


@contextlib.contextmanager
def connect_free() -> Iterator[int]:
    """A port that is free."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found.getsockname()[1]
