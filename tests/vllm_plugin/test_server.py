"""vLLM's OpenAI-compatible server, started as the documentation says, and the documentation's example."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import pytest
import tiny_checkpoints

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "vllm.md").read_text(encoding="utf8")
SMALL = ["--dtype", "float32", "--max-model-len", "1024", "--enforce-eager", "--block-size", "32",
         "--gpu-memory-utilization", "0.2", "--served-model-name", "tiny"]  # fmt: skip


def documented_config() -> str:
    """The value of --kv-transfer-config in the documentation."""
    found = re.search(r"--kv-transfer-config '(.*?)'\n", PAGE, re.S)
    assert found is not None
    return found[1]


@pytest.fixture(scope="module")
def server(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = tiny_checkpoints.checkpoint("tiny-llava", checkpoints)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path), "--host", "127.0.0.1",
               "--port", str(port), "--no-enable-prefix-caching", "--kv-transfer-config", documented_config(),
               *SMALL]  # fmt: skip
    log = tmp_path_factory.mktemp("server") / "log"
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    given.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    with log.open("w") as output:
        process = subprocess.Popen(command, env=given, stdout=output, stderr=output)
    try:
        for _ in range(600):
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1/chat/completions"
    finally:
        process.terminate()
        process.wait(60)


def ask(**more: Any) -> bytes:
    """A request with two images."""
    content: list[dict[str, Any]] = []
    for image in engines.images(2):
        file = io.BytesIO()
        image.save(file, "png")
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        content.append({"type": "image_url", "image_url": {"url": url}})
    content.append({"type": "text", "text": "what is in the image?"})
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
    return json.dumps({**body, **more}).encode()


def post(url: str, body: bytes) -> Any:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=300)


def test_answers_and_streams(server: str) -> None:
    answer = json.load(post(server, ask(ignore_eos=True)))
    report = answer["kv_transfer_params"]["foveakv"]
    assert report["stored_prompt_tokens"] < 0.5 * report["prompt_tokens"]
    assert report["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    text = answer["choices"][0]["message"]["content"]
    lines = post(server, ask(ignore_eos=True, stream=True)).read().decode().splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]) == text


def test_requests_choose_or_are_refused(server: str) -> None:
    off = json.load(post(server, ask(vllm_xargs={"foveakv": "off"})))
    assert off.get("kv_transfer_params") is None
    chosen = json.load(post(server, ask(vllm_xargs={"foveakv": '{"method": "random", "options": {"budget": 0.5}}'})))
    assert chosen["kv_transfer_params"]["foveakv"]["method"] == "random"
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(server, ask(vllm_xargs={"foveakv": '{"method": "snapkv"}'}))
    assert refused.value.code == 500
    assert json.load(post(server, ask()))["choices"]


def test_the_example_of_the_documentation(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    path = tiny_checkpoints.checkpoint("tiny-llava", checkpoints)
    made = []

    def small(**given: Any) -> Any:
        from foveakv.engines.vllm import private

        private.register()
        more = {"dtype": "float32", "max_model_len": 1024, "enforce_eager": True, "gpu_memory_utilization": 0.2}
        made.append(whole(**{**given, **more, "model": str(path)}))
        return made[-1]

    whole = vllm.LLM
    monkeypatch.setattr(vllm, "LLM", small)
    (example,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    exec(example, {})
    try:
        (output,) = engines.generate(made[0], [engines.prompt("tiny-llava", 2)], 4)
        assert output.kv_transfer_params["foveakv"]["method"] == "hae"
    finally:
        engines.close(made[0])
