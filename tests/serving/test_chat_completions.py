"""Chat completions through the real openai client: text, images, streams, and what each field does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import families
import pytest
import served
import tiny_folder
import torch
from served import MODEL, Running, picture_part, running, text

import foveakv
from foveakv.models.chat import Message, build_chat_inputs

IMAGES = [text("The first: "), picture_part(0), text("\nand another: "), picture_part(1), text("\nWhat differs?")]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(policy=served_policy()) as found:
        yield found
        assert found.idle()


def served_policy() -> Any:
    from foveakv.serving.choice import Policy

    return Policy("snapkv", {"budget": 0.5, **served.SMALL}, allow_options=True)


def expected(content: list[dict[str, Any]], method: Any, tokens: int) -> str:
    """The greedy answer of `generate` for one user message."""
    model, processor = families.build("llava"), tiny_folder.processor(chat=True)
    images = [tiny_folder.picture(i) for i in range(sum(part["type"] == "image_url" for part in content))]
    message = Message("user", tuple(part.get("text") for part in content))
    inputs = build_chat_inputs(processor, [message], images, model=model)
    with foveakv.compress(model, method), torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return str(processor.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def test_an_answer_equals_generate(server: Running) -> None:
    reply = server.chat(IMAGES, max_tokens=12)
    method = foveakv.methods.get("snapkv", budget=0.5, **served.SMALL)
    assert reply.choices[0].message.content == expected(IMAGES, method, 12)
    assert reply.choices[0].finish_reason == "length"
    assert reply.object == "chat.completion"
    assert reply.model == MODEL


def test_usage_says_what_is_stored(server: Running) -> None:
    usage = server.chat(IMAGES).usage
    assert usage.completion_tokens == 6
    assert usage.total_tokens == usage.prompt_tokens + 6
    own = usage.model_extra["foveakv"]
    assert own["method"] == "snapkv"
    assert 0 < own["stored_bytes"] < own["full_bytes"]
    assert own["share_of_full"] == own["stored_bytes"] / own["full_bytes"]
    assert own["evicted"] > 0


def test_a_stream_is_the_same_answer_in_pieces(server: Running) -> None:
    whole = server.chat(IMAGES, max_tokens=20).choices[0].message.content
    chunks = list(server.chat(IMAGES, max_tokens=20, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert len(chunks) > 4
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 20
    assert chunks[-1].usage.model_extra["foveakv"]["stored_bytes"] > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_several_turns(server: Running) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [picture_part(0), text("What is it?")]},
        {"role": "assistant", "content": "A card."},
        {"role": "user", "content": [text("And this? "), picture_part(1)]},
    ]
    reply = server.client.chat.completions.create(model=MODEL, messages=messages, max_tokens=3, temperature=0)
    chat = [
        Message("system", ("Be brief.",)),
        Message("user", (None, "What is it?")),
        Message("assistant", ("A card.",)),
        Message("user", ("And this? ", None)),
    ]
    images = [tiny_folder.picture(i) for i in range(2)]
    inputs = build_chat_inputs(tiny_folder.processor(chat=True), chat, images)
    assert reply.usage.prompt_tokens == inputs["input_ids"].shape[1]


def test_choices_are_the_same_in_every_run_with_a_seed(server: Running) -> None:
    def texts(seed: int) -> list[str]:
        reply = server.chat(IMAGES, n=3, seed=seed, temperature=1.5, max_tokens=8)
        return [choice.message.content for choice in reply.choices]

    assert texts(7) == texts(7)
    assert texts(7) != texts(8)
    assert len(set(texts(7))) > 1


def test_choices_of_a_stream_keep_apart(server: Running) -> None:
    chunks = list(server.chat(IMAGES, n=2, seed=7, temperature=1.5, max_tokens=8, stream=True))
    whole = server.chat(IMAGES, n=2, seed=7, temperature=1.5, max_tokens=8)
    for i in range(2):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == i]
        assert "".join(choice.delta.content or "" for choice in own) == whole.choices[i].message.content
        assert own[-1].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(server: Running, stream: bool) -> None:
    """Every stop string that occurs in the answer, of one and of several characters, ends it before itself."""
    whole = server.chat(IMAGES, max_tokens=30).choices[0].message.content
    for first in (3, 8):
        for length in (1, 3):
            stop = whole[first : first + length]
            if not stream:
                reply = server.chat(IMAGES, max_tokens=30, stop=["never", stop])
                found, reason = reply.choices[0].message.content, reply.choices[0].finish_reason
            else:
                chunks = list(server.chat(IMAGES, max_tokens=30, stop=["never", stop], stream=True))
                found = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
                reason = chunks[-1].choices[0].finish_reason
            assert found == whole[: whole.find(stop)]
            assert reason == "stop"


def test_log_probabilities(server: Running) -> None:
    reply = server.chat(IMAGES, max_tokens=5, logprobs=True, top_logprobs=3)
    entries = reply.choices[0].logprobs.content
    assert len(entries) == 5
    assert (
        b"".join(bytes(entry.bytes) for entry in entries).decode("utf8", "replace") == reply.choices[0].message.content
    )
    for entry in entries:
        assert [other.logprob for other in entry.top_logprobs] == sorted(
            (other.logprob for other in entry.top_logprobs), reverse=True
        )
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)  # greedy
        assert entry.bytes == entry.top_logprobs[0].bytes
    streamed = [
        entry
        for chunk in server.chat(IMAGES, max_tokens=5, logprobs=True, top_logprobs=3, stream=True)
        for entry in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    assert [entry.bytes for entry in streamed] == [entry.bytes for entry in entries]


def test_small_top_p_is_greedy(server: Running) -> None:
    greedy = server.chat(IMAGES, max_tokens=8).choices[0].message.content
    assert server.chat(IMAGES, max_tokens=8, temperature=2, top_p=1e-6).choices[0].message.content == greedy


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_length(server: Running, name: str) -> None:
    messages = [{"role": "user", "content": "hello"}]
    reply = server.client.chat.completions.create(model=MODEL, messages=messages, temperature=0, **{name: 3})
    assert reply.usage.completion_tokens == 3


def test_methods_of_a_request(server: Running) -> None:
    def own(**choice: Any) -> dict[str, Any]:
        found: dict[str, Any] = server.chat(IMAGES, extra_body={"foveakv": choice}).usage.model_extra["foveakv"]
        return found

    full = own(method="full")
    assert full["method"] == "full"
    assert full["evicted"] == 0
    assert own(budget=0.2)["stored_bytes"] < own(budget=0.9)["stored_bytes"] <= full["stored_bytes"]
    assert own(method="streaming", budget=0.3, options={"sink": 1})["settings"]["sink"] == 1
    assert own(kv_dtype="int8")["kv_dtype"] == "int8"


def test_kept_patches(server: Running) -> None:
    reply = server.chat(IMAGES, extra_body={"foveakv": {"budget": 0.3, "kept": "layers"}})
    kept = reply.usage.model_extra["foveakv"]["kept"]
    assert kept["grids"] == [[4, 4], [4, 4]]
    assert [len(shares) for shares in kept["shares"]] == [16, 16]
    assert len(kept["layers"]) == families.LAYERS
    values = [value for shares in kept["shares"] for value in shares]
    assert 0 < sum(values) < 32
    mean = [sum(layer[0][i] for layer in kept["layers"]) / families.LAYERS for i in range(16)]
    assert kept["shares"][0] == pytest.approx(mean, abs=1e-3)


def test_models_health_and_metrics(server: Running) -> None:
    import httpx

    assert [model.id for model in server.client.models.list()] == [MODEL]
    assert server.client.models.retrieve(MODEL).id == MODEL
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    server.chat(IMAGES)
    assert server.idle()
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    figures = dict(line.rsplit(" ", 1) for line in lines if line and line[0] != "#")
    assert float(figures['foveakv_requests_total{method="snapkv",outcome="ok"}']) >= 1
    assert float(figures["foveakv_prompt_tokens_total"]) > 0
    assert float(figures["foveakv_generated_tokens_total"]) > 0
    assert float(figures["foveakv_evicted_slots_total"]) > 0
    for name in ("queue_requests", "running_answers", "kv_stored_bytes", "kv_full_bytes", "kv_host_bytes"):
        assert float(figures[f"foveakv_{name}"]) == 0
    assert float(figures["foveakv_kv_limit_bytes"]) > 0
    assert "foveakv_hit_rate" in figures


def test_hit_rate_of_retrieval(server: Running) -> None:
    import httpx

    choice = {"method": "hybridkv", "budget": 0.3, "options": {"preset": "small"}}
    own = server.chat(IMAGES, max_tokens=8, extra_body={"foveakv": choice}).usage.model_extra["foveakv"]
    text = httpx.get(f"{server.url}/metrics").text
    rate = float(next(line for line in text.splitlines() if line.startswith("foveakv_hit_rate")).split()[1])
    assert (rate > 0) == bool(own["hit_rate"])


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**32, 2**63 - 1])
def test_seeds_of_any_size(server: Running, seed: int) -> None:
    replies = [server.chat(IMAGES, n=2, seed=seed, temperature=1.5, max_tokens=4) for _ in range(2)]
    assert len({tuple(choice.message.content for choice in reply.choices) for reply in replies}) == 1


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 10**400])
def test_seeds_that_are_too_large(server: Running, seed: int) -> None:
    assert "seed" in (server.error(IMAGES, 400, seed=seed)["param"] or "")
