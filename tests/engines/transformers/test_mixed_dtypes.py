"""Models under autocast: keys, values and queries differ in dtype, and everything still works in every backend.

All runs of a comparison are forced to the same tokens.
"""

from __future__ import annotations

from typing import Any

import families
import matrix
import pytest
import torch
import transformers
from masked_reference import largest_difference, masked, recorded, stayed
from torch import Tensor

import foveakv
from foveakv.kernels import BACKENDS, problem

pytestmark = pytest.mark.usefixtures("no_gradients")

# Logits go up to 3.7. The plain model under autocast is up to 0.08 away from itself in float32; what the methods evict
# here changes logits by 0.8 and more.
TOLERANCE = 0.2
FORCED = [20, 31, 42, 53, 64]
HERE = ("auto", *(name for name in BACKENDS if name != "triton"))


class Forced(transformers.LogitsProcessor):
    """Makes `generate` choose the tokens FORCED whatever the logits say."""

    def __init__(self) -> None:
        self.step = 0

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        scores = torch.full_like(scores, -torch.inf)
        scores[:, FORCED[self.step]] = 0
        self.step += 1
        return scores


def logits_of(model: Any, inputs: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Logits of the last token of every forward pass under autocast."""
    with torch.autocast("cpu", dtype=dtype), recorded(model) as logits:
        model.generate(
            **inputs, max_new_tokens=len(FORCED), min_new_tokens=len(FORCED), do_sample=False,
            logits_processor=transformers.LogitsProcessorList([Forced()]),
        )  # fmt: skip
    return [step[:, -1:].float() for step in logits]


def compressed(model: Any, method: Any, inputs: dict[str, Any], **options: Any) -> tuple[list[Tensor], Any]:
    with foveakv.compress(model, method, trace=True, **options) as session:
        return logits_of(model, inputs), session


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("name", matrix.METHODS)
def test_evicting_methods_equal_the_masked_model(name: str, kv_dtype: str | None) -> None:
    model, inputs = matrix.model("qwen2_5_vl"), families.prompt("qwen2_5_vl")
    method = matrix.method(name)
    got, session = compressed(model, method, inputs, kv_dtype=kv_dtype)
    left, after = None, method.prunes_after
    if after is not None:
        after = session.cache.compressed[after].layer_idx
        left = stayed(session.trace, inputs["input_ids"].shape[1], after)
    with masked(model, list(session.trace), left=left, left_after=after or 0):
        want = logits_of(model, inputs)
    steps = 1 if method.merges else None  # merged slots hold what the masked model does not have
    assert largest_difference(got[:steps], want[:steps]) < TOLERANCE


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
@pytest.mark.parametrize("name", matrix.METHODS)
def test_nothing_evicted_equals_the_plain_model(name: str, family: str) -> None:
    method = matrix.keeps_everything(name)
    if method is None:
        pytest.skip(f"{name} always evicts")
    model, inputs = matrix.model(family), families.batch(family).inputs
    want = logits_of(model, inputs)
    got, _ = compressed(model, method, inputs)
    assert largest_difference(got, want) < TOLERANCE


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("name", ["full", "h2o", "adakv", "hybridkv"])
def test_backends(name: str, backend: str, kv_dtype: str | None) -> None:
    if backend in BACKENDS and (reason := problem(backend)) is not None:
        pytest.skip(reason)
    model, inputs = matrix.model("llava"), families.batch("llava").inputs
    got, session = compressed(model, matrix.method(name), inputs, backend=backend, kv_dtype=kv_dtype)
    with masked(model, list(session.trace)):
        want = logits_of(model, inputs)
    assert largest_difference(got, want) < TOLERANCE


@pytest.mark.parametrize("name", ["full", "snapkv"])
def test_preallocated_slots(name: str) -> None:
    model, inputs = matrix.model("llava"), families.batch("llava").inputs
    with foveakv.compress(model, matrix.method(name)):
        want = logits_of(model, inputs)
    with foveakv.compress(model, matrix.method(name), preallocate=16):
        got = logits_of(model, inputs)
    assert largest_difference(got, want) < TOLERANCE


def test_a_model_in_bfloat16_decoded_under_autocast_in_float16() -> None:
    """The prompt is stored in one dtype, and what is added has another."""
    model, inputs = families.build("llama", dtype=torch.bfloat16), families.prompt("llama")
    for method in (matrix.method("snapkv"), foveakv.methods.get("full")):
        cache = foveakv.cache_for(model, method)
        first = model(**inputs, past_key_values=cache).logits
        ids = torch.tensor([[20]])
        mask = torch.ones(1, inputs["input_ids"].shape[1] + 1, dtype=torch.long)
        with torch.autocast("cpu", dtype=torch.float16):
            second = model(input_ids=ids, attention_mask=mask, past_key_values=cache).logits
        assert bool(torch.isfinite(first).all())
        assert bool(torch.isfinite(second).all())
        assert all(layer.segments.runs.keys.dtype == torch.bfloat16 for layer in cache.compressed)
