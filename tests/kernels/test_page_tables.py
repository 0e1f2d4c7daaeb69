"""Attention over runs in pages equals attention over the same runs in contiguous rows, with every backend."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from paged_runs import in_pages
from test_kernels import PATHS, TOLERANCE, UNIT, cases, make
from torch import Tensor

from foveakv.kernels import attend, cpu, problem, reference
from foveakv.kernels.paged import attend_with_pages
from foveakv.memory.pages import Pages
from foveakv.memory.runs import Runs, contiguous, dense
from foveakv.memory.segments import Segments

SIZES = [1, 5, UNIT, 32, 64, 128]
needs_cpu_kernel = pytest.mark.skipif(problem("cpu") is not None, reason="no CPU kernel here")


def close(got: Tensor, want: Tensor, tolerance: float) -> bool:
    return torch.allclose(got, want, rtol=tolerance, atol=tolerance)


def compare(query: Tensor, runs: Runs, paged: Runs, mask: Tensor | None, path: object, other: Tensor | None) -> None:
    tolerance = TOLERANCE[query.dtype]
    want = reference.attend(query, runs, query.shape[-1] ** -0.5, mask, True, True, other)
    for sums in (False, True):
        got = path(query, paged, query.shape[-1] ** -0.5, mask, need_attention_sum=sums, need_lse=True, other_lse=other)
        assert close(got.out, want.out, tolerance)
        assert close(got.lse, want.lse, tolerance)
        if sums:
            assert close(got.attention_sum, want.attention_sum, tolerance)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_paths_of_blocks_and_the_reference(case: tuple[Tensor, Runs, Tensor | None]) -> None:
    query, runs, mask = case
    for size in (3, UNIT):
        for paged in (in_pages(runs, size), in_pages(runs, size, shuffled=False)):
            for path in (reference.attend, *PATHS.values()):
                compare(query, runs, paged, mask, path, None)


@needs_cpu_kernel
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [[[700, 700]], [[0, 1, 64], [129, 63, 500]]])
def test_cpu_kernel_bit_by_bit(size: int, dtype: torch.dtype, lengths: list[list[int]]) -> None:
    torch.manual_seed(size)
    runs = make(torch.tensor(lengths), dtype, 20, 12)
    query = torch.randn(runs.batch, runs.heads * 3, 2, 20, dtype=dtype)
    mask = torch.rand(runs.batch, 1, 2, runs.max_length) < 0.7
    for allowed in (None, mask):
        for sums in (False, True):
            want = cpu.attend(query, runs, 0.2, allowed, sums, True)
            got = cpu.attend(query, in_pages(runs, size), 0.2, allowed, sums, True)
            for a, b in zip(got, want, strict=True):
                assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("backend", ["reference", "blocks", pytest.param("cpu", marks=needs_cpu_kernel)])
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("even", [False, True])
def test_quantized_pages(backend: str, kind: str, window: int, even: bool) -> None:
    torch.manual_seed(3)
    keep = torch.ones(2, 2, 150, dtype=torch.bool) if even else torch.rand(2, 2, 150) < 0.7
    keys, values = torch.randn(2, 2, 150, 16), torch.randn(2, 2, 150, 16)
    positions = torch.arange(150).repeat(2, 1)
    runs = Segments.from_dense(keys, values, keep, positions, kv_dtype=kind, residual_length=window).runs
    query = torch.randn(2, 4, 1, 16)
    want = attend(query, runs, 0.25, need_attention_sum=True, need_lse=True, backend=backend)
    for size in (16, 64):
        got = attend(query, in_pages(runs, size), 0.25, need_attention_sum=True, need_lse=True, backend=backend)
        for a, b in zip(got, want, strict=True):
            assert close(a, b, 1e-5)
    assert contiguous(in_pages(runs, 16)).residual is not None or not window


@needs_cpu_kernel
def test_own_pages_beside_chosen_chunks() -> None:
    runs = make(torch.tensor([[70, 5]]), torch.float32, 8, 8)
    chunks = Pages(torch.randn(4, 3 * 8), torch.randn(4, 3 * 8), torch.tensor([[1, 3], [2, -1]]))
    query = torch.randn(1, 4, 1, 8)
    want = attend_with_pages(query, runs, 0.3, chunks, need_attention_sum=True)
    got = attend_with_pages(query, in_pages(runs, 16), 0.3, chunks, need_attention_sum=True)
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.attention_sum, want.attention_sum)


@needs_cpu_kernel
def test_tables_that_do_not_fit_are_refused() -> None:
    runs = make(torch.tensor([[40, 20]]), torch.float32)
    query = torch.randn(1, 2, 1, 8)
    for page in (-1, 10**6):
        paged = in_pages(runs, 16)
        paged.table_host[0, 1] = page
        with pytest.raises(ValueError, match="beyond its buffer"):
            cpu.attend(query, paged, 0.3)
    paged = in_pages(runs, 16)
    paged.table_host = paged.table_host.long()
    with pytest.raises(ValueError, match="int32"):
        cpu.attend(query, paged, 0.3)
    with pytest.raises(ValueError, match="dense views"):
        dense(in_pages(make(torch.tensor([[8, 8]])), 4))


def test_autocast_widens_stored_slots_only() -> None:
    runs = make(torch.tensor([[30, 11]]), torch.float32)
    query = torch.randn(1, 2, 1, 8, dtype=torch.float64)
    compare(query, runs, in_pages(runs, 8), None, PATHS["auto"], None)
