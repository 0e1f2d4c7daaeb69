"""Relevance and choice of chunks by the compiled kernel, against the tensor operations of `Digests`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foveakv.kernels.build import KERNEL
from foveakv.kernels.cpu_chunks import CHUNKS, MOST_QUERIES, chunk_kernel
from foveakv.memory.digests import ChunkKernel, DigestDtype, Digests, Summary

pytestmark = pytest.mark.skipif(KERNEL.problem() is not None, reason="no CPU kernel here")


@pytest.fixture
def kernel() -> ChunkKernel:
    found = chunk_kernel(torch.device("cpu"))
    assert found is not None
    return found


@pytest.mark.parametrize("kind", ["model", "bf16", "int8", "int4"])
@pytest.mark.parametrize("summary", ["mean", "bounds"])
@pytest.mark.parametrize(("longest", "queries", "dim"), [(103, 3, 20), (16, 1, 8), (1, 9, 5), (700, 17, 64)])
def test_relevance_equals_the_reference(
    kernel: ChunkKernel, kind: DigestDtype, summary: Summary, longest: int, queries: int, dim: int
) -> None:
    generator = torch.Generator().manual_seed(longest)
    count = torch.tensor([longest, max(1, longest - 13), max(1, longest // 2)])
    width = dim * (1 if summary == "mean" else 2)
    digests = Digests(torch.randn(3, width, longest, generator=generator), count, kind, torch.float32)
    query, heads = torch.randn(4, queries, dim, generator=generator), torch.tensor([2, 0, 1, 2])
    given = query, heads, count[heads], summary
    wanted = digests.relevance(*given, straight=False, equal=False)
    made = kernel.relevance(digests, *given)
    assert made is not None
    torch.testing.assert_close(made, wanted, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("dim", "longest"), [(1, 5), (7, 130), (8, 67)])
def test_int4_of_hostile_queries(kernel: ChunkKernel, dim: int, longest: int) -> None:
    """The unused half byte of an odd number of channels has no effect; NaN reaches its own query's row alone."""
    generator = torch.Generator().manual_seed(dim)
    count = torch.tensor([longest, longest])
    digests = Digests(torch.randn(2, dim, longest, generator=generator) * 3, count, "int4", torch.bfloat16)
    assert digests.data.dtype == torch.uint8
    if dim % 2:
        digests.data[:, -1] |= 0xF0
    query = torch.randn(2, 2, dim, generator=generator) * 1e4
    query[1, 0, 0] = torch.nan
    given = query, torch.arange(2), count, "mean"
    wanted = digests.relevance(*given, straight=True, equal=True)
    made = kernel.relevance(digests, *given)
    assert made is not None
    torch.testing.assert_close(made[0], wanted[0], rtol=1e-5, atol=0.05)  # scores of 1e5, rounded to 0.01
    assert made[1].isnan().all()
    wrong = Digests(torch.randn(1, dim + 1, 4), count[:1] * 0 + 4, "int4", torch.bfloat16)
    with pytest.raises(ValueError, match="do not fit"):
        kernel.relevance(wrong, query[:1], torch.tensor([0]), torch.tensor([4]), "mean")


def test_cases_that_tensor_operations_serve(kernel: ChunkKernel) -> None:
    count, heads = torch.tensor([4]), torch.tensor([0])
    digests = Digests(torch.randn(1, 8, 4), count, "model", torch.float32)
    assert kernel.relevance(digests, torch.randn(1, MOST_QUERIES + 1, 8), heads, count, "mean") is None
    assert kernel.relevance(digests, torch.randn(1, 1, 8, dtype=torch.float64), heads, count, "mean") is None
    with pytest.raises(ValueError, match="do not fit"):
        kernel.relevance(digests, torch.randn(1, 1, 8), heads, count, "bounds")


def test_a_cache_with_another_backend_has_no_kernel() -> None:
    assert chunk_kernel(torch.device("cpu"), "cpu") is not None
    assert chunk_kernel(torch.device("cpu"), "blocks") is None
    assert chunk_kernel(torch.device("meta")) is None


def test_no_heads_have_no_relevance(kernel: ChunkKernel) -> None:
    digests = Digests(torch.randn(1, 8, 4), torch.tensor([4]), "model", torch.float32)
    none = torch.zeros(0, dtype=torch.int64)
    made = kernel.relevance(digests, torch.randn(0, 3, 8), none, none, "mean")
    assert made is not None
    assert made.shape == (0, 4)
    library = KERNEL.loaded
    assert library is not None
    arguments = CHUNKS.pack(0, 3, 8, 0, 4, 0, 0, digests.data.data_ptr(), 0, 0, 0, 0)
    assert library.foveakv_relevance(arguments) == 0
    resident, table = torch.zeros(0, 4, dtype=torch.bool), torch.zeros(0, 2, dtype=torch.int64)
    assert kernel.choose(torch.zeros(0, 4), none, none, resident, table) == 0


def chosen(relevance: Tensor, count: int, share: int) -> list[int]:
    """The best chunks, of equals the lower ones, ascending."""
    return sorted(sorted(range(count), key=lambda chunk: (-float(relevance[chunk]), chunk))[:share])


def test_choice_with_ties(kernel: ChunkKernel) -> None:
    generator = torch.Generator().manual_seed(3)
    relevance = torch.randint(0, 6, (5, 40), generator=generator).float()
    count, share = torch.tensor([40, 31, 7, 40, 1]), torch.tensor([10, 4, 7, 0, 1])
    resident, table = torch.zeros(5, 40, dtype=torch.bool), torch.empty(5, 10, dtype=torch.int64)
    assert kernel.choose(relevance, count, share, resident, table) == 0
    for row, (of, own) in enumerate(zip(count.tolist(), share.tolist(), strict=True)):
        wanted = chosen(relevance[row], of, own)
        assert table[row].tolist() == wanted + [-1] * (10 - own)
        assert resident[row].nonzero().flatten().tolist() == wanted
    assert kernel.choose(relevance, count, share, resident, table) == int(share.sum())
    before = resident.clone()
    stayed = kernel.choose(-relevance, count, share, resident, table)
    assert stayed == int((before & resident).sum())


def test_shares_that_do_not_fit(kernel: ChunkKernel) -> None:
    relevance, resident = torch.zeros(1, 4), torch.zeros(1, 4, dtype=torch.bool)
    for count, share in ((5, 1), (4, 3), (1, 2)):
        with pytest.raises(ValueError, match="do not fit"):
            kernel.choose(
                relevance, torch.tensor([count]), torch.tensor([share]), resident, torch.empty(1, 2, dtype=torch.int64)
            )
