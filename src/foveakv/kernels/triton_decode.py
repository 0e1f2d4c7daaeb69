"""Decode attention in Triton: every stored slot is read once, in place, whatever the lengths of the runs.

Two launches: one program per (run, split of the run) does an online softmax over its slots, then the splits of every
row are merged. The attention sum, if needed, is a third launch that recomputes the scores against the final
log-sum-exp, so that nothing is added atomically and the result does not change from call to call.

Nothing waits for the device: starts and lengths are read there, and the grid follows from shapes and from the power
of two above `max_length`. A call captured in a CUDA graph stays valid while lengths change in place below that power
of two; the shapes of a mask and of an attention sum are fixed by the capture.

Importing this module does not import triton; the first call does.
Without a GPU the same code runs in Triton's interpreter: set TRITON_INTERPRET=1 before the first call (for tests).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import math
import os
from typing import Any

import torch
from torch import Tensor

from foveakv.errors import MethodError
from foveakv.kernels.contract import Attended, share
from foveakv.kernels.contract import value_dim as width
from foveakv.memory.runs import Runs

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
KINDS = {"int8": 1, "int4": 2}
LARGEST_DIM = 256
FEWEST_ROWS, MOST_ROWS = 16, 64  # query rows of a program: tl.dot wants at least 16
# Shared memory, the same for every GPU: consumer cards have 99 KB for a program, half of an A100's or H100's.
ROW_BYTES = 64 * 1024  # query and output rows of a program
TILE_BYTES = 32 * 1024  # keys and values of one tile
STAGES = 2
WARPS = 4  # twice as many for more than the fewest rows: they would not fit the registers
PROGRAMS_PER_PROCESSOR = 4
PARTS = 32  # splits that the merge reads at a time


def available() -> bool:
    """Whether the backend can run here: triton is installed and there is a CUDA device, or TRITON_INTERPRET=1."""
    if importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def supports(query: Tensor, runs: Runs) -> bool:
    """Whether the backend takes tensors of these types and head dims (wherever they are)."""
    return _complaint(query, runs) is None


def attend(
    query: Tensor,
    runs: Runs,
    scaling: float,
    mask: Tensor | None = None,
    need_attention_sum: bool = False,
    need_lse: bool = False,
    other_lse: Tensor | None = None,
) -> Attended:
    """See `foveakv.kernels.attend` for shapes. float16, bfloat16, float32 and quantized runs; head dims up to 256."""
    out, attention_sum, lse = attend_with_lse(query, runs, scaling, mask, need_attention_sum, other_lse)
    return Attended(out, attention_sum, lse if need_lse else None)


def attend_with_lse(
    query: Tensor,
    runs: Runs,
    scaling: float,
    mask: Tensor | None = None,
    need_attention_sum: bool = False,
    other_lse: Tensor | None = None,
    *,
    tile: int | None = None,
    split: int | None = None,
    warps: int | None = None,
    stages: int = STAGES,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """out [B, Hq, q, Dv], attention_sum [B, H, M] or None, and the natural log-sum-exp [B, Hq, q] float32.

    other_lse [B, Hq, q]: see `foveakv.kernels.attend`. The log-sum-exp of a query that may attend to nothing is -inf.
    `tile` (slots per step, a power of two of at least 16), `split` (slots per program, a multiple of the tile), `warps`
    and `stages` are for tuning and tests.
    """
    kernels = _kernels(query, runs)
    batch, query_heads, q, dim = query.shape
    quantizer, value_dim = runs.quantizer, width(runs)
    rows, total = query_heads // runs.heads * q, batch * runs.heads
    out = query.new_empty(batch, query_heads, q, value_dim)
    lse = torch.empty(batch, query_heads, q, dtype=torch.float32, device=query.device)
    attention_sum = None
    if need_attention_sum:
        attention_sum = torch.empty(batch, runs.heads, runs.max_length, dtype=torch.float32, device=query.device)
    if runs.max_length == 0:
        return out.zero_(), attention_sum, lse.fill_(-torch.inf) if other_lse is None else lse.copy_(other_lse)

    kind = 0 if quantizer is None else KINDS[quantizer.kind]
    narrowest = 32 if kind == 2 else 16  # tl.dot wants 16, and two channels of 4 bits share a byte
    block_d, block_dv = max(narrowest, power(dim)), max(narrowest, power(value_dim))
    # Operands of different types meet in float32; the interpreter has no arithmetic in bfloat16.
    mixed = quantizer is None and len({query.dtype, runs.keys.dtype, runs.values.dtype}) > 1
    upcast = mixed or (kernels.INTERPRETED and query.dtype == torch.bfloat16)
    slot_bytes = power(block_d + block_dv) * (4 if upcast else query.element_size())  # as operands of tl.dot
    scale_zero = (runs.length, runs.length) if quantizer is None else (quantizer.key_scale, quantizer.key_zero)
    block_rows = row_block(rows, slot_bytes)
    blocks = -(-rows // block_rows)
    tile = tile or tile_size(slot_bytes)
    stored = runs.keys.shape[0] if runs.table is None else runs.table.numel() * runs.page_size
    split = split or split_size(stored * blocks, tile, _processors(query.device))
    splits = max(1, -(-power(runs.max_length) // split))
    # Programs that share a run's partial results never share an entry, and the merge reads what was written only.
    part_out = torch.empty(total, splits, rows, value_dim, dtype=torch.float32, device=query.device)
    part_top = torch.empty(total, splits, rows, dtype=torch.float32, device=query.device)
    part_sum = torch.empty_like(part_top)

    scale = scaling * math.log2(math.e)
    if mask is None:
        bits, mask_strides = runs.length, (0, 0, 0)  # any pointer will do: it is not read
    else:
        mask = mask if mask.stride(3) == 1 else mask.contiguous()
        bits = mask.view(torch.uint8)
        mask_strides = (mask.stride(0), mask.stride(1) if mask.shape[1] > 1 else 0, mask.stride(2))
    table, table_width = (runs.start, 0) if runs.table is None else (runs.table, runs.table.stride(0))
    warps = warps or (WARPS if block_rows == FEWEST_ROWS else 2 * WARPS)
    tuning = {"num_warps": warps, "num_stages": stages}
    with on(query.device):
        kernels.partial_attention[total, splits, blocks](
            query, runs.keys, runs.values, *scale_zero, runs.start, runs.length, table, bits,
            part_out, part_top, part_sum, scale, rows, q, runs.heads, split, splits, table_width,
            *query.stride(), runs.keys.stride(0), runs.values.stride(0), *mask_strides,
            D=dim, DV=value_dim, BLOCK_D=block_d, BLOCK_DV=block_dv,
            ROWS=block_rows, TILE=tile, HAS_MASK=mask is not None, UPCAST=upcast, KIND=kind,
            PAGE=runs.page_size, **tuning,
        )  # fmt: skip
        kernels.merge_parts[total, rows](
            part_out, part_top, part_sum, runs.length, out, lse, rows, split, splits,
            DV=value_dim, BLOCK_DV=block_dv, PARTS=PARTS,
        )  # fmt: skip
        if other_lse is not None:
            part, lse = share(lse, other_lse)
            out = (out * part[..., None]).to(out.dtype)
        if attention_sum is not None:
            kernels.attention_sum[total, -(-runs.max_length // tile)](
                query, runs.keys, *scale_zero, runs.start, runs.length, table, bits, lse, attention_sum, scale,
                rows, q, runs.heads, runs.max_length, table_width,
                *query.stride(), runs.keys.stride(0), *mask_strides,
                D=dim, BLOCK_D=block_d, ROWS=block_rows, TILE=tile, HAS_MASK=mask is not None, UPCAST=upcast, KIND=kind,
                PAGE=runs.page_size, **tuning,
            )  # fmt: skip
    return out, attention_sum, lse


def row_block(rows: int, slot_bytes: int) -> int:
    """Query rows per program, for rows whose query and output take as many elements as a slot's key and value."""
    return max(FEWEST_ROWS, min(MOST_ROWS, ROW_BYTES // slot_bytes, power(rows)))


def tile_size(slot_bytes: int) -> int:
    """Slots per tile, for slots that take `slot_bytes` (a power of two: dims as padded)."""
    return max(16, min(128, TILE_BYTES // slot_bytes))


def split_size(slots: int, tile: int, processors: int) -> int:
    """Slots per program, a multiple of the tile: long enough to be worth a merge, short enough to occupy the GPU.

    Programs are equally long whatever the run, so that one long run does not keep the device waiting.
    """
    wanted = -(-slots // (processors * PROGRAMS_PER_PROCESSOR))
    return max(2, -(-wanted // tile)) * tile


def power(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _complaint(query: Tensor, runs: Runs) -> str | None:
    for tensor in (query,) if runs.quantizer is not None else (query, runs.keys, runs.values):
        if tensor.dtype not in DTYPES:
            return (
                f"the triton backend computes in float16, bfloat16 and float32, got {tensor.dtype}; "
                "use backend='auto' or convert the model"
            )
    if (widest := max(query.shape[-1], width(runs))) > LARGEST_DIM:
        return f"the triton backend takes head dims up to {LARGEST_DIM}, got {widest}; use backend='blocks'"
    return None


def _kernels(query: Tensor, runs: Runs) -> Any:
    """The module of device code, once it is clear that it can run with these tensors."""
    complaint = _complaint(query, runs)
    if complaint is not None:
        raise MethodError(complaint)
    if runs.max_length * max(query.shape[2], runs.keys.stride(0), runs.values.stride(0)) >= 2**31:
        raise MethodError(f"a run of {runs.max_length} slots is too long for the triton backend; use backend='blocks'")
    if runs.keys.stride(1) != 1 or runs.values.stride(1) != 1:
        raise ValueError("keys and values must have contiguous rows; call .contiguous() on the flat buffers")
    try:
        kernels = importlib.import_module("foveakv.kernels.triton_kernels")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise MethodError(
            "backend='triton' needs the package triton (pip install triton, the version that fits your torch); "
            "or use backend='auto'"
        ) from error
    if query.device.type != "cuda" and not kernels.INTERPRETED:
        raise MethodError(
            f"the triton backend runs on CUDA, these tensors are on {query.device}; use backend='auto' (for tests, "
            "set TRITON_INTERPRET=1 before the first call)"
        )
    return kernels
