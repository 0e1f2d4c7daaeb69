"""Column sums in Triton against the float64 reference of tensor operations.

As for the other Triton kernels: compiled where there is CUDA, else in Triton's interpreter, in a process of its own,
and compiled for GPUs that are not there.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from foveakv import kernels
from foveakv.core.attention_stats import column_sums, topk_attention, window_scores
from foveakv.core.fused_columns import Fused, WholeColumns
from foveakv.kernels import cpu_columns, triton_columns, triton_decode

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

OLD_INTERPRETER = tuple(map(int, importlib.metadata.version("triton").split(".")[:2])) < (3, 7)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
CLOSE = {"rtol": 1e-5, "atol": 1e-5}

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
    ("architecture", "kind", "dim", "shared_limit"), [(80, "bf16", 128, 163), (89, "fp32", 256, 99)]
)
def test_compiles_for_cuda(
    architecture: int, kind: str, dim: int, shared_limit: int, tmp_path: Path, monkeypatch: Any
) -> None:
    """Machine code for a GPU that is not there, within the shared memory of its kind."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton import compile as build
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from foveakv.kernels import triton_column_kernels as device

    pair_bytes = 2 * dim * (4 if kind == "fp32" else 2)
    constants = {
        "D": dim, "BLOCK_D": dim, "GROUP": 7, "ROWS": triton_decode.row_block(1000, pair_bytes),
        "TILE": triton_decode.tile_size(pair_bytes), "HAS_MASK": True, "UPCAST": False, "stride_qd": 1, "stride_kd": 1,
    }  # fmt: skip
    types = {"query": f"*{kind}", "keys": f"*{kind}", "rows": "*i64", "stop": "*i64", "mask": "*u8", "scale": "fp32"}
    types |= {"lse": "*fp32", "sums": "*fp32"}
    for kernel in (device.row_lse, device.add_columns):
        names = kernel.arg_names
        signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name][0] == "*"}
        source = ASTSource(kernel, signature, {k: v for k, v in constants.items() if k in names}, aligned)
        options = {"num_warps": triton_decode.WARPS, "num_stages": triton_decode.STAGES}
        built = build(source, target=GPUTarget("cuda", architecture, 32), options=options)
        assert built.metadata.shared <= shared_limit * 1024, kernel.__name__
        if kind == "bf16":
            assert "mma.sync" in built.asm["ptx"]  # tensor cores


def inputs(batch: int, heads: int, group: int, columns: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    query, keys = 3 * torch.randn(batch, heads * group, columns, dim), torch.randn(batch, heads, columns, dim)
    return query.to(DEVICE, dtype), keys.to(DEVICE, dtype)


def agree(query: Tensor, keys: Tensor, rows: Tensor, valid: Tensor | None, visible: Any = None, **options: int) -> None:
    wanted = column_sums(query.double(), keys.double(), rows, valid, 0.3, visible)
    made = column_sums(query, keys, rows, valid, 0.3, visible, fused=triton_columns, **options)
    assert made.dtype == torch.float32
    torch.testing.assert_close(made.double(), wanted, **CLOSE)


@runs_here
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("batch", "heads", "group", "columns", "dim"), [(1, 2, 3, 150, 20), (2, 1, 1, 128, 16), (1, 1, 7, 33, 80)]
)
def test_all_rows(batch: int, heads: int, group: int, columns: int, dim: int, dtype: torch.dtype) -> None:
    rows = torch.arange(columns, device=DEVICE).expand(batch, columns)
    agree(*inputs(batch, heads, group, columns, dim, dtype), rows, None)


@runs_here
def test_some_rows_in_any_order() -> None:
    """Rows of an offset, scattered rows, rows that do not count, none at all; queries as transformers stores them."""
    query, keys = inputs(2, 2, 3, 90, 16, torch.float32)
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    agree(query, keys, torch.arange(70, 90, device=DEVICE).expand(2, -1), None)
    rows = torch.stack([torch.randperm(90)[:41] for _ in range(2)]).to(DEVICE)
    valid = (torch.rand(2, 41) < 0.7).to(DEVICE)
    query[1, :, rows[1][~valid[1]]] = torch.nan
    wanted = column_sums(query.nan_to_num(0).double(), keys.double(), rows, valid, 0.3)
    made = column_sums(query, keys, rows, valid, 0.3, fused=triton_columns)
    torch.testing.assert_close(made.double(), wanted, **CLOSE)
    assert not column_sums(query, keys, rows, torch.zeros_like(valid), 0.3, fused=triton_columns).any()
    assert not column_sums(query, keys, rows[:, :0], valid[:, :0], 0.3, fused=triton_columns).any()


@runs_here
@pytest.mark.parametrize("tile_bytes", [None, 1000])
def test_masks(tile_bytes: int | None) -> None:
    """Padding on the left, columns after the row that it may see, and rows that see nothing; in blocks of rows."""
    columns, padding = 75, torch.tensor([0, 21], device=DEVICE)

    def visible(rows: Tensor) -> Tensor:
        column = torch.arange(columns, device=DEVICE)
        return ((column <= rows[..., None] + 3) & (column >= padding[:, None, None]))[:, None]

    query, keys = inputs(2, 2, 2, columns, 24, torch.float32)
    rows = torch.arange(columns, device=DEVICE).expand(2, -1)
    options = {} if tile_bytes is None else {"tile_bytes": tile_bytes}
    agree(query, keys, rows, rows % 5 > 0, visible, **options)
    for window in (9, 70):
        real = torch.arange(columns, device=DEVICE) >= padding[:, None]
        wanted = window_scores(query.double(), keys.double(), window, 0.3, visible, real)
        made = window_scores(query, keys, window, 0.3, visible, real, fused=triton_columns)
        torch.testing.assert_close(made.double(), wanted, **CLOSE)


@runs_here
def test_nan_reaches_the_columns_of_its_row() -> None:
    query, keys = inputs(1, 1, 1, 40, 16, torch.float32)
    query[0, 0, 20] = torch.nan
    made = column_sums(query, keys, torch.arange(40, device=DEVICE)[None], None, 0.3, fused=triton_columns)
    assert made[0, 0, :21].isnan().all()
    assert made[0, 0, 21:].isfinite().all()


@runs_here
def test_types_that_differ_meet_in_float32_and_others_use_tensor_operations() -> None:
    query, keys = inputs(1, 2, 2, 50, 16, torch.float32)
    rows = torch.arange(50, device=DEVICE)[None]
    agree(query, keys.half(), rows, None)
    wide = query.double(), keys.double()
    assert torch.equal(column_sums(*wide, rows, None, 0.3, fused=triton_columns), column_sums(*wide, rows, None, 0.3))
    assert torch.equal(
        topk_attention(query, keys, rows, None, 0.3, None, 5, fused=triton_columns),
        topk_attention(query, keys, rows, None, 0.3, None, 5),
    )
    with pytest.raises(ValueError, match="no fused column sums"):
        column_sums(query.double(), keys, rows, None, 0.3, fused=triton_columns)


def test_which_devices_get_which_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(triton_columns, WholeColumns)
    assert not isinstance(triton_columns, Fused)
    assert isinstance(cpu_columns, Fused)
    assert not isinstance(cpu_columns, WholeColumns)
    assert kernels.fused_columns(torch.zeros(1, 1, 2, 8, dtype=torch.float64)) is None
    monkeypatch.setattr(triton_decode, "available", lambda: True)
    for dtype, dim, found in ((torch.bfloat16, 128, triton_columns), (torch.float64, 8, None), (torch.half, 512, None)):
        keys: Any = SimpleNamespace(is_cuda=True, dtype=dtype, shape=(1, 1, 2, dim))
        assert kernels.fused_columns(keys) is found
