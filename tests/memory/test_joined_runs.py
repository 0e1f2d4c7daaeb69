"""Several caches in one call: as each of them alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from foveakv.kernels import attend, problem
from foveakv.memory.joined import can_join, join_runs
from foveakv.memory.paged import PagedSegments
from foveakv.memory.pool import Pool

BACKENDS = ["reference", "blocks", *(["cpu"] if problem("cpu") is None else [])]


def member(pool: Pool, batch: int, columns: int, dtype: torch.dtype = torch.float32, **given: Any) -> PagedSegments:
    keys, values = torch.randn(batch, 2, columns, 16).to(dtype), torch.randn(batch, 2, columns, 16).to(dtype)
    keep = torch.rand(batch, 2, columns) < 0.7
    positions = torch.arange(columns).repeat(batch, 1)
    return PagedSegments.from_dense(keys, values, keep, positions, pool=pool, **given)


def step(member: PagedSegments) -> None:
    batch = member.batch
    member.append(torch.randn(batch, 2, 1, 16), torch.randn(batch, 2, 1, 16), torch.zeros(batch, 1, dtype=torch.int64))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "given", [{}, {"kv_dtype": "int8", "residual_length": 8}, {"kv_dtype": "int4", "residual_length": 0}]
)
def test_one_call_equals_a_call_for_each(backend: str, given: dict[str, Any]) -> None:
    torch.manual_seed(0)
    pool = Pool(page_size=16)
    members = [member(pool, batch, columns, **given) for batch, columns in ((1, 100), (2, 7), (1, 45))]
    for _ in range(20):
        for each in members:
            step(each)
        query = torch.randn(4, 6, 1, 16)
        assert can_join(members)
        got = attend(query, join_runs(members), 0.25, need_attention_sum=True, backend=backend)
        for part, found, sums in zip(members, split(got.out, members), split(got.attention_sum, members), strict=True):
            rows = split(query, members)[members.index(part)]
            want = attend(rows, part.runs, 0.25, need_attention_sum=True, backend=backend)
            torch.testing.assert_close(found, want.out, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(sums[..., : part.max_length], want.attention_sum, rtol=1e-5, atol=1e-6)
            assert not sums[..., part.max_length :].any()
        members[0], members[2] = members[2], members[0]  # the order is the caller's


def split(tensor: Tensor | None, members: list[PagedSegments]) -> list[Tensor]:
    assert tensor is not None
    return list(tensor.split([each.batch for each in members]))


def test_only_one_kind_can_be_joined() -> None:
    pool = Pool()
    plain = member(pool, 1, 20)
    assert join_runs([plain]) is plain.runs
    others = [
        member(Pool(), 1, 20), member(pool, 1, 20, torch.bfloat16), member(pool, 1, 20, kv_dtype="int8"),
    ]  # fmt: skip
    for other in others:
        assert not can_join([plain, other])
        with pytest.raises(ValueError, match="same kind of pages"):
            join_runs([plain, other])
    assert not can_join([member(pool, 1, 20, kv_dtype="int8"), member(pool, 1, 20, kv_dtype="int8", residual_length=3)])
    with pytest.raises(ValueError, match="same kind of pages"):
        join_runs([])
