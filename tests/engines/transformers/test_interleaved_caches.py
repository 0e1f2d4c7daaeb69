"""Several caches of one model in use at once: in turn, in threads, and beside a plain cache."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import families
import matrix
import pytest
import torch
import transformers
from masked_reference import largest_difference, recorded
from modes import CHUNKS, by_hand, inputs_of, unmasked

import foveakv

pytestmark = pytest.mark.usefixtures("no_gradients")


def test_threads() -> None:
    model, inputs = matrix.model("llava", torch.float64), inputs_of("llava")
    want = matrix.compressed(model, matrix.method("hae"), inputs).tokens
    caches = [foveakv.cache_for(model, matrix.method("hae")) for _ in range(3)]

    def work(cache: Any) -> torch.Tensor:
        with torch.no_grad():
            return model.generate(**inputs, **matrix.GREEDY, past_key_values=cache).sequences

    with ThreadPoolExecutor(3) as pool:
        assert all(torch.equal(tokens, want) for tokens in pool.map(work, caches))


@pytest.mark.parametrize("name", ["full", "hae", "snapkv"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_alternating_conversations_are_what_each_is_alone(family: str, name: str) -> None:
    """M-RoPE models keep an offset on themselves; a second conversation on one model must not disturb the first."""
    model = matrix.model(family, torch.float64)
    starts = [families.row(family, images=n, seed=n, text=12) for n in (2, 1, 0)]

    def begin(row: families.Row) -> dict[str, Any]:
        turn, cache = families.first_turn(family, [row], torch.float64), foveakv.cache_for(model, matrix.method(name))
        return {"turn": turn, "cache": cache, "logits": [], "turns": 0}

    def advance(talk: dict[str, Any]) -> None:
        with recorded(model) as logits:
            output = model.generate(**talk["turn"].inputs, **matrix.GREEDY, past_key_values=talk["cache"])
        talk["logits"] += [step[:, -1] for step in logits]
        talk["turns"] += 1
        image = talk["turns"] == 2
        talk["turn"] = families.next_turn(
            family, model, talk["turn"], output.sequences, image=image, seed=talk["turns"]
        )

    alone = [begin(row) for row in starts]
    for talk in alone:
        for _ in range(3):
            advance(talk)
    mixed = [begin(row) for row in starts]
    for turn in range(3):
        for talk in mixed if turn % 2 == 0 else mixed[::-1]:
            advance(talk)
    for a, b in zip(alone, mixed, strict=True):
        assert max((x - y).abs().max().item() for x, y in zip(a["logits"], b["logits"], strict=True)) < 1e-9


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "llava"])
def test_interleaved_loops_by_hand(family: str) -> None:
    model = matrix.model(family, torch.float64)
    prompts = [unmasked(families.prompt(family, images=n, seed=n, dtype=torch.float64)) for n in (2, 1, 0)]

    def loop(prompt: dict[str, Any]) -> Any:
        return by_hand(family, model, foveakv.cache_for(model, matrix.method("snapkv")), prompt, CHUNKS)

    alone = [list(loop(prompt)) for prompt in prompts]
    mixed = list(zip(*[loop(prompt) for prompt in prompts], strict=True))  # one step of each in turn
    for number, logits in enumerate(alone):
        assert largest_difference([step[number] for step in mixed], logits, every_row=True) < 1e-9


def test_a_plain_cache_beside_a_compressed_one() -> None:
    """`cache_for` attaches to the model; other caches pass through it unchanged."""
    model = matrix.model("qwen2_5_vl", torch.float64)
    inputs = families.prompt("qwen2_5_vl", dtype=torch.float64)
    want = matrix.plain(model, inputs)
    cache = foveakv.cache_for(model, matrix.method("hae"))
    first = model.generate(**inputs, **matrix.GREEDY, past_key_values=cache)
    got = matrix.plain(model, inputs)
    assert type(got.cache) is transformers.DynamicCache
    assert largest_difference(got.logits, want.logits) < 1e-9
    turn = families.Turn(inputs, inputs, [families.row("qwen2_5_vl").pictures])
    turn = families.next_turn("qwen2_5_vl", model, turn, first.sequences)
    model.generate(**turn.inputs, **matrix.GREEDY, past_key_values=cache)
    got = matrix.plain(model, inputs, past_key_values=transformers.DynamicCache())
    assert largest_difference(got.logits, want.logits) < 1e-9
