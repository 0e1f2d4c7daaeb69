"""Knorm, KeyDiff, TOVA and KVzip by hand: each selection from the definition, on fixed tensors and on a model."""

from __future__ import annotations

from typing import Any

import families
import matrix
import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import repeat_kv

import foveakv
from foveakv.core.prompt import PromptMap
from foveakv.methods.kvzip import repetition_scores
from foveakv.methods.views import PrefillView, Repeated


def keys_of(family: str) -> tuple[Any, dict[str, Any], list[Tensor]]:
    """A model, a prompt, and the keys of every layer, [H, C, D]."""
    model, inputs = matrix.model(family, torch.float64), families.prompt(family, dtype=torch.float64)
    with torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
    return model, inputs, [layer.keys[0] for layer in cache.layers]


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_knorm_keeps_the_smallest_keys(family: str) -> None:
    model, inputs, keys = keys_of(family)
    run = matrix.compressed(model, foveakv.methods.get("knorm", budget=12), inputs, max_new_tokens=1)
    for layer, each in enumerate(keys):
        for head, kept in enumerate(run.cache.kept(layer)[0].tolist()):
            norms = each[head].pow(2).sum(-1).sqrt()
            assert kept == sorted(norms.argsort()[:12].tolist())


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_keydiff_keeps_the_keys_least_like_the_mean(family: str) -> None:
    model, inputs, keys = keys_of(family)
    run = matrix.compressed(model, foveakv.methods.get("keydiff", budget=12), inputs, max_new_tokens=1)
    for layer, each in enumerate(keys):
        for head, kept in enumerate(run.cache.kept(layer)[0].tolist()):
            unit = each[head] / each[head].norm(dim=-1, keepdim=True)
            anchor = unit.mean(0)
            cosine = unit @ anchor / anchor.norm()
            assert kept == sorted(cosine.argsort()[:12].tolist())


def test_tova_keeps_what_the_newest_token_attends_to() -> None:
    """At the prompt by the last row, then in every step by that step's attention, averaged over heads."""
    model, inputs = families.build("llava", dtype=torch.float64), families.prompt("llava", dtype=torch.float64)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attention = model(**inputs, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    columns = attention[0].shape[-1]
    run = matrix.compressed(model, foveakv.methods.get("tova", budget=12), inputs, max_new_tokens=1)
    for layer, weights in enumerate(attention):
        best = weights[0, :, -1].mean(0)
        best[-1] = torch.inf
        wanted = sorted(best.argsort(descending=True)[:12].tolist())
        assert all(kept == wanted for kept in run.cache.kept(layer)[0].tolist())
    run = matrix.compressed(model, foveakv.methods.get("tova", budget=12), inputs, max_new_tokens=8)
    for kept in run.cache.kept(0)[0].tolist():
        assert len(kept) == 12
        assert kept[-1] == columns + 6  # the newest token is stored


def test_repetition_scores_by_hand() -> None:
    """The largest probability over rows and the group, with padding on the left."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    batch, heads, group, columns, dim = 2, 2, 3, 7, 4
    keys, own, query = draw(batch, heads, columns, dim), draw(batch, heads, columns, dim), draw(batch, 6, columns, dim)
    prompt = PromptMap(torch.tensor([[0] * columns, [-1, -1] + [0] * (columns - 2)]))
    view = PrefillView(
        0, 0, query, 0.5, None, None, keys, keys, torch.arange(columns).expand(batch, columns), prompt, None,  # type: ignore[arg-type]
        repeated=Repeated(query, own),
    )  # fmt: skip
    found = repetition_scores(view)
    both = torch.cat([repeat_kv(keys, group), repeat_kv(own, group)], 2)
    for b, start in ((0, 0), (1, 2)):
        best = torch.zeros(heads, columns, dtype=torch.float64)
        for head in range(heads * group):
            for row in range(start, columns):
                seen = [*range(start, columns), *range(columns + start, columns + row + 1)]
                weights = (both[b, head, seen] @ query[b, head, row] * 0.5).softmax(0)
                for column, weight in zip(range(start, columns), weights, strict=False):
                    best[head // group, column] = max(best[head // group, column], weight)
        assert (found[b] - best).abs().max() < 1e-12


@pytest.mark.parametrize("allocation", ["global", "layer", "head"])
def test_kvzip_spends_its_budget_where_it_may(allocation: str) -> None:
    model, inputs = matrix.model("llava", torch.float64), families.prompt("llava", dtype=torch.float64)
    run = matrix.compressed(
        model, foveakv.methods.get("kvzip", budget=0.3, allocation=allocation), inputs, max_new_tokens=1
    )
    columns = inputs["input_ids"].shape[1]
    counts = torch.stack([(run.cache.kept(layer)[0] >= 0).sum(-1) for layer in range(len(run.cache.layers))])
    each = int(columns * 0.3)
    if allocation == "head":
        assert set(counts.flatten().tolist()) == {each}
    elif allocation == "layer":
        assert set(counts.sum(1).tolist()) == {each * counts.shape[1]}
    else:
        assert int(counts.sum()) == int(columns * 0.3 * counts.numel())
