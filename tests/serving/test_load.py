"""Load: bursts, clients that go, full queues and memory. What is stored returns to nothing, and nothing crashes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import json
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import families
import pytest
import served
import tiny_folder
import torch
from served import MODEL, Running, error_of, eventually, httpx, openai, picture_part, running, text

from foveakv.engines.transformers.cache import CompressedCache
from foveakv.models import Loaded
from foveakv.serving.choice import Policy
from foveakv.serving.limits import Limits

POLICY = Policy("snapkv", {"budget": 0.5, **served.SMALL})
CONTENT = [picture_part(), text("what?")]
LONG = {"max_tokens": 500}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(policy=POLICY, limits=Limits(max_queue=8, max_running=4)) as found:
        yield found
        assert found.idle()


def cancelled(server: Running) -> float:
    """Number of requests that were cancelled."""
    lines = server.service.metrics.text().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if "requests_total{" in line and "cancelled" in line)


def living() -> int:
    gc.collect()
    return sum(isinstance(each, CompressedCache) for each in gc.get_objects())


def slow(server: Running, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.005) -> None:
    """Make every step of the engine take a while, so that requests overlap on any machine."""
    engine = server.service.engine
    accept = engine._accept  # type: ignore[attr-defined]

    def later(*args: Any) -> None:
        time.sleep(seconds)
        accept(*args)

    monkeypatch.setattr(engine, "_accept", later)


def test_a_burst(server: Running) -> None:
    """More clients than the queue holds: each gets the answer of a single request, or status 429."""
    alone = server.chat(CONTENT, max_tokens=10).choices[0].message.content
    before = living()

    def ask(number: int) -> str:
        try:
            if number % 2:
                return str(server.chat(CONTENT, max_tokens=10).choices[0].message.content)
            chunks = server.chat(CONTENT, max_tokens=10, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        except openai.RateLimitError as error:
            return f"refused: {error.code}, retry after {error.response.headers['retry-after']}"

    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        found = list(pool.map(ask, range(30)))
    assert set(found) <= {alone, "refused: overloaded, retry after 1"}
    assert found.count(alone) >= 8
    assert server.idle()
    assert eventually(lambda: living() <= before)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes(server: Running, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    slow(server, monkeypatch)
    before = cancelled(server)
    body = {"model": MODEL, "messages": [{"role": "user", "content": CONTENT}], "stream": stream, **LONG}
    raw = json.dumps(body).encode()
    with served.connect(server.port) as connection:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        if stream:
            assert b"200 OK" in connection.recv(1000)
        assert eventually(lambda: server.service.engine.status().stored_bytes > 0)
    assert server.idle()
    assert cancelled(server) == before + 1
    assert server.chat("hello").usage.completion_tokens == 6


def test_an_openai_stream_that_is_closed(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(server, monkeypatch)
    before = cancelled(server)
    with server.chat(CONTENT, stream=True, **LONG) as chunks:
        for _ in range(3):
            next(iter(chunks))
    assert server.idle()
    assert cancelled(server) == before + 1


def test_clients_that_go_at_any_time(server: Running) -> None:
    raw = json.dumps(
        {"model": MODEL, "messages": [{"role": "user", "content": CONTENT}], "stream": True, **LONG}
    ).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    whole = f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw
    for cut in (10, len(whole) // 2, len(whole) - 1, len(whole)):
        with served.connect(server.port) as connection:
            connection.sendall(whole[:cut])
    assert server.idle(10)
    assert eventually(lambda: server.chat("hello").usage.completion_tokens == 6)


def test_a_full_queue(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(server, monkeypatch)
    streams = [server.chat("hello", stream=True, **LONG) for _ in range(4)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(server.chat, "hello", max_tokens=1) for _ in range(8)]
        assert eventually(lambda: server.service.engine.status().queue == 8)
        with pytest.raises(openai.RateLimitError):
            server.chat("hello")
        for stream in streams:
            stream.close()
        assert [done.result().usage.completion_tokens for done in waiting] == [1] * 8
    assert server.idle()


def test_a_client_that_goes_while_it_waits(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(server, monkeypatch)
    streams = [server.chat("hello", stream=True, **LONG) for _ in range(4)]
    with pytest.raises(openai.APITimeoutError):
        server.client.with_options(timeout=0.3).chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hello"}], max_tokens=3
        )
    assert eventually(lambda: server.service.engine.status().queue == 0)
    for stream in streams:
        stream.close()
    assert server.idle()


def test_memory_for_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests run side by side while their caches fit, later ones wait; one that never fits is refused."""
    with running(policy=POLICY) as server:
        need = reserved(server)
    with running(policy=POLICY, limits=Limits(kv_bytes=int(2.5 * need), max_new_tokens=40)) as server:
        slow(server, monkeypatch)
        most = 0
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(server.chat, CONTENT, max_tokens=40) for _ in range(4)]
            while not all(each.done() for each in asked):
                status = server.service.engine.status()
                most = max(most, status.running)
                assert status.stored_bytes <= int(2.5 * need)
                time.sleep(0.005)
            assert {each.result().usage.completion_tokens for each in asked} == {40}
        assert most in (2, 3)  # what is stored is less than what was estimated
        error = server.error(CONTENT, n=4, max_tokens=40)
        assert error["code"] == "request_too_large"
        assert server.idle()


def reserved(server: Running) -> int:
    sizes = server.service.engine.sizes  # type: ignore[attr-defined]
    tokens = server.chat(CONTENT).usage.prompt_tokens
    found: int = sizes.estimate(POLICY.default().method, POLICY.default().options, tokens, 40)
    return found


def test_requests_take_turns(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short request that comes later is done before a long one, and both answers are as alone."""
    alone = [server.chat(CONTENT, max_tokens=n).choices[0].message.content for n in (60, 6)]
    slow(server, monkeypatch)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        long = pool.submit(server.chat, CONTENT, max_tokens=60)
        assert eventually(lambda: server.service.engine.status().running == 1)
        assert server.chat(CONTENT, max_tokens=6).choices[0].message.content == alone[1]
        assert not long.done()
        assert long.result().choices[0].message.content == alone[0]


def test_a_request_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(policy=POLICY, limits=Limits(request_seconds=0.3)) as server:
        slow(server, monkeypatch)
        body = {"model": MODEL, "messages": [{"role": "user", "content": CONTENT}], **LONG}
        error_of(server.post(body), 504)
        lines = server.post({**body, "stream": True}).text.strip().splitlines()
        assert "error" in json.loads(lines[-1].removeprefix("data: "))
        assert server.idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_nobody_takes(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """A client that stays and does not read: its request is dropped after `write_seconds`."""
    limits = Limits(write_seconds=0.2)
    with running(policy=POLICY, limits=limits) as server:
        app = server_app(server)
        body = {"model": MODEL, "messages": [{"role": "user", "content": CONTENT}], "stream": stream, "max_tokens": 9}

        async def exchange() -> None:
            first = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

            async def receive() -> Any:
                return first.pop() if first else await asyncio.Event().wait()

            async def send(message: Any) -> None:
                await asyncio.Event().wait()

            headers = [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")]
            scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
            await asyncio.wait_for(app({**scope, "query_string": b"", "asgi": {"version": "3.0"}}, receive, send), 60)

        asyncio.run(exchange())
        assert server.idle()


def server_app(server: Running) -> Any:
    from foveakv.serving.app import create_app

    return create_app(server.service)


def test_an_error_of_the_model_ends_one_request(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    head = server.service.model.lm_head

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise failures[0]

    for failures in ([KeyError("bug"), 500], [torch.OutOfMemoryError("none left"), 503], [MemoryError(), 503]):
        with monkeypatch.context() as patch:
            patch.setattr(head, "forward", failing)
            assert "bug" not in server.error(CONTENT, failures[1])["message"]
    assert server.idle()
    assert server.chat(CONTENT).usage.completion_tokens == 6


def test_values_that_are_no_numbers() -> None:
    model = families.build("llava")
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with running(Loaded(model, tiny_folder.processor(chat=True)), policy=POLICY) as server:
        assert "NaN" in server.error("hello", 500)["message"]
        assert server.idle()


def test_closing_frees_everything(collected: None) -> None:
    before = threading.active_count()
    with running(policy=POLICY) as server:
        stream = server.chat(CONTENT, stream=True, **LONG)
        next(iter(stream))
        model = weakref.ref(server.service.model)
        assert httpx.get(f"{server.url}/health").status_code == 200
    assert server.service.engine.status().stored_bytes == 0
    assert not server.service.engine.status().alive
    with pytest.raises(openai.APIError):
        server.chat("hello")
    stream.close()
    assert model() is not None
    assert "forward" not in vars(server.service.model)  # detached
    assert eventually(lambda: threading.active_count() <= before + 4)
