"""Column sums of a prompt's attention in Triton, without a matrix of rows x columns; not yet run on a GPU.

This module is a `foveakv.core.fused_columns.WholeColumns`. Two launches: the log-sum-exp of every row, then one program
for each block of columns sums e^(score - log-sum-exp) over all rows. Scores are computed twice, nothing is added
atomically and the result does not change from call to call. Sums are float32. With a mask, rows are taken in blocks
whose mask takes at most a tile's bytes.

Importing this module does not import triton; the first call does. Without a GPU the same code runs in Triton's
interpreter: set TRITON_INTERPRET=1 before the first call (for tests).
"""

from __future__ import annotations

import importlib
import math

import torch
from torch import Tensor

from foveakv.core.row_tiles import TiledRows
from foveakv.kernels import triton_decode
from foveakv.kernels.triton_decode import DTYPES, LARGEST_DIM, STAGES, WARPS, on, power, row_block, tile_size


def usable(keys: Tensor) -> bool:
    """Whether `column_sums` can serve keys [B, H, C, D] like these: on a CUDA device, float32 or 16 bits, D <= 256."""
    fits = keys.dtype in DTYPES and keys.shape[-1] <= LARGEST_DIM
    return fits and keys.is_cuda and triton_decode.available()


def column_sums(job: TiledRows) -> Tensor:
    """Compute the attention that each column receives, summed over rows and query group: float32 [B, H, C].

    ValueError: a dtype or a head dim that `usable` excludes.
    """
    query, keys = job.query, job.keys
    if query.dtype not in DTYPES or keys.dtype not in DTYPES or keys.shape[-1] > LARGEST_DIM:
        raise ValueError(f"no fused column sums for {query.dtype}, {keys.dtype} and head dim {keys.shape[-1]}")
    sums = torch.zeros(job.batch, job.heads, job.columns, dtype=torch.float32, device=keys.device)
    if not sums.numel() or not job.rows.shape[1]:
        return sums
    if job.columns * keys.stride(2) >= 2**31:  # offsets within a head are 32 bits
        keys = keys.contiguous()
    if job.visible is None:
        _add(job, keys, job.rows, torch.where(job.valid, job.rows + 1, 0), None, sums)
        return sums
    step = max(1, job.tile_bytes // (job.batch * job.columns))
    for rows, valid in zip(job.rows.split(step, 1), job.valid.split(step, 1), strict=True):
        mask = job.visible(rows)[:, 0].expand(job.batch, -1, job.columns)
        _add(job, keys, rows, torch.where(valid, job.columns, 0), mask, sums)
    return sums


def _add(job: TiledRows, keys: Tensor, rows: Tensor, stop: Tensor, mask: Tensor | None, sums: Tensor) -> None:
    """sums += the sums of these rows [B, n], which see columns below `stop` [B, n] that the mask [B, n, C] shows."""
    kernels = importlib.import_module("foveakv.kernels.triton_column_kernels")
    query, tokens = job.query, rows.shape[1]
    rows, stop = (rows - job.first_row).contiguous(), stop.contiguous()
    # Operands of different types meet in float32; the interpreter has no arithmetic in bfloat16.
    upcast = query.dtype != keys.dtype or (kernels.INTERPRETED and query.dtype == torch.bfloat16)
    block_d = max(16, power(query.shape[-1]))
    pair_bytes = 2 * block_d * (4 if upcast else query.element_size())  # a query row and a key
    height, tile = row_block(tokens * job.group, pair_bytes), tile_size(pair_bytes)
    if mask is None:
        bits, mask_strides = stop, (0, 0)  # any pointer will do: it is not read
    else:
        mask = mask if mask.stride(2) == 1 else mask.contiguous()
        bits, mask_strides = mask.view(torch.uint8), (mask.stride(0), mask.stride(1))
    lse = torch.empty(job.batch * job.heads, tokens * job.group, dtype=torch.float32, device=keys.device)
    scale = job.scaling * math.log2(math.e)
    sizes = job.heads, tokens, job.columns, *query.stride(), *keys.stride(), *mask_strides
    options = {
        "D": query.shape[-1], "BLOCK_D": block_d, "GROUP": job.group, "ROWS": height, "TILE": tile,
        "HAS_MASK": mask is not None, "UPCAST": upcast, "num_warps": WARPS, "num_stages": STAGES,
    }  # fmt: skip
    runs = job.batch * job.heads
    with on(keys.device):
        kernels.row_lse[runs, -(-tokens * job.group // height)](
            query, keys, rows, stop, bits, lse, scale, *sizes, **options
        )
        kernels.add_columns[runs, -(-job.columns // tile)](
            query, keys, rows, stop, bits, lse, sums, scale, *sizes, **options
        )
