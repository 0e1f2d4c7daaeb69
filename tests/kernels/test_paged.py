"""Attention over own slots and pages of a store, against attention over all of them side by side."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from foveakv.kernels import cpu
from foveakv.kernels.paged import attend_with_pages, reads_pages
from foveakv.memory.pages import Pages
from foveakv.memory.segments import Segments

pytestmark = pytest.mark.skipif(cpu.problem() is not None, reason="no CPU kernel")
CHUNK, DIM, VALUE_DIM, GROUP, STORED = 4, 16, 12, 3, 20
BATCH, HEADS = 2, 2


class Case:
    """Ragged runs and a table with different numbers of pages; run 1 has none, run 2 no slots of its own."""

    def __init__(self, q: int = 1, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        columns = 23
        keep = torch.rand(BATCH, HEADS, columns, generator=generator) < 0.6
        keep[1, 0] = False
        self.segments = Segments.from_dense(
            normal(BATCH, HEADS, columns, DIM),
            normal(BATCH, HEADS, columns, VALUE_DIM),
            keep,
            torch.arange(columns).expand(BATCH, -1),
        )
        table = torch.tensor([[3, 17, 0], [-1, -1, -1], [5, 6, -1], [19, 1, -1]])
        self.pages = Pages(normal(STORED, CHUNK * DIM), normal(STORED, CHUNK * VALUE_DIM), table)
        self.query = normal(BATCH, HEADS * GROUP, q, DIM)
        self.mask = torch.rand(BATCH, HEADS, q, self.segments.max_length, generator=generator) < 0.7
        self.page_mask = torch.rand(BATCH, HEADS, q, table.shape[1] * CHUNK, generator=generator) < 0.7

    def expected(self, mask: Tensor | None, page_mask: Tensor | None) -> Tensor:
        """float64, run by run."""
        q = self.query.shape[2]
        own_keys, own_values = self.segments.gather()
        found = torch.zeros(BATCH, HEADS * GROUP, q, VALUE_DIM, dtype=torch.float64)
        for b in range(BATCH):
            for h in range(HEADS):
                length = int(self.segments.lengths[b, h])
                chosen = [n for n in self.pages.table[b * HEADS + h].tolist() if n >= 0]
                keys = [own_keys[b, h, :length], *(self.pages.keys[n].view(CHUNK, DIM) for n in chosen)]
                values = [own_values[b, h, :length], *(self.pages.values[n].view(CHUNK, VALUE_DIM) for n in chosen)]
                allowed = torch.ones(q, length + len(chosen) * CHUNK, dtype=torch.bool)
                if mask is not None:
                    allowed[:, :length] = mask[b, h, :, :length]
                if page_mask is not None:
                    allowed[:, length:] = page_mask[b, h, :, : len(chosen) * CHUNK]
                for g in range(h * GROUP, (h + 1) * GROUP):
                    scores = self.query[b, g].double() @ torch.cat(keys).double().T * 0.25
                    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0)
                    found[b, g] = weights @ torch.cat(values).double()
        return found


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("backend", ["auto", "cpu", "blocks", "reference"])
@pytest.mark.parametrize("hidden", ["nothing", "own", "pages", "both"])
@pytest.mark.parametrize("q", [1, 3, 20])
def test_output(q: int, hidden: str, backend: str, dtype: torch.dtype, near: float) -> None:
    case = Case(q, dtype)
    mask = case.mask if hidden in ("own", "both") else None
    page_mask = case.page_mask if hidden in ("pages", "both") else None
    out, attention_sum, _ = attend_with_pages(
        case.query, case.segments.runs, 0.25, case.pages, mask, page_mask, backend=backend
    )
    assert out.dtype == dtype
    assert attention_sum is None
    torch.testing.assert_close(out.double(), case.expected(mask, page_mask), rtol=near, atol=near)


def test_a_query_that_sees_nothing_gets_zero() -> None:
    case = Case()
    mask, page_mask = torch.zeros_like(case.mask), torch.zeros_like(case.page_mask)
    out = attend_with_pages(case.query, case.segments.runs, 0.25, case.pages, mask, page_mask).out
    assert torch.equal(out, torch.zeros_like(out))


def test_attention_sum_is_that_of_the_own_slots() -> None:
    case = Case()
    attention_sum = attend_with_pages(
        case.query, case.segments.runs, 0.25, case.pages, need_attention_sum=True
    ).attention_sum
    assert attention_sum is not None
    assert attention_sum.shape == (BATCH, HEADS, case.segments.max_length)
    assert float(attention_sum[0, 0].sum()) < GROUP
    assert float(attention_sum[0, 1].sum()) == pytest.approx(GROUP, abs=1e-5)
    merged = attend_with_pages(
        case.query, case.segments.runs, 0.25, case.pages, None, torch.ones_like(case.page_mask), need_attention_sum=True
    )
    torch.testing.assert_close(merged.attention_sum, attention_sum)


@pytest.mark.parametrize(
    ("backend", "dtype", "stored", "expected"),
    [
        ("auto", torch.float32, torch.float32, True),
        ("cpu", torch.bfloat16, torch.bfloat16, True),
        ("auto", torch.float64, torch.float64, False),
        ("auto", torch.float32, torch.bfloat16, False),
        ("blocks", torch.float32, torch.float32, False),
        ("reference", torch.float32, torch.float32, False),
    ],
)
def test_when_pages_are_read(backend: str, dtype: torch.dtype, stored: torch.dtype, expected: bool) -> None:
    runs: Any = Case(dtype=dtype).segments.runs
    assert reads_pages(runs, torch.zeros(1, CHUNK * DIM, dtype=stored), backend) == expected
