"""vLLM's OpenAI server in a process of its own, and requests to it by the openai client."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import openai

SMALL = (
    "--dtype", "float32", "--enforce-eager", "--block-size", "32", "--gpu-memory-utilization", "0.2",
)  # fmt: skip
"""Arguments of vLLM for a small model on a small machine."""


@contextlib.contextmanager
def running(
    command_for: Callable[[int], Sequence[str]], log: Path, seconds: float = 600, **environment: str
) -> Iterator[openai.OpenAI]:
    """Run a server and yield a client for it.

    command_for: returns the command for a port. log: the file for its output. environment: more variables.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    given.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    with log.open("w") as output:
        process = subprocess.Popen(list(command_for(port)), env=given, stdout=output, stderr=output)
    try:
        _wait(process, port, log, seconds)
        key = environment.get("FOVEAKV_API_KEY", "none")
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0, timeout=120)
        assert process.poll() is None, log.read_text()[-3000:]
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)


def _wait(process: Any, port: int, log: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-3000:]
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            return
        time.sleep(0.5)
    raise AssertionError(f"the server is not ready after {seconds} s: {log.read_text()[-3000:]}")


def image_part(image: Any) -> dict[str, Any]:
    """Return an image as a part of a message."""
    image.save(file := io.BytesIO(), "png")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def ask(client: openai.OpenAI, content: Any, **more: Any) -> Any:
    """Ask for eight tokens, greedily. more: of the request; `body` holds fields that are vLLM's own."""
    body = {"ignore_eos": True, **more.pop("body", {})}
    options = {"model": "tiny", "max_tokens": 8, "temperature": 0, **more}
    return client.chat.completions.create(messages=[{"role": "user", "content": content}], extra_body=body, **options)


def report(reply: Any) -> dict[str, Any] | None:
    """Return what the plugin reports about a request."""
    found: dict[str, Any] | None = (reply.model_extra.get("kv_transfer_params") or {}).get("foveakv")
    return found
