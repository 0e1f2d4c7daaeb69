"""The tokens that a method keeps in the vLLM plugin are those that it keeps in the transformers engine."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import families
import pytest
import torch
from torch import Tensor

import foveakv
from foveakv.core.budget import Geometry
from foveakv.engines.transformers.fingerprint import facts_of
from foveakv.engines.vllm.deciding import decide, read_prompt
from foveakv.methods import Method, get
from foveakv.methods.views import Observes, PrefillView

SIZE = 4


@dataclass
class Recorder(Method):
    """Keeps everything, and the views."""

    name: ClassVar[str] = "recorder"
    views: list[PrefillView] = field(default_factory=list)

    @property
    def observes(self) -> Observes:
        return Observes(queries="all")

    def prefill(self, view: PrefillView) -> None:
        self.views.append(view)


class Recorded:
    """A cache with the keys and values of the views, in blocks 0, 1, ..."""

    size = SIZE
    index: ClassVar[dict[str, int]] = {}

    def __init__(self, views: list[PrefillView]) -> None:
        self.views = views

    def read(self, idx: int, blocks: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        view = self.views[idx]
        return view.keys[0].transpose(0, 1)[:tokens], view.values[0].transpose(0, 1)[:tokens]

    def keys(self, idx: int, blocks: Tensor, tokens: int) -> Tensor:
        return self.read(idx, blocks, tokens)[0]

    def move(self, idx: int, source: Tensor, target: Tensor) -> None:
        raise AssertionError("deciding writes nothing")


class OneRank:
    def gather_heads(self, local: Tensor) -> Tensor:
        return local


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("random", {"budget": 0.5}),
        ("hae", {"ddes": False, "target_visual_tokens": 0.3, "score_layer": 0}),
        ("hae", {"ddes": False, "target_visual_tokens": 0.3, "score_layer": "last"}),
        ("hae", {"ddes": False, "r": 1.0, "alpha": None, "criterion": "dual", "score_layer": "0,1"}),
        ("hae", {"ddes": False, "criterion": "variance", "score_layer": "calibrated"}),
    ],
)
def test_equal_to_the_transformers_engine(no_gradients: None, family: str, name: str, options: dict[str, Any]) -> None:
    model, inputs = families.build(family), families.prompt(family, images=2)
    facts = facts_of(model)
    if options.get("score_layer") == "last":
        options = {**options, "score_layer": len(facts.layers) - 1}
    cache = foveakv.cache_for(model, get(name, **options))
    model(**inputs, past_key_values=cache, use_cache=True)
    expected = cache.kept(0)[0, 0]
    recorder = Recorder()
    model(**inputs, past_key_values=foveakv.cache_for(model, recorder), use_cache=True)
    views = recorder.views

    heads, tokens, dim = views[0].keys.shape[1:]
    sizes = Geometry(1, (0,), len(views), heads, dim, dim, 4)
    method = get(name, **options).for_model(facts)
    reading = read_prompt(method, views[0].prompt, sizes)
    for idx, view in enumerate(views):
        if method.needs_queries(idx):
            rows = view.query[0].transpose(0, 1)
            for start in (0, 7):  # in two chunks
                reading.take(idx, start, rows[start : 7 if start == 0 else tokens])
    store: Any = Recorded(views)
    keep = decide(reading, store, torch.arange(-(-tokens // SIZE)), views[0].scaling, OneRank())
    assert 0 < len(expected) < tokens
    assert keep.nonzero().flatten().tolist() == expected.tolist()
