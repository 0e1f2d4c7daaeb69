"""TGV-KV by hand, from the attention weights of a model."""

from __future__ import annotations

from typing import Any

import families
import matrix
import pytest
import torch
from torch import Tensor

from foveakv.core.prompt import PromptMap
from foveakv.methods.tgvkv import TGVKV

FAMILY = "llava"


@pytest.fixture(scope="module")
def setting() -> tuple[Any, dict[str, Any], Tensor, Tensor, Tensor]:
    """A model, a prompt, head-mean attention [L, C, C], and which columns are text and visual."""
    model = families.build(FAMILY, dtype=torch.float64)
    inputs = families.prompt(FAMILY, dtype=torch.float64)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        layers = model(**inputs, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    prompt = PromptMap.from_inputs(model.config, inputs["input_ids"])
    return model, inputs, torch.stack([weights[0].mean(0) for weights in layers]), prompt.text[0], prompt.visual[0]


def scores(attention: Tensor, text: Tensor, visual: Tensor) -> Tensor:
    """[C]: guided scores of visual columns, column sums of the others."""
    columns = len(text)
    first = int(visual.nonzero()[0])
    rows = [i for i in range(columns) if text[i] and i > first]
    score = torch.zeros(columns, dtype=torch.float64)
    for j in range(columns):
        if not visual[j]:
            score[j] = sum(attention[i, j] for i in rows)
            continue
        for i in rows:
            weight = sum(attention[k, i] for k in rows if k >= i) / sum(k >= i for k in rows)
            score[j] += weight * attention[i, j]
    return score


def test_text_first_then_guided_visual_tokens(setting: tuple[Any, dict[str, Any], Tensor, Tensor, Tensor]) -> None:
    model, inputs, attention, text, visual = setting
    needed = int(text.sum())
    size = needed + 7
    run = matrix.compressed(model, TGVKV(budget=size, layer_budgets=False, sink=0), inputs, max_new_tokens=1)
    for layer in range(len(attention)):
        score = scores(attention[layer], text, visual)
        best = score.masked_fill(~visual, -torch.inf).argsort(descending=True)[:7]
        wanted = sorted([*text.nonzero().flatten().tolist(), *best.tolist()])
        for kept in run.cache.kept(layer)[0].tolist():
            assert kept == wanted


def test_layers_share_by_attention_from_text_to_images(
    setting: tuple[Any, dict[str, Any], Tensor, Tensor, Tensor],
) -> None:
    model, inputs, attention, text, visual = setting
    needed, layers = int(text.sum()), len(attention)
    run = matrix.compressed(model, TGVKV(budget=needed + 6), inputs, max_new_tokens=1)
    tokens = torch.tensor(run.cache.results.figures["tokens"][0])
    assert int(tokens.sum()) == layers * (needed + 6)
    first = int(visual.nonzero()[0])
    rows = torch.tensor([bool(text[i]) and i > first for i in range(len(text))])
    shares = attention[:, rows][:, :, visual].sum((1, 2))
    exact = shares / shares.sum() * layers * 6
    assert (tokens - needed - exact).abs().max() < 1


def test_text_that_does_not_fit_is_ranked_and_noted(
    setting: tuple[Any, dict[str, Any], Tensor, Tensor, Tensor],
) -> None:
    model, inputs, attention, text, visual = setting
    small = int(text.sum()) // 2
    run = matrix.compressed(model, TGVKV(budget=small), inputs, max_new_tokens=1)
    for layer in range(len(attention)):
        kept = run.cache.kept(layer)[0, 0].tolist()
        assert len(kept) == small
        assert all(text[column] for column in kept)
        assert kept[-1] == len(text) - 1
    assert any("does not fit" in note for note in run.session.report.notes)
    run = matrix.compressed(model, TGVKV(budget=small, visual_share=0.5), inputs, max_new_tokens=1)
    assert any(visual[column] for column in run.cache.kept(0)[0, 0].tolist())
