"""Later turns, chunks and forks of caches whose slots are in a pool."""

from __future__ import annotations

from typing import Any

import families
import matrix
import pytest
import talks
import torch

import foveakv

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.mark.parametrize(
    "name", ["adakv", "h2o", "hae", "hybridkv", "lookm", "prefixkv", "snapkv", "streaming", "tova"]
)
def test_turns(name: str) -> None:
    model = matrix.model("llava", torch.float64)

    def say(session: Any) -> None:
        talks.converse("llava", model, (True, False))

    talks.check(model, talks.compressed(model, matrix.method(name), say, pool=foveakv.Pool(page_size=8)), say)


@pytest.mark.parametrize("name", ["hae", "hybridkv", "snapkv"])
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_a_block_does_not_change_what_a_fork_stores(name: str, kv_dtype: str | None) -> None:
    """Slots of a fork are those of the prompt after the other cache has compressed a further turn, in shared pages."""
    model, inputs = matrix.model("llava", torch.float64), families.prompt("llava", dtype=torch.float64)
    argument, pool = matrix.cache_argument("llava"), foveakv.Pool(page_size=8)
    cache = foveakv.cache_for(model, matrix.method(name), pool=pool, kv_dtype=kv_dtype)
    model(**inputs, **{argument: cache})
    fork = cache.fork()
    kept = [fork.kept(layer.layer_idx) for layer in fork.compressed]
    numbers = [layer.segments.gather() for layer in fork.compressed]
    model(input_ids=torch.tensor([families.words(9, 5)]), **{argument: cache})
    assert len(cache.blocks) == 2
    for layer, positions, (keys, values) in zip(fork.compressed, kept, numbers, strict=True):
        assert torch.equal(fork.kept(layer.layer_idx), positions)
        assert all(torch.equal(a, b) for a, b in zip(layer.segments.gather(), (keys, values), strict=True))
