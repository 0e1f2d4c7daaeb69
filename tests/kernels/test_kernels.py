"""Every backend, and every path inside one, against the plain reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foveakv.errors import MethodError
from foveakv.kernels import BACKENDS, attend, blocks, choose, decode_attention, problem, reference, triton_decode
from foveakv.memory.quantizer import Quantizer
from foveakv.memory.runs import Runs
from foveakv.memory.segments import Segments

D, DV, UNIT = 8, 8, 16  # UNIT: strip and tile size in these tests
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}

PATHS: dict[str, Callable] = {
    "auto": attend,
    "whole": blocks.attend_whole,
    "one strip": lambda *a, **k: blocks.attend_strips(*a, **k, threads=1),
    "strips": lambda *a, **k: blocks.attend_strips(*a, **k, threads=3, shortest=UNIT),
    "tiles": lambda *a, **k: blocks.attend_tiles(*a, **k, tile=UNIT),
    "large tiles": lambda *a, **k: blocks.attend_tiles(*a, **k, tile=4 * UNIT),
}


def make(
    lengths: torch.Tensor, dtype: torch.dtype = torch.float64, dim: int = D, value_dim: int = DV, poison: bool = True
) -> Runs:
    """Runs of lengths [B, H] with NaN in every slack row."""
    batch, heads = lengths.shape
    columns = max(1, int(lengths.max()))
    keys = torch.randn(batch, heads, columns, dim, dtype=torch.float64).to(dtype)
    values = torch.randn(batch, heads, columns, value_dim, dtype=torch.float64).to(dtype)
    keep = torch.arange(columns) < lengths[..., None]
    runs = Segments.from_dense(keys, values, keep, torch.arange(columns).repeat(batch, 1)).runs
    if poison:
        stored = torch.zeros(runs.keys.shape[0], dtype=torch.bool)
        for start, length in zip(runs.start.tolist(), runs.length.tolist(), strict=True):
            stored[start : start + length] = True
        runs.keys[~stored] = torch.nan
        runs.values[~stored] = torch.nan
    return runs


def agree(
    query: torch.Tensor, runs: Runs, mask: torch.Tensor | None, paths: dict[str, Callable] = PATHS,
    other: torch.Tensor | None = None,
) -> None:  # fmt: skip
    scaling = query.shape[-1] ** -0.5
    tolerance = TOLERANCE[query.dtype]
    want, want_attention_sum, want_lse = reference.attend(query, runs, scaling, mask, True, True, other)
    assert want_attention_sum is not None
    assert want_lse is not None
    assert not want.isnan().any()
    for name, path in paths.items():
        for need_attention_sum, need_lse in ((False, False), (False, True), (True, True)):
            got, attention_sum, lse = path(
                query, runs, scaling, mask, need_attention_sum=need_attention_sum, need_lse=need_lse, other_lse=other
            )
            assert got.shape == want.shape
            assert got.dtype == query.dtype
            # allclose is False wherever a NaN came through
            assert torch.allclose(got, want, rtol=tolerance, atol=tolerance), (name, need_attention_sum)
            if need_attention_sum:
                assert attention_sum is not None
                assert attention_sum.dtype == want_attention_sum.dtype
                assert torch.allclose(attention_sum, want_attention_sum, rtol=tolerance, atol=tolerance), name
            else:
                assert attention_sum is None
            if need_lse:
                assert lse is not None
                assert lse.dtype == want_lse.dtype
                assert torch.allclose(lse, want_lse, rtol=tolerance, atol=tolerance), name
            else:
                assert lse is None


border = st.sampled_from([0, 1, 2, UNIT - 1, UNIT, UNIT + 1, 4 * UNIT - 1, 4 * UNIT, 4 * UNIT + 1, 7 * UNIT + 3])


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, Runs, torch.Tensor | None]:
    batch, heads, group, q = (draw(st.integers(1, n)) for n in (3, 3, 8, 8))
    if draw(st.booleans()):
        lengths = torch.full((batch, heads), draw(border))
    else:
        lengths = torch.tensor(draw(st.lists(border, min_size=batch * heads, max_size=batch * heads)))
        lengths = lengths.view(batch, heads)
    torch.manual_seed(draw(st.integers(0, 1000)))
    dtype = draw(st.sampled_from([torch.float64, torch.float64, torch.float32]))
    runs = make(lengths, dtype)
    query = torch.randn(batch, heads * group, q, D, dtype=torch.float64).to(dtype)
    mask = None
    share = draw(st.sampled_from([None, 0.02, 0.5, 1.0]))
    if share is not None:
        mask = torch.rand(batch, draw(st.sampled_from([1, heads])), q, runs.max_length) < share
    return query, runs, mask


@settings(max_examples=80, deadline=None)
@given(cases(), st.booleans())
def test_all_paths_agree(case: tuple[torch.Tensor, Runs, torch.Tensor | None], beside: bool) -> None:
    query = case[0]
    other = None
    if beside:
        other = torch.randn(query.shape[:3], dtype=query.dtype) * 3
        other[:, ::2] = -torch.inf
    agree(*case, other=other)


def test_halves_that_know_of_each_other_add_up() -> None:
    """Given the other half's log-sum-exp, outputs add up to the whole, and so does the attention sum."""
    runs = make(torch.tensor([[40, 90]]))
    query = torch.randn(1, 6, 2, D, dtype=torch.float64)
    mask = torch.rand(1, 2, 2, 90) < 0.5
    want = attend(query, runs, 0.3, need_attention_sum=True, need_lse=True)
    for name, path in PATHS.items():
        sums = [path(query, runs, 0.3, part, need_lse=True).lse for part in (mask, ~mask)]
        one = path(query, runs, 0.3, mask, need_attention_sum=True, need_lse=True, other_lse=sums[1])
        two = path(query, runs, 0.3, ~mask, need_attention_sum=True, need_lse=True, other_lse=sums[0])
        assert torch.allclose(one.out + two.out, want.out), name
        assert torch.allclose(one.attention_sum + two.attention_sum, want.attention_sum), name
        assert torch.allclose(one.lse, want.lse), name
        assert torch.allclose(two.lse, want.lse), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precisions(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    TOLERANCE[torch.float16] = 1e-2
    for lengths in (torch.tensor([[300, 20, 0], [77, 130, 299]]), torch.full((2, 3), 200)):
        runs = make(lengths, dtype)
        for q in (1, 3):
            query = torch.randn(2, 12, q, D).to(dtype)
            agree(query, runs, None)
            agree(query, runs, torch.rand(2, 1, q, runs.max_length) < 0.5)


@pytest.mark.parametrize("border", [1023, 1024, 1025])
def test_real_sizes(border: int) -> None:
    """The sizes at which the default paths change, at their own defaults."""
    torch.manual_seed(border)
    for lengths in ([[border, 3 * border]], [[64, 65]], [[64, 5]], [[border, border]]):
        runs = make(torch.tensor(lengths), torch.float32)
        paths = {
            "auto": attend,
            "strips": lambda *a, **k: blocks.attend_strips(*a, **k, threads=2),
            "tiles": blocks.attend_tiles,
        }
        agree(torch.randn(1, 14, 1, D), runs, None, paths)


def test_values_may_be_narrower_than_keys() -> None:
    runs = make(torch.tensor([[50, 3], [0, 120]]), dim=8, value_dim=5)
    agree(torch.randn(2, 6, 2, 8, dtype=torch.float64), runs, torch.rand(2, 2, 2, 120) < 0.5)
    runs = make(torch.full((2, 2), 40), dim=8, value_dim=5)
    agree(torch.randn(2, 6, 1, 8, dtype=torch.float64), runs, None)


def test_a_run_full_of_nan_spoils_only_itself() -> None:
    runs = make(torch.tensor([[100, 100, 70]]))
    start, length = int(runs.start[1]), int(runs.length[1])
    query = torch.randn(1, 6, 1, D, dtype=torch.float64)
    want = reference.attend(query, runs, 0.3).out
    runs.keys[start : start + length] = torch.nan
    runs.values[start : start + length] = torch.nan
    for name, path in PATHS.items():
        got = path(query, runs, 0.3).out
        assert torch.allclose(got[:, [0, 1, 4, 5]], want[:, [0, 1, 4, 5]]), name
        assert got[:, 2:4].isnan().all(), name


def test_runs_without_slack_or_host_copies() -> None:
    """Runs that somebody else laid out: no room, gaps, an empty run at the very end."""
    keys = torch.randn(60, D, dtype=torch.float64)
    start, length = torch.tensor([0, 33, 35, 60]), torch.tensor([30, 1, 25, 0])
    runs = Runs(keys, torch.randn_like(keys), torch.arange(60, dtype=torch.int32), start, length, 2, 2, 30, False)
    agree(torch.randn(2, 4, 1, D, dtype=torch.float64), runs, None)


def test_fully_masked_rows_and_empty_memory_give_zero() -> None:
    runs = make(torch.tensor([[40, 9]]))
    query = torch.randn(1, 4, 2, D, dtype=torch.float64)
    mask = torch.ones(1, 1, 2, 40, dtype=torch.bool)
    mask[0, 0, 1] = False
    for name, path in PATHS.items():
        out, attention_sum, lse = path(query, runs, 0.3, mask, need_attention_sum=True, need_lse=True)
        assert torch.equal(out[:, :, 1], torch.zeros_like(out[:, :, 1])), name
        assert out[:, :, 0].abs().min() > 0, name
        assert torch.equal(lse.isinf(), torch.tensor([False, True]).expand(1, 4, 2)), name
        assert torch.allclose(attention_sum.sum(-1), torch.full((1, 2), 2.0, dtype=torch.float64)), name
    empty = make(torch.zeros(1, 2, dtype=torch.int64))
    for path in PATHS.values():
        out, attention_sum, lse = path(query, empty, 0.3, None, need_attention_sum=True, need_lse=True)
        assert torch.equal(out, torch.zeros(1, 4, 2, DV, dtype=torch.float64))
        assert attention_sum.shape == (1, 2, 0)
        assert torch.equal(lse, torch.full((1, 4, 2), -torch.inf, dtype=torch.float64))


def test_attention_sum_is_what_the_group_spends() -> None:
    runs = make(torch.tensor([[40, 9], [12, 0]]))
    query = torch.randn(2, 6, 3, D, dtype=torch.float64)
    _, attention_sum = decode_attention(query, runs, 0.3, need_attention_sum=True)
    assert attention_sum is not None
    assert torch.allclose(attention_sum.sum(-1), torch.tensor([[9.0, 9.0], [9.0, 0.0]], dtype=torch.float64))
    assert bool((attention_sum[0, 1, 9:] == 0).all())


def test_transposed_queries_and_broadcast_masks() -> None:
    runs = make(torch.tensor([[40, 9], [12, 33]]), torch.float32)
    query = torch.randn(2, 3, 6, D).transpose(1, 2)
    mask = torch.rand(1, 1, 3, 40) < 0.5
    want, _ = decode_attention(query.contiguous(), runs, 0.3, mask.expand(2, 2, -1, -1), backend="reference")
    for name in BACKENDS:
        if name != "triton" and problem(name) is None:
            got, _ = decode_attention(query, runs, 0.3, mask, backend=name)
            assert torch.allclose(got, want, atol=1e-6), name


@pytest.mark.parametrize(
    ("dtype", "dim", "coded", "name"),
    [
        (torch.float32, 16, False, "triton"),
        (torch.float32, 16, True, "triton"),
        (torch.float32, 288, False, "blocks"),
        (torch.float32, 288, True, "blocks"),
        (torch.float64, 16, False, "blocks"),
    ],
)
def test_auto_on_cuda(dtype: torch.dtype, dim: int, coded: bool, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the triton backend does not take goes elsewhere; here with a query that only says it is on a GPU."""
    monkeypatch.setattr(triton_decode, "available", lambda: True)
    query: Any = SimpleNamespace(is_cuda=True, is_cpu=False, dtype=dtype, shape=torch.Size((1, 4, 1, dim)))
    runs = make(torch.tensor([[9, 5]]), dtype, dim, dim, poison=False)
    if coded:
        quantizer = Quantizer.of_prompt("int8", torch.randn(1, 2, 9, dim), dim)
        runs = replace(runs, keys=runs.keys.byte(), values=quantizer.quantize_values(runs.values), quantizer=quantizer)
    assert choose(query, runs) == name


def test_no_graph_is_built() -> None:
    runs = make(torch.tensor([[40, 90]]))
    query = torch.randn(1, 4, 1, D, dtype=torch.float64, requires_grad=True)
    assert not decode_attention(query, runs, 0.3)[0].requires_grad


def test_wrong_use_is_explained() -> None:
    runs = make(torch.tensor([[4, 9]]))
    query = torch.randn(1, 4, 1, D, dtype=torch.float64)
    with pytest.raises(MethodError, match="'blocks', 'cpu', 'reference', 'triton'"):
        decode_attention(query, runs, 0.3, backend="fast")
    with pytest.raises(ValueError, match="mask must be"):
        decode_attention(query, runs, 0.3, torch.ones(1, 1, 1, 8, dtype=torch.bool))
    with pytest.raises(ValueError, match="other_lse must be"):
        attend(query, runs, 0.3, other_lse=torch.zeros(1, 4))
    with pytest.raises(ValueError, match="does not fit"):
        decode_attention(query[:, :3], runs, 0.3)
