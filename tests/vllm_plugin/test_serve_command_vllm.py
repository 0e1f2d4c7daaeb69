"""`foveakv serve MODEL --engine vllm` and the request of docs/serving.md, run for real."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import vllm_server

from foveakv.models import embedded

pytestmark = pytest.mark.demo
PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf8")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    (documented,) = re.findall(r"^foveakv (serve demo --engine vllm .*)$", PAGE, re.M)
    more = [f"--vllm-arg={each}" for each in (*vllm_server.SMALL, "--max-model-len", "2048")]

    def command(port: int) -> list[str]:
        return [sys.executable, "-m", "foveakv", *shlex.split(documented), "--port", str(port), *more]

    log = tmp_path_factory.mktemp("serve") / "log"
    with vllm_server.running(command, log, FOVEAKV_API_KEY="secret") as found:
        yield found


def card_question(count: int, ask: int) -> tuple[list[dict[str, Any]], str]:
    """The content of a message that asks for one of `count` cards, and the answer."""
    sample = embedded.sample_prompt(count, ask=ask)
    content: list[dict[str, Any]] = []
    for piece, image in zip(sample.text.split("<image>"), [*sample.images, None], strict=True):
        content.append({"type": "text", "text": piece})
        if image is not None:
            content.append(vllm_server.image_part(image))
    return content, sample.answer


def test_the_embedded_model_answers(client: openai.OpenAI) -> None:
    for count, number in ((4, 1), (8, 2)):
        content, answer = card_question(count, number)
        reply = vllm_server.ask(client, content, model="demo", max_tokens=8)
        assert reply.choices[0].message.content.strip().startswith(answer)
        found = vllm_server.report(reply)
        assert found is not None
        assert found["stored_prompt_tokens"] < 0.5 * found["prompt_tokens"]
        chunks = vllm_server.ask(client, content, model="demo", max_tokens=8, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == reply.choices[0].message.content


def test_the_request_of_the_documentation(client: openai.OpenAI) -> None:
    content, answer = card_question(4, 1)
    example = next(each for each in re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S) if "vllm_xargs" in each)
    scope: dict[str, Any] = {"client": client, "content": content}
    exec(compile(example, "example", "exec"), scope)
    assert scope["reply"].choices[0].message.content.strip().startswith(answer)
    assert scope["reply"].kv_transfer_params["foveakv"]["stored_prompt_tokens"] > 0


def test_the_key_and_urls(client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError):
        vllm_server.ask(client.with_options(api_key="wrong"), "hello", model="demo")
    for url, reason in (("http://127.0.0.1:9/x.png", "allowed domains"), ("file:///etc/passwd", "local files")):
        image = {"type": "image_url", "image_url": {"url": url}}
        with pytest.raises(openai.APIStatusError, match=reason):
            vllm_server.ask(client, [image, {"type": "text", "text": "hello"}], model="demo")
