"""The CPU kernel: against the reference in all shapes, chunks read in place, threads, forks."""

from __future__ import annotations

import dataclasses
import os
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels import make

from foveakv import kernels
from foveakv.errors import MethodError
from foveakv.kernels import attend, blocks, build, cpu, decode_attention, reference
from foveakv.kernels.contract import Attended
from foveakv.memory.runs import Runs

needs_kernel = pytest.mark.skipif(cpu.problem() is not None, reason=f"no CPU kernel here: {cpu.problem()}")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


def close(got: Attended, want: Attended, dtype: torch.dtype, what: object = None) -> None:
    """allclose is False wherever a NaN came through."""
    tolerance = TOLERANCE[dtype]
    for name, x, y in zip(got._fields, got, want, strict=True):
        assert (x is None) == (y is None), (what, name)
        if x is None or y is None:
            continue
        assert x.shape == y.shape, (what, name)
        assert x.dtype == y.dtype, (what, name)
        assert torch.allclose(x, y, rtol=tolerance, atol=tolerance), (what, name, (x - y).abs().max())


border = st.sampled_from([0, 1, 2, 7, 63, 64, 65, 255, 256, 257, 600, 1023, 1024, 1025, 2049])


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, Runs, torch.Tensor | None]:
    batch, heads = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    group = draw(st.integers(1, 16))
    q = draw(st.sampled_from([1, 1, 1, 2, 3, 5, 8, 13, 64]))
    dim = draw(st.sampled_from([64, 80, 96, 128, 256, 8, 72, 5]))
    value_dim = draw(st.sampled_from([dim, dim, 40, 128, 3]))
    if draw(st.booleans()):
        lengths = torch.full((batch, heads), draw(border))
    else:
        lengths = torch.tensor(draw(st.lists(border, min_size=batch * heads, max_size=batch * heads)))
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    torch.manual_seed(draw(st.integers(0, 1000)))
    runs = make(lengths.view(batch, heads), dtype, dim, value_dim)
    query = torch.randn(batch, heads * group, q, dim).to(dtype)
    mask = None
    share = draw(st.sampled_from([None, None, 0.02, 0.5, 1.0]))
    if share is not None:
        mask = torch.rand(batch, draw(st.sampled_from([1, heads])), q, runs.max_length) < share
        mask[:, :, draw(st.integers(0, q - 1))] = draw(st.booleans())  # often a row that sees nothing
    return query, runs, mask


@needs_kernel
@settings(max_examples=80, deadline=None)
@given(cases(), st.sampled_from([1, 2, 5]))
def test_agrees_with_the_reference(case: tuple[torch.Tensor, Runs, torch.Tensor | None], threads: int) -> None:
    query, runs, mask = case
    scaling = query.shape[-1] ** -0.5
    want = reference.attend(query, runs, scaling, mask, True, True)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        close(cpu.attend(query, runs, scaling, mask, True, True), want, query.dtype, "cpu")
        close(cpu.attend(query, runs, scaling, mask), Attended(want.out), query.dtype, "cpu, output alone")
    finally:
        torch.set_num_threads(before)
    close(blocks.attend(query, runs, scaling, mask, True, True), want, query.dtype, "blocks")
    lse = blocks.attend(query, runs, scaling, mask, False, True)
    close(lse, want._replace(attention_sum=None), query.dtype, "blocks, log-sum-exp alone")


@needs_kernel
def test_large_scores_and_many_queries() -> None:
    """Scores of several hundred: float32 rounds them by more than the tolerance, and no more here than elsewhere."""
    runs = make(torch.tensor([[700, 3]]), torch.float32, 64, 64)
    query = torch.randn(1, 6, 100, 64) * 30
    exact = dataclasses.replace(runs, keys=runs.keys.double(), values=runs.values.double())
    want = reference.attend(query.double(), exact, 1.0, None, True, True)
    plain = reference.attend(query, runs, 1.0, None, True, True)
    for name, x, y, z in zip(want._fields, cpu.attend(query, runs, 1.0, None, True, True), plain, want, strict=True):
        assert (x - z).abs().max() <= 2 * (y - z).abs().max() + 1e-5, name


@needs_kernel
def test_layouts_that_nobody_promised() -> None:
    """Rows with gaps between them, queries and masks that are views, start and length without host copies."""
    wide = torch.randn(90, 3, 64)
    start, length = torch.tensor([0, 40, 41, 90]), torch.tensor([40, 1, 30, 0])
    runs = Runs(wide[:, 1], wide[:, 2, :32], torch.zeros(90, dtype=torch.int32), start, length, 2, 2, 40, False)
    query = torch.randn(2, 3, 6, 64).transpose(1, 2)
    mask = (torch.rand(1, 1, 40, 3) < 0.5).transpose(2, 3)
    want = attend(query, runs, 0.1, mask, need_attention_sum=True, need_lse=True, backend="reference")
    close(attend(query, runs, 0.1, mask, need_attention_sum=True, need_lse=True, backend="cpu"), want, torch.float32)


@needs_kernel
def test_a_run_full_of_nan_spoils_only_itself() -> None:
    runs = make(torch.tensor([[900, 900, 70]]), torch.float32, 64, 64)
    start, length = int(runs.start[1]), int(runs.length[1])
    query = torch.randn(1, 6, 1, 64)
    want = reference.attend(query, runs, 0.3).out
    runs.keys[start : start + length] = torch.nan
    runs.values[start : start + length] = torch.nan
    got = cpu.attend(query, runs, 0.3).out
    assert torch.allclose(got[:, [0, 1, 4, 5]], want[:, [0, 1, 4, 5]], atol=1e-5)
    assert got[:, 2:4].isnan().all()


@needs_kernel
def test_what_it_cannot_read_is_an_error_and_auto_goes_elsewhere() -> None:
    runs = make(torch.tensor([[40, 9]]))
    query = torch.randn(1, 4, 1, 8, dtype=torch.float64)
    with pytest.raises(MethodError, match="float64"):
        attend(query, runs, 0.3, backend="cpu")
    assert kernels.choose(query, runs) == "blocks"
    broken = make(torch.tensor([[40, 9]]), torch.float32)
    broken.start_host = torch.tensor([0, 1 << 40])
    with pytest.raises(ValueError, match="beyond its buffer"):
        attend(query.float(), broken, 0.3, backend="cpu")


@needs_kernel
def test_arguments_are_laid_out_alike() -> None:
    assert build.KERNEL.library().foveakv_arguments_size() == cpu.ARGUMENTS.size


# ---- chunks of a store, read in place


def with_chunks(
    query: torch.Tensor, runs: Runs, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor,
    mask: torch.Tensor | None, scaling: float,
) -> Attended:  # fmt: skip
    """Plain: the chosen chunks' tokens and the run's own slots side by side, in float32."""
    batch, query_heads, q, dim = query.shape
    group, value_dim = query_heads // runs.heads, runs.values.shape[1]
    out = torch.zeros(batch, query_heads, q, value_dim)
    lse = torch.full((batch, query_heads, q), -torch.inf)
    attention_sum = torch.zeros(batch, runs.heads, runs.max_length)
    for run, (start, length) in enumerate(zip(runs.start.tolist(), runs.length.tolist(), strict=True)):
        b, h = divmod(run, runs.heads)
        chosen = table[run][table[run] >= 0]
        k = torch.cat([keys[chosen].reshape(-1, dim), runs.keys[start : start + length]]).float()
        v = torch.cat([values[chosen].reshape(-1, value_dim), runs.values[start : start + length]]).float()
        own = len(k) - length
        if not len(k):
            continue
        heads = slice(h * group, (h + 1) * group)
        scores = query[b, heads].float() @ k.T * scaling
        if mask is not None:
            hidden = ~mask[b, h if mask.shape[1] > 1 else 0, :, :length]
            scores[..., own:] = scores[..., own:].masked_fill(hidden, -torch.inf)
        p = scores.softmax(-1).nan_to_num()
        out[b, heads], lse[b, heads] = p @ v, scores.logsumexp(-1)
        attention_sum[b, h, :length] = p[..., own:].sum((0, 1))
    return Attended(out.to(query.dtype), attention_sum, lse)


@needs_kernel
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("tokens", "dim", "value_dim", "q"), [(8, 128, 128, 1), (8, 80, 40, 3), (5, 72, 72, 20)])
def test_chunks_are_read_in_place(dtype: torch.dtype, tokens: int, dim: int, value_dim: int, q: int) -> None:
    runs = make(torch.tensor([[300, 0], [65, 1]]), dtype, dim, value_dim)
    keys = torch.randn(200, tokens * dim).to(dtype)
    values = torch.randn(200, tokens * value_dim).to(dtype)
    keys[-1], values[-1] = torch.nan, torch.nan  # a chunk that nobody chose
    table = torch.stack([torch.randperm(199)[:90] for _ in range(4)])
    table[1] = -1  # nothing at all for this run
    table[2, ::3] = -1  # holes
    table[3, 20:] = -1
    query = torch.randn(2, 14, q, dim).to(dtype)
    for mask in (None, torch.rand(2, 1, q, 300) < 0.5):
        for threads in (1, 3):
            torch.set_num_threads(threads)
            try:
                got = cpu.attend_with_chunks(
                    query, runs, dim**-0.5, keys, values, table, mask, need_attention_sum=True, need_lse=True
                )
            finally:
                torch.set_num_threads(1)
            close(got, with_chunks(query, runs, keys, values, table, mask, dim**-0.5), dtype)
    without = cpu.attend_with_chunks(query, runs, 0.1, keys, values, table[:, :0], need_lse=True)
    close(without, cpu.attend(query, runs, 0.1, None, False, True), dtype)


@needs_kernel
def test_wrong_chunks_are_explained() -> None:
    runs = make(torch.tensor([[30, 4]]), torch.float32)
    query, chunks = torch.randn(1, 4, 1, 8), torch.randn(10, 64)
    table = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="does not hold"):
        cpu.attend_with_chunks(query, runs, 0.3, chunks, chunks, table + 10)
    with pytest.raises(ValueError, match="table must be"):
        cpu.attend_with_chunks(query, runs, 0.3, chunks, chunks, table[:1])
    with pytest.raises(ValueError, match="chunk_keys must be"):
        cpu.attend_with_chunks(query, runs, 0.3, chunks[:, :61], chunks, table)
    with pytest.raises(ValueError, match="do not match"):
        cpu.attend_with_chunks(query, runs, 0.3, chunks, chunks[:9], table)
    with pytest.raises(ValueError, match="stored as the runs are"):
        cpu.attend_with_chunks(query, runs, 0.3, chunks.half(), chunks.half(), table)


# ---- threads and processes


@needs_kernel
def test_two_threads_at_once() -> None:
    cases = []
    for seed in range(2):
        torch.manual_seed(seed)
        runs = make(torch.tensor([[1500, 20, 700]]), torch.float32, 64, 64)
        query = torch.randn(1, 21, 1, 64)
        cases.append((query, runs, cpu.attend(query, runs, 0.1).out))
    wrong: list[object] = []

    def work(case: int) -> None:
        query, runs, want = cases[case]
        for _ in range(50):
            got = decode_attention(query, runs, 0.1)[0]
            if not torch.equal(got, want):
                wrong.append(got)

    threads = [threading.Thread(target=work, args=(case,)) for case in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@needs_kernel
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_a_fork_even_while_the_lock_is_held() -> None:
    runs = make(torch.tensor([[100, 20]]), torch.float32, 64, 64)
    query = torch.randn(1, 4, 1, 64)
    want = cpu.attend(query, runs, 0.1).out
    once = build.Once()
    with once._lock:  # as if another thread were building
        child = os.fork()
        if child == 0:
            try:
                torch.set_num_threads(1)
                fine = torch.equal(cpu.attend(query, runs, 0.1).out, want) and once.problem() is None
                os._exit(0 if fine else 1)
            except BaseException:
                os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
