"""Slots in the order of tokens, after evictions that moved some."""

from __future__ import annotations

import pytest
import torch

from foveakv.memory.segments import Segments


@pytest.mark.parametrize("kv_dtype", [None, "int8", "int4"])
@pytest.mark.parametrize("even", [True, False])
def test_slots_in_token_order(even: bool, kv_dtype: str | None) -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, 2, 40, 32), torch.randn(2, 2, 40, 32)
    positions = torch.arange(40).expand(2, 40)
    keep = torch.ones(2, 2, 40, dtype=torch.bool) if even else torch.rand(2, 2, 40) > 0.3
    segments = Segments.from_dense(keys, values, keep, positions, kv_dtype=kv_dtype, residual_length=6)
    segments.add_field("score", segments.positions().float())
    segments.evict(torch.tensor([1, 5, 9]).expand(2, 2, 3), [3, 2])
    before = segments.positions()
    k, v = segments.gather()
    segments.in_token_order()
    after = segments.positions()
    valid = segments.valid()
    assert not torch.equal(before, after)
    order = torch.where(before < 0, 1000, before).argsort(-1)
    assert torch.equal(after, before.gather(2, order))
    assert torch.equal(segments.field("score")[valid], after[valid].float())
    for found, was in zip(segments.gather(), (k, v), strict=True):
        assert torch.equal(found, was.gather(2, order[..., None].expand_as(was)))
    rows = segments.positions()
    segments.in_token_order()
    assert torch.equal(segments.positions(), rows)
