"""Query, keys and values of different dtypes, as under autocast, in every backend; and autocast itself."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foveakv import kernels
from foveakv.errors import MethodError
from foveakv.kernels import attend
from foveakv.kernels.contract import Attended
from foveakv.kernels.paged import attend_with_pages
from foveakv.memory.chunks import ChunkStore
from foveakv.memory.digests import Digests
from foveakv.memory.pages import Pages
from foveakv.memory.runs import Runs
from foveakv.memory.segments import Segments

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BACKENDS = ("auto", *(name for name in kernels.BACKENDS if name != "triton"))  # it has test_triton_kernel.py
NEAR = {torch.float32: 1e-5, torch.float64: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
DIM, VALUE_DIM, CHUNK = 16, 12, 4
LENGTHS = {"uniform": [[70, 70]], "ragged": [[9, 600]]}


def needs_kernel(backend: str) -> None:
    if backend != "auto" and (reason := kernels.problem(backend)) is not None:
        pytest.skip(reason)


def dense(lengths: list[list[int]], key: torch.dtype, value: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values, what is kept, positions."""
    generator = torch.Generator().manual_seed(0)
    wanted = torch.tensor(lengths)
    batch, heads, columns = *wanted.shape, int(wanted.max())
    keys = torch.randn(batch, heads, columns, DIM, generator=generator).to(key)
    values = torch.randn(batch, heads, columns, VALUE_DIM, generator=generator).to(value)
    keep = torch.arange(columns) < wanted[..., None]
    return keys, values, keep, torch.arange(columns).expand(batch, -1)


def ask(q: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(1, 6, q, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)


def same(got: Attended, want: Attended, dtype: torch.dtype, near: float) -> None:
    assert got.out.dtype == dtype
    torch.testing.assert_close(got.out.double(), want.out.double(), rtol=near, atol=near)
    for found, expected in ((got.attention_sum, want.attention_sum), (got.lse, want.lse)):
        assert found is not None
        assert expected is not None
        assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(found.double(), expected.double(), rtol=1e-4, atol=1e-4)


def in_double(runs: Runs, query: Tensor, mask: Tensor | None) -> Attended:
    wide = replace(runs, keys=runs.keys.double(), values=runs.values.double())
    return attend(
        query.double(), wide, 0.25, mask, need_attention_sum=True, need_lse=True, backend="reference"
    )  # fmt: skip


@pytest.mark.parametrize("shape", list(LENGTHS))
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("query", "key", "value"), list(itertools.product(DTYPES, repeat=3)))
def test_attention(query: torch.dtype, key: torch.dtype, value: torch.dtype, backend: str, shape: str) -> None:
    """Runs as they are, also where nobody unified keys and values."""
    needs_kernel(backend)
    keys, values, keep, positions = dense(LENGTHS[shape], key, value)
    runs = Segments.from_dense(keys.float(), values.float(), keep, positions).runs
    runs = replace(runs, keys=runs.keys.to(key), values=runs.values.to(value))
    for q, masked in ((1, False), (3, True)):
        asked = ask(q, query)
        mask = (
            torch.rand(1, 2, q, runs.max_length, generator=torch.Generator().manual_seed(2)) < 0.5 if masked else None
        )
        want = in_double(runs, asked, mask)
        got = attend(asked, runs, 0.25, mask, need_attention_sum=True, need_lse=True, backend=backend)
        same(got, want, query, NEAR[query])
        got = attend(asked, runs, 0.25, mask, backend=backend)
        torch.testing.assert_close(got.out.double(), want.out, rtol=NEAR[query], atol=NEAR[query])


@pytest.mark.parametrize("backend", ["auto", "reference", "blocks"])
@pytest.mark.parametrize(("query", "stored"), [(torch.float64, torch.bfloat16), (torch.bfloat16, torch.float64)])
def test_float64(query: torch.dtype, stored: torch.dtype, backend: str) -> None:
    runs = Segments.from_dense(*dense(LENGTHS["ragged"], stored, stored)).runs
    asked = ask(2, query)
    got = attend(asked, runs, 0.25, need_attention_sum=True, need_lse=True, backend=backend)
    same(got, in_double(runs, asked, None), query, NEAR[query])


def test_the_cpu_kernel_refuses_float64() -> None:
    needs_kernel("cpu")
    runs = Segments.from_dense(*dense(LENGTHS["ragged"], torch.float32, torch.float32)).runs
    with pytest.raises(MethodError, match=r"float64.*choose backend='blocks' or 'auto'"):
        attend(ask(1, torch.float64), runs, 0.25, backend="cpu")


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("query", "key", "value"), list(itertools.product(DTYPES, repeat=3)))
def test_quantized_slots(query: torch.dtype, key: torch.dtype, value: torch.dtype, backend: str, kind: str) -> None:
    """Rows, and full-precision copies that had different dtypes for keys and values."""
    needs_kernel(backend)
    keys, values, keep, positions = dense([[30, 70]], key, value)
    segments = Segments.from_dense(keys, values, keep, positions, kv_dtype=kind, residual_length=8)
    segments.append(keys[:, :, :3].to(query), values[:, :, :3].half(), torch.arange(70, 73)[None])
    residual = segments.runs.residual
    assert residual is not None
    assert residual.keys.dtype == residual.values.dtype == torch.promote_types(key, value)
    unlike = replace(segments.runs, residual=replace(residual, keys=residual.keys.float()))
    asked = ask(1, query)
    for runs in (segments.runs, unlike):
        want = attend(asked.double(), runs, 0.25, need_attention_sum=True, need_lse=True, backend="reference")
        got = attend(asked, runs, 0.25, need_attention_sum=True, need_lse=True, backend=backend)
        same(got, want, query, NEAR[query])


@pytest.mark.parametrize("shape", list(LENGTHS))
@pytest.mark.parametrize(("key", "value", "new"), list(itertools.product(DTYPES, repeat=3)))
def test_memory_stores_one_dtype_and_converts_what_is_added(
    key: torch.dtype, value: torch.dtype, new: torch.dtype, shape: str
) -> None:
    keys, values, keep, positions = dense(LENGTHS[shape], key, value)
    segments = Segments.from_dense(keys, values, keep, positions)
    stored = torch.promote_types(key, value)
    more = torch.full((1, 2, 2, DIM), 0.1, dtype=new), torch.full((1, 2, 2, VALUE_DIM), 0.2, dtype=value)
    segments.append(*more, torch.tensor([[600, 601]]))
    place = torch.tensor([0])
    segments.write(place, place, more[0][0, 0, :1], more[1][0, 0, :1], place)
    got_keys, got_values = segments.gather()
    assert got_keys.dtype == got_values.dtype == stored
    last = int(segments.lengths[0, 1]) - 1
    assert torch.equal(got_keys[0, 1, : last - 1], keys[0, 1, : last - 1].to(stored))
    assert torch.equal(got_values[0, 1, : last - 1], values[0, 1, : last - 1].to(stored))
    assert torch.equal(got_keys[0, 1, last], more[0][0, 1, 1].to(stored))
    assert torch.equal(got_keys[0, 0, 0], more[0][0, 0, 0].to(stored))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("query", "slots", "store"), list(itertools.product(DTYPES, repeat=3)))
def test_pages(query: torch.dtype, slots: torch.dtype, store: torch.dtype, backend: str) -> None:
    """Pages in another dtype than the slots, and than their own values."""
    needs_kernel("cpu")
    keys, values, keep, positions = dense([[9, 30]], slots, slots)
    runs = Segments.from_dense(keys, values, keep, positions).runs
    generator = torch.Generator().manual_seed(3)
    page_keys = torch.randn(5, CHUNK * DIM, generator=generator).to(store)
    page_values = torch.randn(5, CHUNK * VALUE_DIM, generator=generator).to(slots)
    table = torch.tensor([[2, 0], [4, -1]])
    asked = ask(1, query)
    got = attend_with_pages(
        asked, runs, 0.25, Pages(page_keys, page_values, table), need_attention_sum=True, backend=backend
    )
    all_keys, all_values = torch.zeros(1, 2, 38, DIM).double(), torch.zeros(1, 2, 38, VALUE_DIM).double()
    for head, (chosen, length) in enumerate((([2, 0], 9), ([4], 30))):
        own_keys, own_values = keys[0, head, :length].double(), values[0, head, :length].double()
        end = length + CHUNK * len(chosen)
        all_keys[0, head, :end] = torch.cat([own_keys, page_keys[chosen].double().view(-1, DIM)])
        all_values[0, head, :end] = torch.cat([own_values, page_values[chosen].double().view(-1, VALUE_DIM)])
    kept = torch.arange(38) < torch.tensor([[17, 34]])[..., None]
    joined = Segments.from_dense(all_keys, all_values, kept, torch.arange(38)[None]).runs
    want = attend(asked.double(), joined, 0.25, need_attention_sum=True, backend="reference")
    assert got.out.dtype == query
    assert got.attention_sum is not None
    assert want.attention_sum is not None
    torch.testing.assert_close(got.out.double(), want.out, rtol=NEAR[query], atol=NEAR[query])
    torch.testing.assert_close(got.attention_sum[0, 0, :9].double(), want.attention_sum[0, 0, :9], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("key", "value"), list(itertools.product(DTYPES, repeat=2)))
def test_a_store_has_one_dtype_and_any_query_may_choose(key: torch.dtype, value: torch.dtype) -> None:
    keys, values, _, positions = dense([[40, 40]], key, value)
    store = ChunkStore(
        keys, values, torch.ones(1, 40, dtype=torch.bool), positions, torch.ones(1, 2, dtype=torch.bool), chunk=CHUNK
    )
    assert store.stored.dtype == torch.promote_types(key, value)
    for dtype in (*DTYPES, torch.float64):
        found = store.relevance(ask(1, dtype), 0.25)
        assert found.shape == (2, 10)
        assert bool(torch.isfinite(found).all())


@pytest.mark.parametrize("kind", [None, "int8"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_changes_nothing(backend: str, kind: str | None) -> None:
    needs_kernel(backend)
    for shape in LENGTHS.values():
        runs = Segments.from_dense(*dense(shape, torch.float32, torch.float32), kv_dtype=kind).runs
        mask = torch.rand(1, 1, 2, runs.max_length, generator=torch.Generator().manual_seed(4)) < 0.5
        for dtype in DTYPES:
            asked = ask(2, dtype)
            options = {"need_attention_sum": True, "need_lse": True, "backend": backend}
            want = attend(asked, runs, 0.25, mask, **options)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                got = attend(asked, runs, 0.25, mask, **options)
            for one, two in zip(got, want, strict=True):
                assert one is not None
                assert two is not None
                assert one.dtype == two.dtype
                assert torch.equal(one, two)


def test_autocast_does_not_round_digests() -> None:
    made = torch.randn(2, DIM, 9)
    digests = Digests(made, torch.tensor([9, 9]), "model", torch.float32)
    query = torch.randn(2, 3, DIM)
    want = digests.scores(query)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(digests.scores(query), want)
