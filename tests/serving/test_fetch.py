"""Images from URLs: public addresses only, whatever the name, its DNS answers and its redirects say."""

from __future__ import annotations

import contextlib
import http.server
import io
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import served
import tiny_folder

from foveakv.serving import fetch
from foveakv.serving.choice import Policy
from foveakv.serving.errors import ApiError

PRIVATE = [
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.0.1", "224.0.0.1",
    "255.255.255.255", "240.0.0.1", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1",
    "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a00:1", "2002:7f00:1::", "2002:a00:1::", "::127.0.0.1", "192.0.2.1",
    "2001:db8::1", "nonsense",
]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses(address: str) -> None:
    assert not fetch.is_public(address)


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:4700::1111", "::ffff:93.184.216.34", "64:ff9b::5db8:d822"])
def test_public_addresses(address: str) -> None:
    assert fetch.is_public(address)


HOSTS = [
    "http://127.0.0.1/a.png", "http://localhost/", "http://2130706433/", "http://0x7f000001/", "http://0177.0.0.1/",
    "http://127.1/", "http://[::1]/", "http://[::ffff:127.0.0.1]/", "http://0/", "https://127.0.0.1/",
]  # fmt: skip


@pytest.mark.parametrize("url", HOSTS)
def test_names_of_this_machine(url: str) -> None:
    with pytest.raises(ApiError, match=r"not public|cannot be resolved"):
        fetch.fetch(url, most=100, seconds=2)


WRONG = [
    "ftp://example.com/", "http:///a", "http://", "http://user@example.com/", "http://user:pw@example.com/",
    "http://example.com:22/", "http://example.com:99999/", "http://exa mple.com/", "http://example.com/\r\nHost: a",
    "http://[::1", "http://" + "a" * 300 + ".com/", "http://example.com\\@127.0.0.1/", "gopher://example.com/",
]  # fmt: skip


@pytest.mark.parametrize("url", WRONG)
def test_wrong_urls(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolved(*unused: Any, **also: Any) -> Any:
        raise OSError("no DNS in this test")

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    with pytest.raises(ApiError):
        fetch.fetch(url, most=100, seconds=2)


def answers(*addresses: str) -> Any:
    """A DNS server's answers."""
    return lambda host, port, **unused: [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in addresses
    ]


def test_one_private_address_among_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", answers("93.184.216.34", "10.0.0.1"))
    with pytest.raises(ApiError, match="not public"):
        fetch.fetch("http://example.com/", most=100, seconds=2)


def test_the_checked_address_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is resolved once, so that a second answer of its DNS server cannot change where the connection goes."""
    asked, connected = [], []

    def resolve(host: str, port: int, **unused: Any) -> Any:
        asked.append(host)
        return answers("93.184.216.34" if len(asked) == 1 else "127.0.0.1")(host, port)

    def connect(address: Any, *unused: Any) -> Any:
        connected.append(address)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(ApiError, match="cannot be fetched"):
        fetch.fetch("http://example.com/", most=100, seconds=2)
    assert asked == ["example.com"]
    assert connected == [("93.184.216.34", 80)]


class Site(http.server.BaseHTTPRequestHandler):
    """A web site with an image, and traps."""

    def do_GET(self) -> None:
        content = io.BytesIO()
        tiny_folder.picture().save(content, "png")
        path = self.path.split("?")[0]
        targets = {"/moved": "/a.png", "/loop": "/loop", "/away": "http://10.0.0.1/", "/file": "file:///etc/passwd"}
        if path in targets:
            self.send_response(302)
            self.send_header("Location", targets[path])
            self.end_headers()
        elif path == "/slow":
            self.send_response(200)
            self.end_headers()
            for _ in range(100):
                self.wfile.write(b"x")
                time.sleep(0.1)
        elif path == "/a.png":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content.getvalue())
        else:
            self.send_error(404)

    def log_message(self, *unused: Any) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the client has gone
            super().handle()


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_content_and_redirects(site: str) -> None:
    options: dict[str, Any] = {"most": 100_000, "seconds": 20, "allow_private": True}
    content = fetch.fetch(f"{site}/a.png?size=1", **options)
    assert content.startswith(b"\x89PNG")
    assert fetch.fetch(f"{site}/moved", **options) == content
    for path, message in (("/loop", "too often"), ("/file", "must begin with"), ("/none", "status 404")):
        with pytest.raises(ApiError, match=message):
            fetch.fetch(site + path, **options)
    with pytest.raises(ApiError, match="larger than"):
        fetch.fetch(f"{site}/a.png", **{**options, "most": 1000})
    with pytest.raises(ApiError, match=r"too long|cannot be fetched"):
        fetch.fetch(f"{site}/slow", **{**options, "seconds": 0.5})


def test_redirects_to_private_addresses(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    public = fetch.is_public
    monkeypatch.setattr(fetch, "is_public", lambda address: address == "127.0.0.1" or public(address))
    monkeypatch.setattr(fetch, "_PORTS", {"http": int(site.rsplit(":", 1)[1]), "https": 443})
    with pytest.raises(ApiError, match="not public"):
        fetch.fetch(f"{site}/away", most=1000, seconds=20)


def test_a_server_that_may_fetch(site: str) -> None:
    policy = Policy("snapkv", {"budget": 0.5, **served.SMALL})
    content = [served.part(f"{site}/a.png"), served.text("what?")]
    with served.running(policy=policy, images={"allow_urls": True}) as server:
        assert "not public" in server.error([served.part("http://127.0.0.1/a.png")])["message"]
        assert server.error(content)["code"] == "invalid_image_url"
    with served.running(policy=policy, images={"allow_urls": True, "allow_private_urls": True}) as server:
        assert server.chat(content).usage.completion_tokens == 6
