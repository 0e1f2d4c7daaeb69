"""Reading a long context in chunks holds the budget, one chunk of all layers, and one layer's work."""

from __future__ import annotations

import weakref
from typing import Any

import families
import matrix
import pytest
import torch

import foveakv
from foveakv.engines.transformers import layer as layers

pytestmark = pytest.mark.usefixtures("no_gradients")

TOKENS, CHUNK = 2048, 64


def read(model: Any, method: Any, ids: torch.Tensor, **options: Any) -> Any:
    with foveakv.compress(model, method, **options) as session:
        model.generate(input_ids=ids, max_new_tokens=1, do_sample=False, prefill_chunk_size=CHUNK)
        return session.cache


class Held:
    """Highest bytes of a cache, counted on its storages before and after every attention and during decisions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: Any) -> None:
        self.highest = 0
        prefill = type(method).prefill

        def decide(method: Any, view: Any) -> Any:
            decision = prefill(method, view)
            self.count(self.running, view, decision)
            return decision

        monkeypatch.setattr(type(method), "prefill", decide)
        attend, end = layers.CompressedLayer.attend, layers.CompressedLayer.end_prefill

        def counted(function: Any) -> Any:
            def call(layer: Any, *args: Any) -> Any:
                self.running = weakref.proxy(layer)
                self.count(layer)
                result = function(layer, *args)
                self.count(layer)
                return result

            return call

        monkeypatch.setattr(layers.CompressedLayer, "attend", counted(attend))
        monkeypatch.setattr(layers.CompressedLayer, "end_prefill", counted(end))

    def count(self, layer: Any, *more: Any) -> None:
        cache = layer.cache
        queries = 0 if not more else more[0].query.untyped_storage().nbytes()  # of the model, not of the cache
        held = sum(matrix.storage([list(cache.layers), cache.state, *more]).values()) - queries
        self.highest = max(self.highest, held)


@pytest.mark.parametrize("name", ["snapkv", "streaming", "mixkv", "pyramidkv"])
def test_chunks_hold_the_budget_and_one_chunk(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.build("llama", max_position_embeddings=2 * TOKENS)
    ids = torch.tensor([families.words(TOKENS, 0)])
    method = foveakv.methods.get(name, budget=0.1)
    held = Held(monkeypatch, method)
    cache = read(model, method, ids, chunks="compress")
    geometry = cache.geometry
    full = geometry.token_bytes * TOKENS
    chunk = geometry.token_bytes * CHUNK
    one_layer = (full // 10 + chunk) // geometry.layers * (2 if name == "pyramidkv" else 1)  # its first has more
    side = 3 * (TOKENS // 10 + CHUNK) * geometry.kv_heads * 8  # of this layer: positions, slot numbers, masks
    stored = TOKENS // 10 * geometry.heads * 8 + full // 160  # of all layers: positions, and room for more slots
    bound = full // 10 + chunk + one_layer + side + stored
    assert held.highest < bound, f"{held.highest:,} bytes held, {bound:,} allowed, {full:,} in full"
    assert held.highest * 0.97 <= cache.peak_nbytes < bound
    assert cache.stored_nbytes < 0.15 * full
    assert len(cache.blocks) == TOKENS // CHUNK


def test_whole_prompts_hold_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: what is held when chunks are compressed together."""
    model = families.build("llama", max_position_embeddings=2 * TOKENS)
    ids = torch.tensor([families.words(TOKENS, 0)])
    method = foveakv.methods.get("snapkv", budget=0.1)
    held = Held(monkeypatch, method)
    cache = read(model, method, ids)
    assert held.highest > cache.geometry.token_bytes * TOKENS
