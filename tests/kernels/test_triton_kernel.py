"""The triton backend against the plain reference.

On a machine with CUDA the tests run compiled. Without one they run in Triton's interpreter, in a process of its own:
whether kernels are interpreted is settled when triton is imported. Separately, and without any GPU, the kernels are
compiled for two generations of GPUs, since the interpreter accepts code that the compiler does not.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_runs import in_pages
from test_quantized_kernels import coded

from foveakv import kernels
from foveakv.errors import MethodError
from foveakv.kernels import reference, triton_decode
from foveakv.memory.runs import Runs
from foveakv.memory.segments import Segments

if importlib.util.find_spec("triton") is None:
    pytest.skip(
        "triton is not installed (pip install --no-deps triton, the version of your torch)", allow_module_level=True
    )

# Earlier interpreters fail at loops with bounds that were loaded, on numpy 2.4 and later. Compiled, they all work.
OLD_INTERPRETER = tuple(map(int, importlib.metadata.version("triton").split(".")[:2])) < (3, 7)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
SMALL = {"tile": 16, "split": 32}  # several tiles and splits from few slots

runs_here = pytest.mark.skipif(not triton_decode.available(), reason="no CUDA; runs in the interpreter's own process")


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")
@pytest.mark.skipif(OLD_INTERPRETER, reason="needs the interpreter of triton 3.7")
def test_everything_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider", str(Path(__file__))]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "passed" in done.stdout


@pytest.mark.skipif(INTERPRETED, reason="needs the compiler")
@pytest.mark.parametrize(
    ("architecture", "kind", "dim", "rows", "page", "shared_limit"),
    [
        (80, "bf16", 128, 16, 0, 163),
        (80, "bf16", 128, 16, 64, 163),
        (90, "bf16", 128, 16, 0, 227),
        (89, "fp32", 256, 32, 0, 99),
        (90, "int8", 128, 16, 64, 227),
        (89, "int4", 128, 16, 0, 99),
    ],
)
def test_compiles_for_cuda(
    architecture: int, kind: str, dim: int, rows: int, page: int, shared_limit: int, tmp_path: Path, monkeypatch: Any
) -> None:
    """Machine code for a GPU that is not there, within the shared memory of its kind."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton import compile as build
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from foveakv.kernels import triton_kernels

    slot_bytes = 2 * dim * (4 if kind == "fp32" else 2)
    assert triton_decode.row_block(1000, slot_bytes) >= rows
    constants = {
        "D": dim, "DV": dim, "BLOCK_D": dim, "BLOCK_DV": dim, "ROWS": rows, "HAS_MASK": True, "UPCAST": False,
        "TILE": triton_decode.tile_size(slot_bytes), "PARTS": triton_decode.PARTS, "stride_qd": 1,
        "KIND": triton_decode.KINDS.get(kind, 0), "PAGE": page,
    }  # fmt: skip
    coded = kind in triton_decode.KINDS
    types = dict.fromkeys(("query", "out"), "*bf16" if coded else f"*{kind}") | {"mask": "*u8", "scale": "fp32"}
    types |= dict.fromkeys(("keys", "values"), "*u8" if coded else f"*{kind}")
    types |= dict.fromkeys(("key_scale", "key_zero"), "*fp32")
    types |= dict.fromkeys(("start", "length"), "*i64") | {"table": "*i32"}
    types |= dict.fromkeys(("part_out", "part_top", "part_sum", "lse", "attention_sum"), "*fp32")
    kernels = [triton_kernels.partial_attention]
    if architecture == 80:  # the other two are the same story everywhere
        kernels += [triton_kernels.merge_parts, triton_kernels.attention_sum]
    for kernel in kernels:
        names = kernel.arg_names
        signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
        aligned = {
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(names)
            if signature[name][0] == "*" or name in ("stride_qh", "stride_k", "stride_v")
        }
        source = ASTSource(kernel, signature, {k: v for k, v in constants.items() if k in names}, aligned)
        warps = triton_decode.WARPS * (1 if rows == triton_decode.FEWEST_ROWS else 2)
        options = {"num_warps": warps, "num_stages": triton_decode.STAGES}
        built = build(source, target=GPUTarget("cuda", architecture, 32), options=options)
        assert built.metadata.shared <= shared_limit * 1024, kernel.__name__
        if kind != "fp32" and kernel is triton_kernels.partial_attention:
            assert "mma.sync" in built.asm["ptx"]  # tensor cores
        if kind == "bf16" and kernel is triton_kernels.partial_attention:
            assert "cp.async.cg" in built.asm["ptx"]  # 16 bytes at a time, ahead of use


def make(lengths: torch.Tensor, dtype: torch.dtype, dim: int, value_dim: int) -> Runs:
    """Runs of lengths [B, H] with NaN in every slack row."""
    batch, heads = lengths.shape
    columns = max(1, int(lengths.max()))
    keys = torch.randn(batch, heads, columns, dim).to(DEVICE, dtype)
    values = torch.randn(batch, heads, columns, value_dim).to(DEVICE, dtype)
    keep = torch.arange(columns) < lengths[..., None]
    runs = Segments.from_dense(keys, values, keep.to(DEVICE), torch.arange(columns).repeat(batch, 1)).runs
    stored = torch.zeros(runs.keys.shape[0], dtype=torch.bool)
    for start, length in zip(runs.start.tolist(), runs.length.tolist(), strict=True):
        stored[start : start + length] = True
    runs.keys[~stored.to(DEVICE)] = torch.nan
    runs.values[~stored.to(DEVICE)] = torch.nan
    return runs


def log_sum_exp(query: torch.Tensor, runs: Runs, scaling: float, mask: torch.Tensor | None) -> torch.Tensor:
    """[B, Hq, q] in float64, one run after another."""
    batch, query_heads, q, _ = query.shape
    group = query_heads // runs.heads
    lse = torch.full((batch, query_heads, q), -torch.inf, dtype=torch.float64)
    for run, (start, length) in enumerate(zip(runs.start.tolist(), runs.length.tolist(), strict=True)):
        b, h = divmod(run, runs.heads)
        heads = slice(h * group, (h + 1) * group)
        scores = query[b, heads].double() @ runs.keys[start : start + length].double().T * scaling
        if mask is not None:
            scores = scores.masked_fill(~mask[b, h if mask.shape[1] > 1 else 0, :, :length], -torch.inf)
        lse[b, heads] = scores.logsumexp(-1).cpu() if length else -torch.inf
    return lse.to(query.device)


def agree(query: torch.Tensor, runs: Runs, mask: torch.Tensor | None = None, **tuning: int) -> None:
    scaling = query.shape[-1] ** -0.5
    close = {"rtol": TOLERANCE[query.dtype], "atol": TOLERANCE[query.dtype]}
    want, want_attention_sum = reference.attend(query, runs, scaling, mask, True)[:2]
    out, attention_sum, lse = triton_decode.attend_with_lse(query, runs, scaling, mask, True, **tuning)
    assert want_attention_sum is not None
    assert attention_sum is not None
    assert out.dtype == query.dtype
    assert attention_sum.dtype == lse.dtype == torch.float32
    assert not want.isnan().any()
    # assert_close fails wherever a NaN came through
    torch.testing.assert_close(out, want, **close)
    torch.testing.assert_close(attention_sum, want_attention_sum, **close)
    torch.testing.assert_close(lse.double(), log_sum_exp(query, runs, scaling, mask), **close)


border = st.sampled_from([0, 1, 15, 16, 17, 31, 32, 33, 70])


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, Runs, torch.Tensor | None]:
    batch, heads, group, q = (draw(st.integers(1, n)) for n in (2, 2, 3, 3))
    if draw(st.booleans()):
        lengths = torch.full((batch, heads), draw(border))
    else:
        lengths = torch.tensor(draw(st.lists(border, min_size=batch * heads, max_size=batch * heads)))
        lengths = lengths.view(batch, heads)
    torch.manual_seed(draw(st.integers(0, 1000)))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]))
    dim, value_dim = draw(st.sampled_from([(64, 64), (80, 80), (96, 64), (128, 128), (8, 24)]))
    runs = make(lengths, dtype, dim, value_dim)
    query = torch.randn(batch, heads * group, q, dim).to(DEVICE, dtype)
    mask = None
    share = draw(st.sampled_from([None, None, 0.02, 0.5, 1.0]))
    if share is not None:
        mask = torch.rand(batch, draw(st.sampled_from([1, heads])), q, runs.max_length).to(DEVICE) < share
    return query, runs, mask


@runs_here
@settings(max_examples=15, deadline=None, database=None)
@given(cases())
def test_equal_to_reference(case: tuple[torch.Tensor, Runs, torch.Tensor | None]) -> None:
    agree(*case, **SMALL)


@runs_here
@settings(max_examples=8, deadline=None, database=None)
@given(cases(), st.sampled_from([8, 16, 64]))
def test_pages(case: tuple[torch.Tensor, Runs, torch.Tensor | None], size: int) -> None:
    """Bit by bit what contiguous runs give, with the same tiles and splits."""
    query, runs, mask = case
    got, want = (
        triton_decode.attend_with_lse(query, each, 0.3, mask, True, **SMALL) for each in (in_pages(runs, size), runs)
    )
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@runs_here
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kind", "dim", "value_dim"), [("int8", 80, 80), ("int8", 16, 7), ("int4", 64, 40), ("int4", 8, 8)]
)
def test_quantized(kind: str, dim: int, value_dim: int, dtype: torch.dtype) -> None:
    """Codes, some slots of which have copies, and others that are attended elsewhere: as the reference has it."""
    runs, _ = coded(torch.tensor([[70, 0], [33, 5]]), kind, dim, value_dim, 8)
    runs = to_device(runs)
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    query = torch.randn(2, 6, 2, dim).to(DEVICE, dtype)
    mask = torch.rand(2, 1, 2, 70).to(DEVICE) < 0.5
    beside = query[..., 0].float() * 3
    for page, residual, other, seen in (
        (0, None, None, None),
        (0, runs.residual, beside, mask),
        (16, None, beside, None),
    ):
        here = dataclasses.replace(runs, residual=residual)
        here = in_pages(here, page) if page else here
        arguments = (query, here, dim**-0.5, seen)
        want, got = (
            kernels.attend(*arguments, need_attention_sum=True, need_lse=True, other_lse=other, backend=name)
            for name in ("reference", "triton")
        )
        for name, x, y in zip(got._fields, got, want, strict=True):
            torch.testing.assert_close(x, y, **close, msg=lambda text, name=name: f"{name}: {text}")


def to_device(runs: Runs) -> Runs:
    moved = {name: getattr(runs, name).to(DEVICE) for name in ("keys", "values", "positions", "start", "length")}
    for name in ("quantizer", "residual"):
        part = getattr(runs, name)
        tensors = {key: value.to(DEVICE) for key, value in vars(part).items() if isinstance(value, torch.Tensor)}
        moved[name] = dataclasses.replace(part, **tensors)
    return dataclasses.replace(runs, **moved)


@runs_here
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_largest_dims_and_own_sizes(dtype: torch.dtype) -> None:
    """Head dims of 256, and the tile and split that the backend chooses itself."""
    runs = make(torch.tensor([[150, 5]]), dtype, 256, 256)
    agree(torch.randn(1, 4, 1, 256).to(DEVICE, dtype), runs)


@runs_here
def test_many_queries_take_several_blocks_of_rows() -> None:
    runs = make(torch.tensor([[40]]), torch.float32, 16, 16)
    for q in (7, 33):  # 14 rows; 66 rows, in blocks of 64
        query = torch.randn(1, 2, q, 16).to(DEVICE)
        causal = torch.arange(40) <= torch.arange(40 - q, 40)[:, None]
        agree(query, runs, causal[None, None].to(DEVICE), tile=16, split=64)


@runs_here
def test_more_splits_than_the_merge_reads_at_once() -> None:
    slots = (triton_decode.PARTS + 2) * 16
    runs = make(torch.tensor([[slots, 3]]), torch.float32, 16, 16)
    agree(torch.randn(1, 2, 1, 16).to(DEVICE) * 4, runs, tile=16, split=16)


@runs_here
def test_rows_that_see_nothing_and_empty_memory_give_zero() -> None:
    runs = make(torch.tensor([[40, 0]]), torch.float32, 16, 16)
    query = torch.randn(1, 4, 2, 16).to(DEVICE)
    mask = torch.ones(1, 1, 2, 40, dtype=torch.bool, device=DEVICE)
    mask[0, 0, 1] = False
    out, attention_sum, lse = triton_decode.attend_with_lse(query, runs, 0.3, mask, True, **SMALL)
    assert attention_sum is not None
    assert out[:, :2, 0].abs().min() > 0
    assert torch.equal(out[:, :, 1], torch.zeros_like(out[:, :, 1]))
    assert torch.equal(out[:, 2:], torch.zeros_like(out[:, 2:]))
    assert bool((lse[:, :, 1] == -torch.inf).all())
    torch.testing.assert_close(attention_sum.sum(-1).cpu(), torch.tensor([[2.0, 0.0]]))
    empty = make(torch.zeros(1, 2, dtype=torch.int64), torch.float32, 16, 16)
    out, attention_sum, lse = triton_decode.attend_with_lse(query, empty, 0.3, None, True)
    assert attention_sum is not None
    assert attention_sum.shape == (1, 2, 0)
    assert torch.equal(out, torch.zeros_like(query))
    assert bool((lse == -torch.inf).all())


@runs_here
def test_a_run_full_of_nan_spoils_only_itself() -> None:
    runs = make(torch.tensor([[40, 40, 17]]), torch.float32, 16, 16)
    query = torch.randn(1, 3, 1, 16).to(DEVICE)
    want = triton_decode.attend(query, runs, 0.3).out
    start, length = int(runs.start[1]), int(runs.length[1])
    runs.keys[start : start + length] = torch.nan
    runs.values[start : start + length] = torch.nan
    got = triton_decode.attend(query, runs, 0.3).out
    assert torch.equal(got[:, [0, 2]], want[:, [0, 2]])
    assert got[:, 1].isnan().all()


@runs_here
def test_layouts_that_are_not_contiguous() -> None:
    """Queries as transformers hands them over, expanded masks, strided masks, runs with gaps and no host copies."""
    keys, values = torch.randn(60, 16, device=DEVICE), torch.randn(60, 16, device=DEVICE)
    start, length = torch.tensor([0, 33, 35, 60], device=DEVICE), torch.tensor([30, 1, 25, 0], device=DEVICE)
    runs = Runs(keys, values, torch.arange(60, dtype=torch.int32), start, length, 2, 2, 30, False)
    query = torch.randn(2, 3, 4, 16, device=DEVICE).transpose(1, 2)
    mask = torch.rand(1, 1, 3, 30, device=DEVICE) < 0.5
    agree(query, runs, mask.expand(2, 2, -1, -1), **SMALL)
    mask = (torch.rand(2, 2, 30, 3, device=DEVICE) < 0.5).transpose(2, 3)
    agree(query, runs, mask, **SMALL)


@runs_here
def test_queries_of_another_type_meet_in_float32() -> None:
    runs = make(torch.tensor([[40, 9]]), torch.float16, 16, 16)
    agree(torch.randn(1, 2, 1, 16).to(DEVICE), runs, **SMALL)


@runs_here
def test_lengths_that_grow_in_place_need_no_new_grid() -> None:
    """What a captured graph relies on: only the power of two above the longest run shapes the launch."""
    runs = make(torch.tensor([[60, 33]]), torch.float32, 16, 16)
    query = torch.randn(1, 2, 1, 16).to(DEVICE)
    runs.length.copy_(torch.tensor([64, 40]))
    for first, before, after in ((int(runs.start[0]), 60, 64), (int(runs.start[1]), 33, 40)):
        runs.keys[first + before : first + after] = torch.randn(after - before, 16).to(DEVICE)
        runs.values[first + before : first + after] = torch.randn(after - before, 16).to(DEVICE)
    assert runs.max_length == 60
    out = triton_decode.attend(query, runs, 0.3).out
    runs.max_length = 64
    want = reference.attend(query, runs, 0.3).out
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


def test_tiles_and_splits() -> None:
    assert triton_decode.tile_size(2 * 128 * 2) == 64
    assert triton_decode.tile_size(2 * 256 * 4) == 16
    assert triton_decode.tile_size(32 * 2) == 128
    assert triton_decode.row_block(7, 512) == 16
    assert triton_decode.row_block(28, 512) == 32
    assert triton_decode.row_block(448, 512) == 64
    assert triton_decode.row_block(448, 2 * 256 * 4) == 32
    for slots in (1, 100, 5000, 10**6):
        split = triton_decode.split_size(slots, 64, 132)
        assert split % 64 == 0
        assert split >= 128
        assert -(-slots // split) <= 132 * triton_decode.PROGRAMS_PER_PROCESSOR


def test_wrong_use_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = make(torch.tensor([[4, 9]]), torch.float32, 16, 16)
    query = torch.randn(1, 4, 1, 16).to(DEVICE)
    with pytest.raises(MethodError, match="float16, bfloat16 and float32"):
        triton_decode.attend(query.double(), runs, 0.3)
    wide = make(torch.tensor([[4, 9]]), torch.float32, 288, 288)
    with pytest.raises(MethodError, match="head dims up to 256"):
        triton_decode.attend(torch.randn(1, 4, 1, 288).to(DEVICE), wide, 0.3)
    if not INTERPRETED:
        with pytest.raises(MethodError, match="runs on CUDA"):
            triton_decode.attend(query.cpu(), runs, 0.3)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "foveakv.kernels.triton_kernels", raising=False)
    with pytest.raises(MethodError, match="needs the package triton"):
        triton_decode.attend(query, runs, 0.3)


@runs_here
def test_as_a_registered_backend() -> None:
    runs = make(torch.tensor([[40, 9]]), torch.float32, 16, 16)
    query = torch.randn(1, 4, 2, 16).to(DEVICE)
    mask = torch.rand(1, 1, 2, 40).to(DEVICE) < 0.5
    want = kernels.attend(query, runs, 0.3, mask, need_attention_sum=True, need_lse=True, backend="reference")
    got = kernels.attend(query, runs, 0.3, mask, need_attention_sum=True, need_lse=True, backend="triton")
    for mine, truth in zip(got, want, strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-5, atol=1e-5)
    bare = triton_decode.attend(query, runs, 0.3)
    assert bare.attention_sum is None
    assert bare.lse is None
    assert triton_decode.supports(query, runs)
    assert not triton_decode.supports(query.double(), runs)


@pytest.mark.skipif(INTERPRETED, reason="once is enough")
def test_importing_foveakv_imports_no_triton() -> None:
    code = "import sys, foveakv.kernels.triton_decode as t; t.available(); assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
