"""Decode attention on a CPU, from a small C++ kernel (cpu_decode.cpp) that is built on first use.

Runs of any lengths are read in place, once for all query heads that share a KV head, and are spread over torch's own
threads. Storage may be float32, bfloat16, float16 or quantized to 8 or 4 bits, with full-precision copies of some
slots; arithmetic is float32. `attend_with_chunks` reads chunks of a store in the same pass.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from foveakv.errors import MethodError
from foveakv.kernels.build import KERNEL, BuildError
from foveakv.kernels.contract import Attended
from foveakv.memory.runs import Runs

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
KINDS = {"int8": 3, "int4": 4}
_FAILURES = {
    1: "a run reaches beyond its buffer",
    2: "the table names a chunk that the store does not hold",
    4: "there is not enough memory",
}
# `struct Arguments` of cpu_decode.cpp, field by field: q an int64, P a pointer, d a double.
_FIELDS = {
    **dict.fromkeys(("format", "runs", "rows", "dim", "value_dim"), "q"),
    "query": "P",
    **dict.fromkeys(("query_bfloat16", "query_batch", "query_head", "query_query"), "q"),
    **dict.fromkeys(("keys", "values"), "P"),
    **dict.fromkeys(("key_stride", "value_stride", "stored"), "q"),
    **dict.fromkeys(("start", "length", "page_table"), "P"),
    **dict.fromkeys(("page_width", "page_size"), "q"),
    "mask": "P",
    **dict.fromkeys(("mask_batch", "mask_head", "mask_query", "heads", "q"), "q"),
    **dict.fromkeys(("chunk_keys", "chunk_values"), "P"),
    **dict.fromkeys(("chunks", "chunk", "table_width"), "q"),
    **dict.fromkeys(("table", "key_scale", "key_zero", "entry", "residual_keys", "residual_values"), "P"),
    **dict.fromkeys(("residual_format", "window"), "q"),
    "scaling": "d",
    **dict.fromkeys(("other_lse", "out", "lse", "attention_sum"), "P"),
    "attention_sum_width": "q",
}
# Packed on every call; takes a fifth of the time of ctypes.Structure.
ARGUMENTS = struct.Struct("".join(_FIELDS.values()))


def problem() -> str | None:
    """Why this backend cannot be used here, None if it can. Builds and loads the kernel on the first call."""
    return KERNEL.problem()


def supports(query: Tensor, runs: Runs) -> bool:
    """Whether the kernel reads tensors of these dtypes, on this device."""
    if not query.is_cpu or query.dtype not in DTYPES:
        return False
    if runs.quantizer is None:
        return runs.keys.dtype in DTYPES and runs.values.dtype in DTYPES
    residual = runs.residual
    if residual is not None and not (residual.keys.dtype in DTYPES and residual.values.dtype in DTYPES):
        return False
    return runs.quantizer.kind in KINDS


def attend(
    query: Tensor,
    runs: Runs,
    scaling: float,
    mask: Tensor | None = None,
    need_attention_sum: bool = False,
    need_lse: bool = False,
    other_lse: Tensor | None = None,
) -> Attended:
    """See `foveakv.kernels.attend` for shapes.

    Keys and values of different dtypes cost a widened copy in every call (`Segments` stores both in one dtype).

    MethodError: tensors that the kernel does not read (float64, other devices), or no kernel, with the reason.
    ValueError: shapes, or runs that reach beyond their buffers.
    """
    return _attend(query, runs, scaling, mask, need_attention_sum, need_lse, other_lse, None)


@torch.no_grad()
def attend_with_chunks(
    query: Tensor,
    runs: Runs,
    scaling: float,
    chunk_keys: Tensor,
    chunk_values: Tensor,
    table: Tensor,
    mask: Tensor | None = None,
    *,
    need_attention_sum: bool = False,
    need_lse: bool = False,
) -> Attended:
    """Attention over chosen chunks of a store and over the runs' own slots, in one pass and without a copy.

    Args:
        query: [B, Hq, q, D], RoPE applied. runs, scaling: see `foveakv.kernels.attend`.
        chunk_keys: [N, T * D], chunk_values: [N, T * Dv]: N chunks of T tokens, in the dtype of the runs' keys.
        table: int64 [R, K]: the chunks that run r = b * H + h reads; -1 = none. Every query may attend to all of them.
        mask: bool [B, 1 or H, q, M] over the runs' own slots.
        need_attention_sum: also return attention_sum [B, H, M] over the runs' own slots, without the chunks.
        need_lse: also return the log-sum-exp [B, Hq, q], over both.
    MethodError: as in `attend`. ValueError: shapes that do not fit, or an index beyond the store.
    """
    if runs.quantizer is not None:
        raise MethodError(
            "the cpu backend cannot read chunks when slots are quantized; leave kv_dtype out, or choose another backend"
        )
    total, dim, value_dim = runs.batch * runs.heads, runs.keys.shape[1], runs.values.shape[1]
    if chunk_keys.dtype != runs.keys.dtype or chunk_values.dtype != runs.keys.dtype:
        raise ValueError(f"chunks must be stored as the runs are, in {runs.keys.dtype}, not {chunk_keys.dtype}")
    if chunk_keys.dim() != 2 or chunk_keys.shape[1] % dim:
        raise ValueError(f"chunk_keys must be [N, T * {dim}], got {tuple(chunk_keys.shape)}")
    if chunk_values.shape != (chunk_keys.shape[0], chunk_keys.shape[1] // dim * value_dim):
        raise ValueError(f"chunk_values {tuple(chunk_values.shape)} do not match chunk_keys {tuple(chunk_keys.shape)}")
    if table.dim() != 2 or table.shape[0] != total or table.dtype != torch.int64:
        raise ValueError(f"table must be int64 [{total}, K], got {table.dtype} {tuple(table.shape)}")
    if any(part.device.type != "cpu" for part in (chunk_keys, chunk_values, table)):
        raise MethodError("the cpu backend reads chunks on the CPU only")
    chunks = chunk_keys.contiguous(), chunk_values.contiguous(), table.contiguous()
    return _attend(query, runs, scaling, mask, need_attention_sum, need_lse, None, chunks)


def _attend(
    query: Tensor,
    runs: Runs,
    scaling: float,
    mask: Tensor | None,
    need_attention_sum: bool,
    need_lse: bool,
    other_lse: Tensor | None,
    chunks: tuple[Tensor, Tensor, Tensor] | None,
) -> Attended:
    if not supports(query, runs):
        raise MethodError(
            f"the cpu backend reads float32, bfloat16 and float16 on the CPU, not queries in {query.dtype} and keys in "
            f"{runs.keys.dtype} on {query.device}; choose backend='blocks' or 'auto'"
        )
    try:
        library = KERNEL.library()
    except BuildError as error:
        raise MethodError(f"the cpu backend is not available: {error}; choose backend='blocks' or 'auto'") from error
    batch, query_heads, q, dim = query.shape
    keys, values, quantizer, heads, longest = runs.keys, runs.values, runs.quantizer, runs.heads, runs.max_length
    if keys.dtype != values.dtype:
        keys, values = _widened(keys, values)
    if quantizer is None:
        layout, width, value_dim = DTYPES[keys.dtype], keys.shape[1], values.shape[1]
    else:
        layout, width, value_dim = KINDS[quantizer.kind], quantizer.dim, quantizer.value_dim
    if width != dim or query_heads % heads or batch != runs.batch:
        raise ValueError(f"query {tuple(query.shape)} does not fit keys {tuple(keys.shape)} of {heads} heads")
    key_stride, step = keys.stride()
    value_stride, value_step = values.stride()
    if step != 1 or value_step != 1:
        raise ValueError("rows of keys and values must be contiguous")
    if query.dtype == torch.float16:
        source, dtype = query.to(torch.float32), torch.float32
    else:
        source, dtype = query, query.dtype
    strides = source.stride()
    if strides[3] != 1:
        source = source.contiguous()
        strides = source.stride()
    out = torch.empty((batch, query_heads, q, value_dim), dtype=dtype)
    lse = torch.empty((batch, query_heads, q)) if need_lse or need_attention_sum else None
    attention_sum = torch.zeros((batch, heads, longest)) if need_attention_sum else None
    start = runs.start if runs.start_host is None else runs.start_host
    length = runs.length if runs.length_host is None else runs.length_host
    paged = (0, 0, 0)
    if runs.table is not None:
        host = runs.table if runs.table_host is None else runs.table_host
        if host.dtype != torch.int32 or host.shape[0] != batch * heads or not host.is_contiguous():
            raise ValueError(f"table must be int32 [{batch * heads}, K], got {host.dtype} {tuple(host.shape)}")
        paged = (host.data_ptr(), host.shape[1], runs.page_size)
    mask_at = mask_batch = mask_head = mask_query = 0
    if mask is not None:
        if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[2:] != (q, longest):
            raise ValueError(f"mask must be bool [B, 1 or H, {q}, {longest}], got {mask.dtype} {tuple(mask.shape)}")
        mask = mask if mask.stride(3) == 1 else mask.contiguous()
        mask_batch, mask_head, mask_query = (0 if mask.shape[i] == 1 else mask.stride(i) for i in range(3))
        mask_at = mask.data_ptr()
    stored: tuple[int, ...] = (0, 0, 0, 0, 0, 0)
    if chunks is not None:
        chunk_keys, chunk_values, table = chunks
        stored = (
            chunk_keys.data_ptr(), chunk_values.data_ptr(), chunk_keys.shape[0], chunk_keys.shape[1] // dim,
            table.shape[1], table.data_ptr(),
        )  # fmt: skip
    quantized: tuple[int, ...] = (0, 0, 0, 0, 0, 0, 0)
    copies: tuple[Tensor, ...] = ()
    if quantizer is not None:
        residual = runs.residual
        if residual is not None and residual.keys.shape[1]:
            copies = residual.keys, residual.values
            if residual.keys.dtype != residual.values.dtype:
                copies = _widened(*copies)
        if not all(part.is_contiguous() for part in (quantizer.key_scale, quantizer.key_zero, *copies)):
            raise ValueError("scales, zeros and full-precision copies must be contiguous")
        quantized = (quantizer.key_scale.data_ptr(), quantizer.key_zero.data_ptr(), *quantized[2:])
        if residual is not None and copies:
            quantized = (
                *quantized[:2], residual.slot_entry.data_ptr(), copies[0].data_ptr(), copies[1].data_ptr(),
                DTYPES[copies[0].dtype], copies[0].shape[1],
            )  # fmt: skip
    if other_lse is not None:
        other_lse = other_lse.to(torch.float32).contiguous()
    itemsize = keys.element_size()
    # Tensors that have a name stay alive during the call.
    arguments = ARGUMENTS.pack(
        layout, batch * heads, query_heads // heads * q, dim, value_dim,
        source.data_ptr(), dtype == torch.bfloat16, *strides[:3], keys.data_ptr(), values.data_ptr(),
        key_stride * itemsize, value_stride * itemsize, keys.shape[0], start.data_ptr(), length.data_ptr(),
        *paged, mask_at, mask_batch, mask_head, mask_query, heads, q, *stored, *quantized, scaling,
        0 if other_lse is None else other_lse.data_ptr(), out.data_ptr(), 0 if lse is None else lse.data_ptr(),
        0 if attention_sum is None else attention_sum.data_ptr(), longest,
    )  # fmt: skip
    status = library.foveakv_attend(arguments)
    if status:
        raise ValueError(f"decode attention on the CPU failed: {_FAILURES.get(status, f'status {status}')}")
    return Attended(out if dtype == query.dtype else out.to(query.dtype), attention_sum, lse if need_lse else None)


def _widened(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the wider of their dtypes."""
    dtype = torch.promote_types(keys.dtype, values.dtype)
    return keys.to(dtype), values.to(dtype)
