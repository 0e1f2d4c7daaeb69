"""A second pass over the prompt: what a method sees of it, and that nothing of it stays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import families
import matrix
import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.models.llama.modeling_llama import repeat_kv

import foveakv
from foveakv import errors
from foveakv.methods import Decision, Method, Observes, PrefillView, PromptView, State, keep_top

FAMILIES = ["llama", "llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl"]


@dataclass
class Seen(State):
    views: list[PrefillView] = field(default_factory=list)


@dataclass
class Repetition(Method):
    """Keep the slots that some token of the repeated prompt attends to most (the score of KVzip, arXiv 2505.23416)."""

    budget: float = 0.5

    name: ClassVar[str] = "repetition"

    @property
    def observes(self) -> Observes:
        return Observes(second_pass=True)

    def begin(self, request: PromptView) -> Seen:
        return Seen()

    def prefill(self, view: PrefillView) -> Decision:
        view.state.views.append(view)
        assert view.repeated is not None
        query, real = view.repeated.query, view.prompt.real
        group = query.shape[1] // view.keys.shape[1]
        logits = query @ repeat_kv(view.keys, group).mT * view.scaling  # [B, Hq, C, C]
        logits = logits.masked_fill(~real[:, None, None], -torch.inf).masked_fill(~real[:, None, :, None], -torch.inf)
        scores = logits.amax(2).view(len(query), -1, group, view.keys.shape[2]).amax(2)
        return Decision(keep=keep_top(scores, view.budget_tokens(self.budget)[:, None]))


def test_the_repetition_is_what_the_model_computes_after_the_prompt() -> None:
    """Queries and keys of the second pass equal those of the second half of a prompt that is written twice."""
    model, inputs = matrix.model("llama", torch.float64), families.prompt("llama")
    ids = inputs["input_ids"]
    columns = ids.shape[1]
    with foveakv.compress(model, Repetition()) as session, torch.no_grad():
        model.generate(**inputs, max_new_tokens=2, do_sample=False)
    assert isinstance(session.cache.state, Seen)
    captured: list[tuple[Tensor, Tensor]] = []

    def capture(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        captured.append((query, key))
        return torch.nn.functional.scaled_dot_product_attention(
            query, repeat_kv(key, query.shape[1] // key.shape[1]), repeat_kv(value, query.shape[1] // key.shape[1]),
            is_causal=True, scale=kwargs["scaling"],
        ).transpose(1, 2), None  # fmt: skip

    AttentionInterface.register("captured_reference", capture)
    AttentionMaskInterface.register("captured_reference", sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation("captured_reference")
    try:
        with torch.no_grad():
            model(torch.cat([ids, ids], 1))
    finally:
        model.set_attn_implementation(before)
    assert len(captured) == len(session.cache.state.views) > 1
    for view, (query, keys) in zip(session.cache.state.views, captured, strict=True):
        assert view.repeated is not None
        assert (view.repeated.query - query[:, :, columns:]).abs().max() < 1e-9
        assert (view.repeated.keys - keys[:, :, columns:]).abs().max() < 1e-9
        assert (view.keys - keys[:, :, :columns]).abs().max() < 1e-9


@pytest.mark.parametrize("family", FAMILIES)
def test_against_the_reference(family: str) -> None:
    """What is stored and computed afterwards is as if the second pass had never been, in padded batches too."""
    model, batch = matrix.model(family, torch.float64), families.batch(family, dtype=torch.float64)
    run = matrix.compressed(model, Repetition(), batch.inputs)
    assert run.session.report.evicted > 0
    matrix.check_against_reference(model, run, batch.inputs, families.exactness(family))
    assert run.cache.seen == batch.inputs["input_ids"].shape[1] + 5


@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl"])
def test_a_full_budget_is_the_plain_model(family: str) -> None:
    model, inputs = matrix.model(family, torch.float64), families.prompt(family, dtype=torch.float64)
    run = matrix.compressed(model, Repetition(budget=1.0), inputs)
    assert torch.equal(run.tokens, matrix.plain(model, inputs).tokens)


def test_it_is_refused_where_it_would_be_wrong() -> None:
    with pytest.raises(errors.UnsupportedModelError, match="second pass"), torch.no_grad():
        matrix.compressed(matrix.model("gemma3"), Repetition(), families.prompt("gemma3"))
    with pytest.raises(errors.UnsupportedModeError, match="whole prompt in one forward pass"):
        matrix.compressed(matrix.model("llama"), Repetition(), families.prompt("llama"), prefill_chunk_size=5)
