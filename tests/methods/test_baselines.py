"""SnapKV, AdaKV, Streaming and Random against rules worked out by hand from the model's own eager attention."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import families
import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

import foveakv
from foveakv import AdaKV, Random, SnapKV, Streaming, errors
from foveakv.engines.transformers.decisions import evict
from foveakv.engines.transformers.slots import StoredSlots
from foveakv.memory.segments import Segments
from foveakv.methods.streaming import StreamingState

FAMILY, LAYER, WINDOW = "llava", 1, 6


@pytest.fixture(scope="module")
def setting() -> tuple[Any, dict[str, Any], Tensor]:
    """A model, a prompt of one sequence, and the window's attention in one layer: [H, C], mean over rows and group."""
    model = families.build(FAMILY, dtype=torch.float64)
    inputs = families.prompt(FAMILY, dtype=torch.float64)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(**inputs, output_attentions=True).attentions[LAYER][0]  # [Hq, C, C]
    model.set_attn_implementation("sdpa")
    heads = model.config.text_config.num_key_value_heads
    grouped = weights.view(heads, -1, *weights.shape[1:])
    return model, inputs, grouped[:, :, -WINDOW:].mean((1, 2))


def kept(model: Any, inputs: dict[str, Any], method: Any, new: int = 1) -> list[set[int]]:
    """Positions that every head of the layer holds after `new` tokens."""
    with foveakv.compress(model, method) as session:
        model.generate(**inputs, max_new_tokens=new, min_new_tokens=new, do_sample=False)
        return [set(row[row >= 0].tolist()) for row in session.kept(LAYER)[0]]


def smoothed(score: Tensor, kernel: int, pool: Any) -> list[float]:
    """Pooling by hand: the window counts as 0, so do places beyond the prompt (average) or nothing (maximum)."""
    score = score.clone()
    score[-WINDOW:] = 0
    reach = kernel // 2
    values = []
    for c in range(len(score)):
        near = score[max(c - reach, 0) : c + reach + 1]
        values.append(float(near.sum() / kernel if pool == "average" else near.max()))
    return values


def test_snapkv(setting: tuple[Any, dict[str, Any], Tensor]) -> None:
    model, inputs, score = setting
    columns = score.shape[1]
    got = kept(model, inputs, SnapKV(budget=20, window=WINDOW, kernel=3))
    for head in range(len(score)):
        value = smoothed(score[head], 3, "average")
        best = sorted(range(columns - WINDOW), key=lambda c: (-value[c], c))[: 20 - WINDOW]
        assert got[head] == {*best, *range(columns - WINDOW, columns)}


def test_adakv(setting: tuple[Any, dict[str, Any], Tensor]) -> None:
    model, inputs, score = setting
    heads, columns = score.shape
    got = kept(model, inputs, AdaKV(budget=20, window=WINDOW, kernel=3, floor=0.5))
    value = [smoothed(score[head], 3, "maximum") for head in range(heads)]
    each = 20 - WINDOW
    ranked = [sorted(range(columns - WINDOW), key=lambda c, v=value[h]: (-v[c], c)) for h in range(heads)]
    own = [set(ranked[h][: each // 2]) for h in range(heads)]
    rest = [(-value[h][c], h, c) for h in range(heads) for c in range(columns - WINDOW) if c not in own[h]]
    for _, h, c in sorted(rest)[: heads * (each - each // 2)]:
        own[h].add(c)
    assert got == [own[h] | set(range(columns - WINDOW, columns)) for h in range(heads)]
    assert sum(map(len, got)) == heads * 20


def test_streaming_slides(setting: tuple[Any, dict[str, Any], Tensor]) -> None:
    model, inputs, score = setting
    columns = score.shape[1]
    for held in kept(model, inputs, Streaming(budget=12, sink=3), new=5):
        seen = columns + 4
        assert held == {0, 1, 2, *range(seen - 9, seen)}


def test_streaming_grows_to_a_budget_above_the_prompt(setting: tuple[Any, dict[str, Any], Tensor]) -> None:
    model, inputs, score = setting
    columns = score.shape[1]
    for held in kept(model, inputs, Streaming(budget=columns + 3, sink=2), new=7):
        seen = columns + 6
        assert held == {0, 1, *range(seen - columns - 1, seen)}


@pytest.mark.parametrize("seed", range(20))
def test_streaming_windows_are_rings(seed: int) -> None:
    """Against lists: sequences with sizes of their own, steps of several tokens, more than a window at once, beams."""
    rng = random.Random(seed)
    batch, sink = rng.randint(1, 3), rng.choice([0, 2, 9])
    prompt = rng.randint(2, 9)
    sizes = [prompt + rng.choice([0, 0, 3]) for _ in range(batch)]
    keys = torch.zeros(batch, 2, prompt, 1)
    segments = Segments.from_dense(
        keys, keys, torch.ones(batch, 1, prompt, dtype=torch.bool), torch.arange(prompt).expand(batch, -1)
    )
    state = StreamingState(torch.tensor(sizes), torch.zeros(batch, dtype=torch.int64))
    held = [list(range(prompt)) for _ in range(batch)]
    seen = prompt
    for step in range(30):
        new = rng.choice([1, 1, 1, 2, 12])
        fresh = torch.zeros(batch, 2, new, 1)
        segments.append(fresh, fresh, torch.arange(seen, seen + new)[None])
        seen += new
        view: Any = SimpleNamespace(slots=StoredSlots(segments), state=state, seen=seen)
        decision = Streaming(sink=sink).decode(view)
        if decision is not None:
            evict(segments, decision, "streaming")
        for b, size in enumerate(sizes):
            held[b] += range(seen - new, seen)
            if len(held[b]) > size:
                sinks = min(size - 1, sink)
                held[b] = held[b][:sinks] + held[b][sinks - size :]
        for b, positions in enumerate(segments.positions().tolist()):
            for row in positions:
                assert sorted(p for p in row if p >= 0) == held[b]
        if step == 15:
            index = [rng.randrange(batch) for _ in range(batch)]
            segments.select_sequences(torch.tensor(index))
            state.select_sequences(torch.tensor(index))
            held, sizes = [list(held[i]) for i in index], [sizes[i] for i in index]


@pytest.mark.parametrize("sink", [1.5, -1, True, "4"])
def test_streaming_sinks_are_whole_numbers(sink: Any) -> None:
    with pytest.raises(errors.MethodError, match=r"streaming: sink must be a whole number, at least 0 .*; got "):
        Streaming(sink=sink)


def test_random_keeps_text_and_as_many_pictures_as_fit(setting: tuple[Any, dict[str, Any], Tensor]) -> None:
    model, inputs, _ = setting
    ids = inputs["input_ids"][0]
    visual = set(torch.nonzero(ids == model.config.image_token_id).flatten().tolist())
    text = set(range(len(ids))) - visual
    first, again, other = (kept(model, inputs, Random(budget=len(text) + 5, seed=s))[0] for s in (0, 0, 1))
    assert first == again != other
    assert text <= first
    assert len(first & visual) == 5


def test_a_positional_generation_config_is_read(setting: tuple[Any, dict[str, Any], Tensor]) -> None:
    model, inputs, _ = setting
    others = {key: value for key, value in inputs.items() if key != "input_ids"}
    config = GenerationConfig(max_new_tokens=2, use_cache=False)
    with foveakv.compress(model, SnapKV()), pytest.raises(errors.UnsupportedModeError, match="use_cache"):
        model.generate(inputs["input_ids"], config, **others)


def test_a_refused_prompt_leaves_the_cache_usable(setting: tuple[Any, dict[str, Any], Tensor]) -> None:
    model, inputs, _ = setting
    cache = foveakv.cache_for(model, Random(budget=0.5))
    text = torch.tensor([[5, 6, 7, 8]])
    with pytest.raises(errors.NoVisualTokensError):
        model.generate(input_ids=text, past_key_values=cache, max_new_tokens=2)
    model.generate(**inputs, past_key_values=cache, max_new_tokens=2, do_sample=False)
    assert cache.prompt_columns == inputs["input_ids"].shape[1]


def test_reports_tell_what_the_method_says(setting: tuple[Any, dict[str, Any], Tensor]) -> None:
    model, inputs, _ = setting
    with foveakv.compress(model, foveakv.HAE(target_visual_tokens=4)) as session:
        model.generate(**inputs, max_new_tokens=3, do_sample=False)
        assert session.report.to_dict()["details"]["evicted_visual"][0] > 0
    with foveakv.compress(model, foveakv.HybridKV(budget=0.5, window=4)) as session:
        model.generate(**inputs, max_new_tokens=3, do_sample=False)
        assert 0 <= session.report.to_dict()["details"]["static_share"] <= 1


def test_random_holds_a_budget_below_the_text(setting: tuple[Any, dict[str, Any], Tensor]) -> None:
    model, inputs, _ = setting
    ids = inputs["input_ids"][0]
    visual = set(torch.nonzero(ids == model.config.image_token_id).flatten().tolist())
    text = sorted(set(range(len(ids))) - visual)
    size = len(text) - 2
    assert kept(model, inputs, Random(budget=size))[0] == set(text[2:])
    shared = kept(model, inputs, Random(budget=size, visual_share=0.5))[0]
    assert len(shared & visual) == size // 2
    assert shared - visual == set(text[-(size - size // 2) :])
    with foveakv.compress(model, Random(budget=size)) as session:
        model.generate(**inputs, max_new_tokens=2, do_sample=False)
        assert any("does not fit the budget" in note for note in session.report.notes)
