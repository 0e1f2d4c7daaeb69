"""Digests in fewer bits against exact ones.

`python tests/memory/test_digests.py` prints the recall table of docs/methods.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foveakv.core.budget import digest_bytes
from foveakv.memory.digests import DigestDtype, Digests, summarised, widened_query

CHUNK = 8
KINDS: list[DigestDtype] = ["model", "bf16", "int8", "int4"]


def keys(kind: str, heads: int, tokens: int, dim: int, seed: int = 0) -> Tensor:
    """Keys [heads, tokens, dim]: noise; peaked (neighbours alike, three times as long); with far channels as well."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(heads, tokens, dim, generator=generator)
    if kind != "random":
        places = torch.randn(heads, tokens // 32 + 1, dim, generator=generator).repeat_interleave(32, dim=1)
        made = 0.5 * made + 3 * places[:, :tokens]
    if kind == "far channels":
        made[..., :4] += torch.tensor([40.0, -60, 25, 100])
        made[..., 4:8] *= 8
    return made


def digests(made: Tensor) -> Tensor:
    """Mean keys [heads, dim, chunks]."""
    return made.unflatten(1, (-1, CHUNK)).mean(2).mT.contiguous()


def best(scores: Tensor, share: float) -> Tensor:
    """bool [heads, chunks], as `ChunkStore` chooses: scores [heads, queries, chunks]."""
    relevance = scores.log_softmax(-1).amax(1)
    top = relevance.topk(max(1, int(share * relevance.shape[-1])), dim=-1).indices
    return torch.zeros_like(relevance, dtype=torch.bool).scatter_(1, top, True)


def recall(
    kind: DigestDtype, of: str, *, dtype: torch.dtype = torch.float32, tokens: int = 4096, share: float = 0.1
) -> float:
    """Share of the chunks chosen by exact digests that digests of `kind` choose as well; groups of 7 queries."""
    heads, dim, group, steps = 4, 128, 7, 8
    made = keys(of, heads, tokens, dim).to(dtype)
    exact = digests(made.double())
    stored = Digests(exact.float(), torch.full((heads,), tokens // CHUNK), kind, dtype)
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        query = (torch.randn(heads, group, dim, generator=generator) * 2).to(dtype)
        scaled = query * dim**-0.5
        want, got = best(scaled.double() @ exact, share), best(stored.scores(scaled), share)
        found.append(float((want & got).sum() / want.sum()))
    return sum(found) / len(found)


@pytest.mark.parametrize("of", ["random", "peaked", "far channels"])
@pytest.mark.parametrize(("kind", "least"), [("model", 0.999), ("bf16", 0.98), ("int8", 0.97), ("int4", 0.8)])
def test_recall(kind: DigestDtype, least: float, of: str) -> None:
    assert recall(kind, of) >= least


@pytest.mark.parametrize("of", ["random", "peaked", "far channels"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_recall_of_bounds_in_half_precision(dtype: torch.dtype, of: str) -> None:
    """Bounds of all pages are much alike and far from zero: scores of them as they are would be rounded to ties."""
    heads, dim, group, tokens, page = 4, 128, 7, 4096, 16
    made = keys(of, heads, tokens, dim).to(dtype)
    exact = summarised(made.double().view(-1, page, dim), "bounds").view(heads, tokens // page, 2 * dim).mT
    stored = Digests(exact.float(), torch.full((heads,), tokens // page), "model", dtype)
    generator = torch.Generator().manual_seed(1)
    query = widened_query((torch.randn(heads, group, dim, generator=generator) * 2 * dim**-0.5).to(dtype), "bounds")
    want, got = best(query.double() @ exact, 0.1), best(stored.scores(query), 0.1)
    assert float((want & got).sum() / want.sum()) >= 0.98


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_scores(kind: DigestDtype, dtype: torch.dtype) -> None:
    """Differences between chunks are those of exact digests, whatever is beyond a head's chunks."""
    exact = digests(keys("peaked", 3, 160, 16))
    count = torch.tensor([20, 7, 12])
    for head, chunks in enumerate(count.tolist()):
        exact[head, :, chunks:] = 1e6
    stored = Digests(exact, count, kind, dtype)
    query = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
    got, want = stored.scores(query), query.double() @ exact.double()
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    exactly = 1e-4 if dtype in (torch.float32, torch.float64) else 0.2
    near = {"model": exactly, "bf16": 0.2, "int8": 0.4, "int4": 4.0}[kind]
    for head, chunks in enumerate(count.tolist()):
        a, b = (x[head, :, :chunks].double() for x in (got, want))
        torch.testing.assert_close(a - a[:, :1], b - b[:, :1], rtol=0, atol=near)
    swapped = stored.scores(query, torch.tensor([2, 0, 2]))
    torch.testing.assert_close(swapped[1], stored.scores(query[[1, 1, 1]])[0])


def test_wide_heads_are_scored_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = digests(keys("random", 2, 800, 16))
    stored = Digests(exact, torch.tensor([100, 100]), "int8", torch.float32)
    query = torch.randn(2, 3, 16)
    whole = stored.scores(query)
    monkeypatch.setattr("foveakv.memory.digests._AT_ONCE", 2 * 16 * 7)
    torch.testing.assert_close(stored.scores(query), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes(kind: DigestDtype) -> None:
    stored = Digests(torch.randn(3, 16, 10), torch.tensor([10, 4, 0]), kind, torch.float32)
    each, once = digest_bytes(kind, 16, 4)
    assert stored.nbytes == 3 * (10 * each + once)
    assert stored.take(torch.tensor([1]), 4).nbytes == 4 * each + once


@pytest.mark.parametrize("kind", KINDS)
def test_heads_without_chunks_and_equal_chunks(kind: DigestDtype) -> None:
    assert Digests(torch.zeros(2, 16, 0), torch.tensor([0, 0]), kind, torch.float32).scores(torch.ones(2, 1, 16)).shape
    same = Digests(torch.full((1, 16, 5), 3.0), torch.tensor([5]), kind, torch.float32).scores(torch.ones(1, 1, 16))
    assert bool((same == same[..., :1]).all())
    assert bool(same.isfinite().all())


if __name__ == "__main__":
    for length in (4096, 32768):
        for model in (torch.float32, torch.bfloat16):
            for how in KINDS:
                row = [
                    f"{recall(how, of, dtype=model, tokens=length):.4f}" for of in ("random", "peaked", "far channels")
                ]
                print(length, model, how, *row)
