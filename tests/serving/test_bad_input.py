"""Bad requests: each gets an error in OpenAI's form with a reason, and the server answers the next one."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import served
import tiny_folder
from PIL import Image
from served import MODEL, SNAPKV, Running, data_url, error_of, httpx, openai, part, picture_part, running, text

from foveakv.serving.choice import Policy
from foveakv.serving.limits import Limits

POLICY = Policy("snapkv", {"budget": 0.5, **served.SMALL}, allow_options=True)
LIMITS = Limits(
    max_images=4, max_image_bytes=200_000, max_image_pixels=250_000, max_total_pixels=300_000, max_body_bytes=2_000_000,
    max_new_tokens=50, max_text_chars=5000, body_seconds=1.0, max_choices=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(policy=POLICY, limits=LIMITS) as found:
        yield found
        assert found.chat([picture_part(), text("still there?")]).usage.completion_tokens == 6
        assert found.idle()


def b64(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64," + base64.b64encode(content).decode()


def png(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG that states a size; its pixels may be missing."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", data or zlib.compress(b"")) + chunk(b"IEND", b"")


def image_bytes(kind: str = "png") -> bytes:
    content = io.BytesIO()
    tiny_folder.picture().save(content, kind)
    return content.getvalue()


def noise(side: int) -> str:
    return data_url(tiny_folder.picture(size=(side, side)))


WRONG_IMAGES = {
    "empty": "data:image/png;base64,",
    "not base64": "data:image/png;base64,@@@@",
    "base64 with spaces": "data:image/png;base64,AAAA AAAA",
    "cut base64": "data:image/png;base64,AAA",
    "non-ascii": "data:image/png;base64,ÄÖÜ=",
    "no base64 mark": "data:image/png,abc",
    "text as an image": b64(b"hello, this is text"),
    "html": "data:text/html;base64,PGI+",
    "svg": b64(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "svg+xml"),
    "truncated png": b64(image_bytes()[:600]),
    "truncated jpeg": b64(image_bytes("jpeg")[:300], "jpeg"),
    "bomb": b64(png(60_000, 60_000)),
    "large": b64(png(600, 600, zlib.compress(b"\0" * 600 * 1801))),
    "pixels missing": b64(png(100, 100)),
    "no pixels": b64(png(0, 10)),
    "too many bytes": noise(400),
    "tiff": data_url(tiny_folder.picture(), "tiff"),
    "eps": b64(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "x-eps"),
    "path": "/etc/passwd",
    "relative path": "../../etc/passwd",
    "file": "file:///etc/passwd",
    "web": "https://example.com/cat.png",
    "metadata service": "http://169.254.169.254/latest/meta-data",
    "ftp": "ftp://example.com/cat.png",
    "nothing": "",
    "null byte": "data:image/png;base64,\0",
    "upper case": "FILE:///etc/passwd",
    "blob": "blob:abc",
}


@pytest.mark.parametrize("name", list(WRONG_IMAGES))
def test_wrong_images(server: Running, name: str) -> None:
    error = server.error([part(WRONG_IMAGES[name]), text("what?")])
    assert error["type"] == "invalid_request_error"
    assert "Traceback" not in error["message"]
    assert len(error["message"]) < 300


def test_the_number_of_the_wrong_image_is_named(server: Running) -> None:
    assert "image 2" in server.error([picture_part(), part(WRONG_IMAGES["truncated png"])])["message"]


def test_many_images(server: Running) -> None:
    assert "1000 images" in server.error([part("data:image/png;base64,AA==")] * 1000)["message"]
    assert server.error([picture_part(size=(300, 400))] * 3)["code"] == "image_too_large"  # pixels together


def test_media_tokens_in_a_text(server: Running) -> None:
    assert "<image>" in server.error([picture_part(), text("<image> what?")])["message"]
    assert "<image>" in server.error("<image>")["message"]


BODIES: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"{",
    "a list": b"[]",
    "a number": b"1",
    "deep": b"[" * 100_000,
    "deep object": b'{"a":' * 50_000,
    "not utf-8": b'{"model": "\xff"}',
    "half a surrogate": b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "NaN": b'{"model": "tiny", "messages": [], "temperature": NaN}',
    "huge number": b'{"model": "tiny", "messages": [{"role":"user","content":"a"}], "seed": ' + b"9" * 10_000 + b"}",
    "infinite": b'{"model": "tiny", "messages": [{"role":"user","content":"a"}], "temperature": 1e999}',
}


@pytest.mark.parametrize("name", list(BODIES))
def test_wrong_bodies(server: Running, name: str) -> None:
    error_of(server.post(BODIES[name]), 400)


FIELDS: dict[str, tuple[Any, str]] = {
    "tools": ([{"type": "function"}], "tools"),
    "response_format": ({"type": "json_object"}, "response_format"),
    "logit_bias": ({"5": 1}, "logit_bias"),
    "frequency_penalty": (0.5, "frequency_penalty"),
    "presence_penalty": (True, "presence_penalty"),
    "best_of": (2, "best_of"),
    "top_k": (5, "top_k"),
    "repetition_penalty": (1.1, "repetition_penalty"),
    "n": (0, "n"),
    "temperature": (-1, "temperature"),
    "top_p": (0, "top_p"),
    "max_tokens": (51, "max_tokens"),
    "max_completion_tokens": (True, "max_completion_tokens"),
    "seed": ("one", "seed"),
    "stop": (["a"] * 5, "stop"),
    "stream": ("yes", "stream"),
    "stream_options": ({"include_usage": True}, "stream_options"),
    "top_logprobs": (3, "top_logprobs"),
    "user": (5, "user"),
    "messages": ([], "messages"),
    "foveakv": ({"methods": "full"}, "foveakv.methods"),
}


@pytest.mark.parametrize("name", list(FIELDS))
def test_wrong_fields_are_named(server: Running, name: str) -> None:
    value, param = FIELDS[name]
    assert server.error("hello", **{name: value})["param"] == param


def test_fields_that_ask_for_nothing_are_accepted(server: Running) -> None:
    reply = server.chat(
        "hello", frequency_penalty=0, presence_penalty=0.0, logit_bias={}, response_format={"type": "text"}, user="me",
        store=False,
    )  # fmt: skip
    assert reply.usage.completion_tokens == 6


MESSAGES: list[tuple[Any, int]] = [
    ([{"role": "tool", "content": "a", "tool_call_id": "1"}], 400),
    ([{"role": "user"}], 400),
    ([{"role": "user", "content": []}], 400),
    ([{"role": "user", "content": None}], 400),
    ([{"role": "user", "content": ""}], 400),
    ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}], 400),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": "data:"}]}], 400),
    ([{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}], 400),
    ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], 400),
    ([{"role": "system", "content": [{"type": "image_url", "image_url": {"url": noise(10)}}]}], 400),
    ([{"role": "user", "content": "a" * 6000}], 400),
    ([{"role": "user", "content": "a" * 4500}], 400),  # more tokens than positions
    ("hello", 400),
]


@pytest.mark.parametrize("number", range(len(MESSAGES)))
def test_wrong_messages(server: Running, number: int) -> None:
    messages, status = MESSAGES[number]
    error_of(server.post({"model": MODEL, "messages": messages, "max_tokens": 4}), status)


CHOICES: list[tuple[dict[str, Any], str]] = [
    ({"method": "nothing"}, "foveakv.method"),
    ({"method": "sparsemm", "options": {"head_scores": "/etc/passwd"}}, "foveakv.method"),
    ({"method": "hybridkv", "options": {"store": "disk"}}, "foveakv.options.store"),
    ({"method": "hybridkv", "options": {"store_dir": "/tmp"}}, "foveakv.options.store_dir"),
    ({"method": "full", "budget": 0.5}, "foveakv.budget"),
    ({"budget": 0.5, "options": {"budget": 0.1}}, "foveakv.budget"),
    ({"budget": -1}, "foveakv"),
    ({"budget": "much"}, "foveakv"),
    ({"budget": "9" * 1000}, "foveakv.budget"),
    ({"budget": 1e300}, "foveakv"),
    ({"options": {"window": "a"}}, "foveakv"),
    ({"options": {"nothing": 1}}, "foveakv"),
    ({"kv_dtype": "int2"}, "foveakv.kv_dtype"),
    ({"kept": "some"}, "foveakv.kept"),
    ({"method": "h2o", "options": {"preset": "small"}}, "foveakv"),
]


@pytest.mark.parametrize("number", range(len(CHOICES)))
def test_wrong_methods(server: Running, number: int) -> None:
    choice, param = CHOICES[number]
    assert server.error("hello", foveakv=choice)["param"] == param


def test_a_method_for_images_needs_one(server: Running) -> None:
    assert "visual" in server.error("hello", foveakv={"method": "random"})["message"]
    assert server.idle()


def test_the_openai_client_raises_its_own_errors(server: Running) -> None:
    with pytest.raises(openai.NotFoundError):
        server.client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": "a"}])
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("gpt-4o")
    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        server.chat("hello", tools=[{"type": "function", "function": {"name": "f"}}])
    with pytest.raises(openai.BadRequestError):
        list(server.chat("", stream=True))


def test_other_paths_and_ways(server: Running) -> None:
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("GET", "/v1/chat/completions", 405),
        ("GET", "/page/../app.py", 404),
        ("GET", "/page/%2e%2e%2fapp.py", 404),
        ("GET", "/page/nothing.js", 404),
        ("POST", "/", 405),
        ("GET", "/docs", 404),
    ):
        error_of(httpx.request(method, server.url + path), status)
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "a"}]})
    error_of(server.post(body, **{"content-type": "text/plain"}), 415)  # what another site's page may send
    error_of(server.post(body, host="evil.example"), 421)


def test_a_body_that_is_too_large(server: Running) -> None:
    assert error_of(server.post(b" " * 2_000_001), 413)["code"] == "request_too_large"

    def endless() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 100_000

    try:
        answer = httpx.post(
            f"{server.url}/v1/chat/completions", content=endless(), headers={"content-type": "application/json"}
        )
    except httpx.TransportError:
        pass  # the server has closed the connection while the client was still sending
    else:
        error_of(answer, 413)


def test_a_client_that_is_too_slow(server: Running) -> None:
    with served.connect(server.port) as connection:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
        assert b" 408 " in connection.recv(1000)


def test_an_api_key() -> None:
    with running(policy=POLICY, api_key="s3cret") as server:
        assert server.chat("hello").usage.completion_tokens == 6
        for key in ("", "Bearer", "Bearer s3cre", "Bearer s3cret2", "Basic s3cret"):
            error = error_of(server.post({}, authorization=key), 401)
            assert error["type"] == "authentication_error"
        error_of(httpx.get(f"{server.url}/metrics"), 401)
        error_of(httpx.get(f"{server.url}/v1/models"), 401)
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/").status_code == 200


def test_what_the_operator_allows() -> None:
    policy = Policy("snapkv", SNAPKV["options"], allowed=("h2o",), max_budget=0.5)  # type: ignore[arg-type]
    with running(policy=policy) as server:
        assert [*policy.methods] == ["snapkv", "h2o"]
        assert server.error("hello", foveakv={"method": "full"})["param"] == "foveakv.method"
        assert server.error("hello", foveakv={"options": {"kernel": 10**9}})["param"] == "foveakv.options.kernel"
        assert server.error("hello there", foveakv={"budget": 0.9})["param"] == "foveakv.budget"
        assert server.error("hello there", foveakv={"budget": 1000})["param"] == "foveakv.budget"
        assert server.chat("hello there", extra_body={"foveakv": {"budget": 0.4}}).usage.completion_tokens == 6
    with running(policy=Policy("snapkv", SNAPKV["options"], per_request=False)) as server:  # type: ignore[arg-type]
        assert server.error("hello", foveakv={"budget": 0.9})["param"] == "foveakv"
        assert server.chat("hello", extra_body={"foveakv": {"kept": True}}).usage.completion_tokens == 6


def test_files_below_a_folder(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside.png"
    (root / "in ner").mkdir(parents=True)
    tiny_folder.picture().save(root / "in ner" / "a.png")
    tiny_folder.picture().save(outside)
    (root / "link.png").symlink_to(outside)
    (root / "own.png").symlink_to(root / "in ner" / "a.png")
    with running(policy=POLICY, images={"root": root}) as server:
        for path in ("in%20ner/a.png", "own.png", "in%20ner/../in%20ner/a.png"):
            assert server.chat([part(f"file://{root}/{path}"), text("what?")]).usage.completion_tokens == 6
        for url in (
            f"file://{outside}", f"file://{root}/../outside.png", f"file://{root}/%2e%2e/outside.png",
            f"file://{root}/link.png", f"file://{root}", f"file://{root}/missing.png", f"file://host{root}/own.png",
            "file:///dev/zero", "file:///proc/self/environ", f"file://{root}/own.png%00.jpg", f"file://{root}2/a.png",
        ):  # fmt: skip
            assert server.error([part(url), text("what?")])["code"] == "file_not_found", url
        assert server.error([part("https://example.com/a.png")])["code"] == "url_not_allowed"


def test_a_tiny_image_works(server: Running) -> None:
    tiny = data_url(Image.new("RGB", (1, 1)))
    assert server.chat([part(tiny), text("what?")]).usage.completion_tokens == 6
    wide = server.post(
        {"model": MODEL, "messages": [{"role": "user", "content": [part(data_url(Image.new("RGB", (4000, 1))))]}]}
    )
    assert wide.status_code in (200, 400)
