"""vLLM's OpenAI-compatible server, started as the documentation says, and the documentation's example."""

from __future__ import annotations

import concurrent.futures
import json
import re
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import openai
import pytest
import tiny_checkpoints
import vllm_server
from vllm_server import ask, image_part, report

PAGE = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text(encoding="utf8")
NAME = "tiny-llava"


def documented_config() -> str:
    """The value of --kv-transfer-config in the documentation."""
    found = re.search(r"--kv-transfer-config '(.*?)'\n", PAGE, re.S)
    assert found is not None
    return found[1]


@pytest.fixture(scope="module")
def client(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    path = tiny_checkpoints.checkpoint(NAME, checkpoints)

    def command(port: int) -> list[str]:
        return [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path), "--host", "127.0.0.1",
            "--port", str(port), "--no-enable-prefix-caching", "--kv-transfer-config", documented_config(),
            "--served-model-name", "tiny", "--max-model-len", "1024", *vllm_server.SMALL,
        ]  # fmt: skip

    with vllm_server.running(command, tmp_path_factory.mktemp("server") / "log") as found:
        yield found


@pytest.fixture(scope="module")
def content() -> list[dict[str, Any]]:
    """A question about two images."""
    return [*map(image_part, engines.images(2)), {"type": "text", "text": "what is in the image?"}]


def test_answers_and_streams(client: openai.OpenAI, content: Any) -> None:
    reply = ask(client, content, logprobs=True, top_logprobs=2)
    found = report(reply)
    assert found is not None
    assert found["stored_prompt_tokens"] < 0.5 * found["prompt_tokens"]
    assert found["prompt_tokens"] == reply.usage.prompt_tokens
    assert found["freed_blocks"] == (found["prompt_tokens"] - found["stored_prompt_tokens"]) // 32
    assert len(reply.choices[0].logprobs.content) == 8

    chunks = list(ask(client, content, stream=True, stream_options={"include_usage": True}))
    pieces = [each.choices[0].delta.content or "" for each in chunks if each.choices]
    assert "".join(pieces) == reply.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 8


def test_text_is_left_alone(client: openai.OpenAI) -> None:
    reply = ask(client, "what is a cat?")
    assert report(reply) is None
    assert reply.usage.completion_tokens == 8


def test_several_answers_and_stop(client: openai.OpenAI, content: Any) -> None:
    reply = ask(client, content, n=3, temperature=1, seed=5)
    again = ask(client, content, n=3, temperature=1, seed=5)
    assert len({choice.index for choice in reply.choices}) == 3
    assert [c.message.content for c in reply.choices] == [c.message.content for c in again.choices]
    whole = ask(client, content).choices[0].message.content
    stop = whole[len(whole) // 2 :][:2]
    stopped = ask(client, content, stop=[stop]).choices[0]
    assert stopped.finish_reason == "stop"
    assert whole.startswith(stopped.message.content)
    assert stop not in stopped.message.content


def test_requests_choose(client: openai.OpenAI, content: Any) -> None:
    assert report(ask(client, content, body={"vllm_xargs": {"foveakv": "off"}})) is None
    value = json.dumps({"method": "random", "options": {"budget": 0.5}})
    found = report(ask(client, content, body={"vllm_xargs": {"foveakv": value}}))
    assert found is not None
    assert found["method"] == "random"


WRONG = (
    '{"method": "hybridkv", "options": {"budget": 0.1}}',
    '{"method": "nothing"}',
    '{"method": "random", "options": {"budgets": 1}}',
    '{"method": "random", "options": {"name": "x"}}',
    '{"method": "hae", "options": {"preset": [1]}}',
    "{",
    "[" * 100_000,
)


@pytest.mark.parametrize("wrong", WRONG, ids=range(len(WRONG)))
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_refused(client: openai.OpenAI, content: Any, wrong: str, stream: bool) -> None:
    """One request ends with an error, alone or among others, and the server goes on."""
    body = {"vllm_xargs": {"foveakv": wrong}}

    def refused() -> None:
        with pytest.raises(openai.APIError) as error:
            for _ in ask(client, content, body=body, stream=stream):
                pass
        assert error.value.body is not None  # JSON

    refused()
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        failing = pool.submit(refused)
        others = [pool.submit(ask, client, content) for _ in range(2)]
        failing.result()
        assert len({each.result().choices[0].message.content for each in others}) == 1


def test_clients_that_go(client: openai.OpenAI, content: Any) -> None:
    """Streams that are closed in the middle, with and without compression; later requests are answered."""
    whole = ask(client, content).choices[0].message.content
    for body in ({}, {"vllm_xargs": {"foveakv": "off"}}):
        for _ in range(4):
            with ask(client, content, stream=True, max_tokens=300, body=body) as chunks:
                next(iter(chunks))
    assert ask(client, content).choices[0].message.content == whole
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert gauge(client, name) == 0


def gauge(client: openai.OpenAI, name: str) -> float:
    """A gauge of vLLM's metrics."""
    with urllib.request.urlopen(f"{str(client.base_url).removesuffix('/v1/')}/metrics", timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    (line,) = [line for line in lines if line.startswith(f"vllm:{name}{{")]
    return float(line.rsplit(" ", 1)[1])


def test_errors_of_requests_are_json(client: openai.OpenAI, content: Any) -> None:
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(openai.BadRequestError):
        ask(client, [broken, content[-1]])
    with pytest.raises(openai.BadRequestError):
        ask(client, content * 20)  # longer than the model
    with pytest.raises(openai.NotFoundError):
        ask(client, content, model="other")
    assert report(ask(client, content)) is not None


def test_the_example_of_the_documentation(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    path = tiny_checkpoints.checkpoint(NAME, checkpoints)
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
        (output,) = engines.generate(made[0], [engines.prompt(NAME, 2)], 4)
        assert output.kv_transfer_params["foveakv"]["method"] == "hae"
    finally:
        engines.close(made[0])
