"""The transformers engine: answers equal `generate` in every family, in any company; bounds of stored bytes hold."""

from __future__ import annotations

import threading
from typing import Any

import families
import matrix
import pytest
import served  # noqa: F401  (skips where the extra is missing)
import tiny_folder
import torch

import foveakv
from foveakv import methods
from foveakv.engines.transformers.options import CacheOptions
from foveakv.errors import MethodError
from foveakv.serving.admission import Sizes
from foveakv.serving.choice import Choice, Policy
from foveakv.serving.engine import Delta, Done, Event, Failed, Generation
from foveakv.serving.sampling import Sampler, Sampling, top
from foveakv.serving.transformers_engine import TransformersEngine

GREEDY = Sampling(temperature=0)


class Collected:
    """A sink."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.done = threading.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, (Done, Failed)):
            self.done.set()

    def text(self) -> str:
        assert self.done.wait(120)
        assert isinstance(self.events[-1], Done), self.events[-1]
        return "".join(event.text for event in self.events if isinstance(event, Delta))


def method(name: str) -> Any:
    return methods.get(name, **(matrix.SMALL.get(name, {"budget": 0.5}) if name != "full" else {}))


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "gemma3", "llama"])
def test_requests_side_by_side_equal_generate(family: str) -> None:
    model, tokenizer = families.build(family), tiny_folder.tokenizer()
    prompts = [families.prompt(family)] if family == "llama" else [families.prompt(family, images=n) for n in (1, 2)]
    names = ["full", "snapkv", "h2o", "hybridkv"]
    cases = [(inputs, method(name)) for inputs in prompts for name in names]
    expected = []
    for inputs, chosen in cases:
        with foveakv.compress(model, chosen), torch.no_grad():
            ids = model.generate(**inputs, max_new_tokens=7, do_sample=False)
        expected.append(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    engine = TransformersEngine(model, tokenizer, policy=Policy("full"))
    sinks = [Collected() for _ in cases]
    for (inputs, chosen), sink in zip(cases, sinks, strict=True):
        engine.submit(Generation(inputs, Choice(chosen, CacheOptions(), True), 7, sampling=GREEDY), sink)
    assert [sink.text() for sink in sinks] == expected
    assert engine.status().stored_bytes == engine.status().reserved_bytes == 0
    engine.close()


@pytest.mark.parametrize("name", methods.available())
@pytest.mark.parametrize("kv_dtype", [None, "int4"])
def test_a_request_stores_no_more_than_was_estimated(name: str, kv_dtype: str | None) -> None:
    more = {"head_scores": [[0.5] * families.KV_HEADS] * families.LAYERS} if name == "sparsemm" else {}
    chosen, options = methods.get(name, **more), CacheOptions(kv_dtype=kv_dtype)
    model, inputs = families.build("qwen2_5_vl"), families.prompt("qwen2_5_vl", images=12)
    cache = foveakv.cache_for(model, chosen, options=options)
    with torch.no_grad():
        model.generate(**inputs, max_new_tokens=30, do_sample=False, **{matrix.cache_argument("qwen2_5_vl"): cache})
    sizes = Sizes(model)
    estimate = sizes.estimate(chosen, options, inputs["input_ids"].shape[1], 30)
    assert cache.stored_nbytes <= estimate


def test_text_prompts_with_a_default_for_images() -> None:
    model, tokenizer = families.build("llava"), tiny_folder.tokenizer()
    policy = Policy("random", {"budget": 0.5})
    engine = TransformersEngine(model, tokenizer, policy=policy)
    inputs, sink = families.prompt("llava", images=0), Collected()
    engine.submit(Generation(inputs, policy.default(), 3, sampling=GREEDY), sink)
    assert sink.text()
    assert sink.events[-1].usage["foveakv"]["method"] == "full"  # type: ignore[union-attr]
    engine.close()


def test_policies_that_cannot_be() -> None:
    for wrong in ({"method": "nothing"}, {"options": {"nothing": 1}}, {"allowed": ("nothing",)}, {"max_budget": 0}):
        with pytest.raises(MethodError):
            Policy(**wrong)  # type: ignore[arg-type]
    assert "sparsemm" not in Policy().methods  # it needs scores, which only the operator can give


def test_samples_follow_the_probabilities() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, float("-inf")])
    sampler = Sampler(Sampling(temperature=1.0, seed=3), 0)
    counts = torch.tensor([sampler.draw(logits) for _ in range(4000)]).bincount(minlength=5) / 4000
    assert counts == pytest.approx(logits.softmax(-1).tolist(), abs=0.03)
    narrow = Sampler(Sampling(temperature=1.0, top_p=0.7, seed=3), 0)
    assert {narrow.draw(logits) for _ in range(200)} == {0, 1}  # 0.64 + 0.24
    cold = Sampler(Sampling(temperature=1e-300, seed=3), 0)
    assert {cold.draw(logits) for _ in range(20)} == {0}
    own, others = top(logits, 1, 2)
    assert own == pytest.approx(float(logits.log_softmax(-1)[1]))
    assert [token for token, _ in others] == [0, 1]
