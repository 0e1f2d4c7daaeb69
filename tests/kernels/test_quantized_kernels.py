"""Quantized runs in all backends, against the reference; and slots that are read from full-precision copies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels import make

from foveakv import kernels
from foveakv.kernels import attend, problem, reference
from foveakv.kernels.contract import Attended
from foveakv.memory.quantizer import Quantizer
from foveakv.memory.residual import Residual
from foveakv.memory.runs import Runs

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
CPU = [name for name in ("blocks", "cpu") if problem(name) is None]


def owners(runs: Runs) -> torch.Tensor:
    """[N] the run of every row, -1 for slack."""
    owner = torch.full((runs.keys.shape[0],), -1)
    for run, (start, length) in enumerate(zip(runs.start.tolist(), runs.length.tolist(), strict=True)):
        owner[start : start + length] = run
    return owner


def coded(
    lengths: torch.Tensor, kind: str, dim: int, value_dim: int, window: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Runs, Runs]:
    """Quantized runs, slack poisoned; and the same dequantized, or the full-precision copy where there is one.

    `window` entries of every run's residual window, the copies of random slots; some entries are not in use.
    """
    numbers = make(lengths, torch.float32, dim, value_dim, poison=False)
    numbers.keys *= torch.linspace(0.1, 4, dim)  # channels of different ranges
    owner = owners(numbers)
    stored = owner >= 0
    total, longest = numbers.batch * numbers.heads, max(1, numbers.max_length)
    padded = torch.zeros(total, longest, dim)
    for run in range(total):
        padded[run, : int(numbers.length[run])] = numbers.keys[owner == run]
    quantizer = Quantizer.of_prompt(kind, padded.view(*lengths.shape, longest, dim), value_dim)
    rows = quantizer.quantize_key_rows(numbers.keys, owner.clamp_min(0)), quantizer.quantize_values(numbers.values)
    for part in rows:
        part[~stored] = 255  # scale and zero of the values: NaN
    runs = replace(numbers, keys=rows[0], values=rows[1], quantizer=quantizer)
    truth = replace(numbers, keys=torch.zeros_like(numbers.keys), values=torch.zeros_like(numbers.values))
    truth.keys[stored] = quantizer.dequantize_keys(rows[0][stored], owner[stored])
    truth.values[stored] = quantizer.dequantize_values(rows[1][stored])
    if window:
        keys, values = torch.randn(total, window, dim).to(dtype), torch.randn(total, window, value_dim).to(dtype)
        entry = torch.randint(0, window, stored.shape, dtype=torch.int16)  # slack is poisoned
        entry[stored] = -1
        for run, (start, length) in enumerate(zip(runs.start.tolist(), runs.length.tolist(), strict=True)):
            count = min(length, int(torch.randint(0, window + 1, ())))
            slots, entries = torch.randperm(length)[:count] + start, torch.randperm(window)[:count]
            entry[slots] = entries.to(torch.int16)
            truth.keys[slots], truth.values[slots] = keys[run, entries].float(), values[run, entries].float()
        runs = replace(runs, residual=Residual(keys, values, entry))
    return runs, truth


def close(got: Attended, want: Attended, dtype: torch.dtype, what: object) -> None:
    for name, x, y in zip(got._fields, got, want, strict=True):
        if x is None or y is None:
            assert (x is None) == (y is None), (what, name)
            continue
        assert x.shape == y.shape, (what, name)
        assert x.dtype == y.dtype, (what, name)
        assert torch.allclose(x, y, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]), (what, name, (x - y).abs().max())


border = st.sampled_from([0, 1, 2, 15, 33, 63, 64, 65, 130, 257, 700])


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, Runs, Runs, torch.Tensor | None, torch.Tensor | None]:
    batch, heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 9))
    q = draw(st.sampled_from([1, 1, 1, 2, 5, 40]))
    dim = draw(st.sampled_from([128, 64, 80, 96, 8, 34, 6]))
    value_dim = draw(st.sampled_from([dim, dim, 40, 2]))
    if draw(st.booleans()):
        lengths = torch.full((batch, heads), draw(border))
    else:
        lengths = torch.tensor(draw(st.lists(border, min_size=batch * heads, max_size=batch * heads)))
    torch.manual_seed(draw(st.integers(0, 1000)))
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    window, kind = draw(st.sampled_from([0, 0, 1, 32])), draw(st.sampled_from(["int8", "int4"]))
    runs, truth = coded(lengths.view(batch, heads), kind, dim, value_dim, window, dtype)
    query = torch.randn(batch, heads * group, q, dim).to(dtype)
    mask = other = None
    share = draw(st.sampled_from([None, None, 0.02, 0.5, 1.0]))
    if share is not None:
        mask = torch.rand(batch, draw(st.sampled_from([1, heads])), q, runs.max_length) < share
        mask[:, :, draw(st.integers(0, q - 1))] = draw(st.booleans())  # often a row that sees nothing
    if draw(st.booleans()):
        other = torch.randn(query.shape[:3]) * 4
        other[:, ::2] = draw(st.sampled_from([-torch.inf, 3.0]))
    return query, runs, truth, mask, other


@settings(max_examples=120, deadline=None)
@given(cases(), st.sampled_from([1, 3]))
def test_all_backends_agree(
    case: tuple[torch.Tensor, Runs, Runs, torch.Tensor | None, torch.Tensor | None], threads: int
) -> None:
    query, runs, truth, mask, other = case
    scaling = query.shape[-1] ** -0.5
    want = reference.attend(query, truth, scaling, mask, True, True, other)
    arguments = (query, runs, scaling, mask)
    torch.set_num_threads(threads)
    try:
        for name in ("reference", *CPU, "auto"):
            if query.dtype == torch.float64 and name == "cpu":
                continue
            got = attend(*arguments, need_attention_sum=True, need_lse=True, other_lse=other, backend=name)
            close(got, want, query.dtype, name)
            close(attend(*arguments, other_lse=other, backend=name), Attended(want.out), query.dtype, name)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_one_number_that_is_none_spoils_its_run_alone(backend: str, kind: str) -> None:
    """A token whose values were not finite becomes NaN; other runs never see it."""
    runs, _ = coded(torch.tensor([[90, 90, 20]]), kind, 32, 32)
    query = torch.randn(1, 6, 1, 32)
    want = reference.attend(query, runs, 0.2).out
    assert runs.quantizer is not None
    runs.values[int(runs.start[1]) + 7] = runs.quantizer.quantize_values(torch.full((32,), torch.nan))
    got = attend(query, runs, 0.2, backend=backend).out
    assert torch.allclose(got[:, [0, 1, 4, 5]], want[:, [0, 1, 4, 5]], atol=1e-5)
    assert got[:, 2:4].isnan().all()


def test_auto_reads_quantized_slots_in_place() -> None:
    runs, _ = coded(torch.tensor([[90, 20]]), "int8", 32, 32, 8)
    query = torch.randn(1, 6, 1, 32)
    assert kernels.choose(query, runs) == CPU[-1]
    assert kernels.choose(query.double(), runs) == "blocks"
