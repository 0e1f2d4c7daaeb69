"""VL-Cache by hand: sparsity, layer budgets and the tokens that stay, from the model's own eager attention."""

from __future__ import annotations

from typing import Any

import families
import matrix
import pytest
import torch
from torch import Tensor

from foveakv.core.prompt import IMAGE, PAD, TEXT, PromptMap
from foveakv.methods.vlcache import VLCache, layer_tokens, post_vision_rows

FAMILY = "llava"


@pytest.fixture(scope="module")
def setting() -> tuple[Any, dict[str, Any], list[Tensor]]:
    """A model, a prompt with text behind its picture, and the eager attention of every layer, [H, G, C, C]."""
    model = families.build(FAMILY, dtype=torch.float64)
    inputs = families.prompt(FAMILY, dtype=torch.float64)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        layers = model(**inputs, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    return model, inputs, [weights[0].unflatten(0, (families.KV_HEADS, -1)) for weights in layers]


@pytest.mark.parametrize(("threshold", "recent"), [(0.01, 0.1), (0.4, 0.0), (0.4, 0.5)])
def test_by_hand(setting: tuple[Any, dict[str, Any], list[Tensor]], threshold: float, recent: float) -> None:
    model, inputs, layers = setting
    ids = inputs["input_ids"][0].tolist()
    columns = len(ids)
    last = max(c for c, token in enumerate(ids) if token == families.IMAGE)
    rows = range(last + 1, columns)
    assert len(rows) > 3
    density, scores = [], []
    for weights in layers:
        entries = large = 0
        for h in range(weights.shape[0]):
            for g in range(weights.shape[1]):
                for i in rows:
                    row = weights[h, g, i, : i + 1].tolist()
                    entries += len(row)
                    large += sum(p >= threshold * max(row) for p in row)
        density.append(large / entries)
        scores.append(weights[:, :, list(rows)].sum((1, 2)))
    heads = scores[0].shape[0]
    total = columns * len(layers) * heads * 3 // 10 // heads  # tokens of all layers together
    exact = [total * d / sum(density) for d in density]
    sizes = [int(x) for x in exact]
    for i in sorted(range(len(exact)), key=lambda i: sizes[i] - exact[i])[: total - sum(sizes)]:
        sizes[i] += 1

    run = matrix.compressed(model, VLCache(budget=0.3, threshold=threshold, recent=recent), inputs, max_new_tokens=1)
    told = run.cache.results.figures
    assert told["tokens"] == [sizes]
    assert torch.allclose(1 - torch.tensor(told["sparsity"][0]), torch.tensor(density), atol=1e-5)
    if threshold == 0.4:
        assert len(set(sizes)) > 1, "the layers of this model do not differ"
    window = int(total / len(layers) * recent)
    for layer, size in enumerate(sizes):
        held = run.cache.kept(layer)[0]
        for head in range(heads):
            newest = list(range(columns - window, columns))
            ranked = sorted(range(columns - window), key=lambda c: (-float(scores[layer][head, c]), c))
            assert held[head].tolist() == sorted(ranked[: size - window] + newest)


@pytest.mark.parametrize("budget", [0.03, 0.1, 0.37, 0.8, 1.0, 3, "20KiB"])
def test_the_budget_is_true(budget: Any) -> None:
    model, batch = matrix.model(FAMILY, torch.float64), families.batch(FAMILY, dtype=torch.float64)
    run = matrix.compressed(model, VLCache(budget=budget), batch.inputs, max_new_tokens=1)
    geometry = run.cache.geometry
    for b, context in enumerate(geometry.contexts):
        slots = sum(int((held[b] >= 0).sum()) for held in matrix.positions_held(run))
        if isinstance(budget, float):
            assert slots <= max(budget * context * geometry.heads, geometry.heads)
            assert slots > budget * context * geometry.heads - geometry.kv_heads or budget < 0.1
        elif isinstance(budget, int):
            assert slots == budget * geometry.heads
    if isinstance(budget, str):
        slots = sum(int((held >= 0).sum()) for held in matrix.positions_held(run))
        assert 0 < slots * geometry.slot_bytes <= 20 * 1024


def test_layer_tokens() -> None:
    def tokens(density: list[float], total: int, context: int) -> list[int]:
        return layer_tokens(torch.tensor(density, dtype=torch.float64), total, context).tolist()

    assert tokens([0.5, 0.3, 0.2], 30, 20) == [15, 9, 6]
    assert tokens([0.9, 0.1], 30, 20) == [20, 10]  # capped at the prompt, the rest handed on
    assert tokens([0.999, 0.001], 100, 1000) == [90, 10]  # at least 1% of the prompt
    assert tokens([0.999, 0.001], 3, 1000) == [2, 1]  # which three tokens cannot pay
    assert tokens([0.7, 0.3], 99, 20) == [20, 20]


def test_rows_behind_the_last_picture() -> None:
    kinds = torch.tensor([
        [PAD, TEXT, IMAGE, TEXT, IMAGE, TEXT, TEXT],
        [TEXT, TEXT, TEXT, TEXT, TEXT, IMAGE, IMAGE],  # nothing behind it: the last token
        [PAD, PAD, PAD, TEXT, TEXT, TEXT, TEXT],  # no picture: all rows
        [TEXT, IMAGE, TEXT, TEXT, PAD, PAD, PAD],
    ], dtype=torch.int8)  # fmt: skip
    rows, valid = post_vision_rows(PromptMap(kinds))
    got = [row[counts].tolist() for row, counts in zip(rows, valid, strict=True)]
    assert got == [[5, 6], [6], [3, 4, 5, 6], [2, 3]]
