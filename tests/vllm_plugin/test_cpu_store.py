"""Keys and values in the layouts of vLLM's CPU kernels, written by vLLM's own operation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from foveakv.engines.vllm import cpu_store
from foveakv.engines.vllm.block_layout import slots_of
from foveakv.engines.vllm.stored import products

HEADS, DIM, NAME = 2, 64, "layers.0.attn"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("gathered", [False, True])
def test_reads_moves_and_products(
    dtype: torch.dtype, size: int, gathered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gathered: as with a layout that is not known."""
    isa = _get_attn_isa(dtype, size, DIM, "auto")
    cache = torch.zeros(9, HEADS, size, 2 * DIM, dtype=dtype)
    layers: Any = {NAME: SimpleNamespace(isa=isa)}
    store = cpu_store.CPUStore(layers, {NAME: cache}, size)
    if gathered:
        monkeypatch.setattr(cpu_store, "_transposed_group", lambda *_: None)
    blocks, tokens = torch.tensor([4, 1, 7, 2]), 3 * size + 5
    keys, values = torch.randn(2, tokens, HEADS, DIM).to(dtype)
    cpu_store._write(cache, keys, values, slots_of(blocks, torch.arange(tokens), size), isa)
    found = store.read(0, blocks, tokens)
    assert found[0].equal(keys)
    assert found[1].equal(values)
    assert store.keys(0, blocks, tokens - 7).equal(keys[:-7])
    query = torch.randn(2, HEADS * 3, DIM).to(dtype)
    torch.testing.assert_close(store.dot(0, blocks, tokens, query), products(query, keys), atol=1e-4, rtol=1e-4)
    source, target = torch.randperm(tokens)[:20], torch.randperm(tokens)[:20]  # some are in both
    store.move(0, slots_of(blocks, source, size), slots_of(blocks, target, size))
    keys[target], values[target] = keys[source], values[source]
    found = store.read(0, blocks, tokens)
    assert found[0].equal(keys)
    assert found[1].equal(values)
