"""Decode attention on a CPU, from a small C++ kernel (cpu_decode.cpp) that is built on first use.

Runs of any lengths are read in place, once for all query heads that share a KV head, and are spread over torch's own
threads. Storage may be float32, bfloat16 or float16; arithmetic is float32. `attend_with_chunks` reads pages of a store
in the same pass.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from foveakv.errors import MethodError
from foveakv.kernels.build import KERNEL, BuildError
from foveakv.kernels.contract import Attended
from foveakv.memory.segments import Runs

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_FAILURES = {
    1: "a run reaches beyond its buffer",
    2: "the table names a chunk that the store does not hold",
    4: "there is not enough memory",
}


class _Arguments(ctypes.Structure):
    """`struct Arguments` of cpu_decode.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("dtype", "runs", "rows", "dim", "value_dim")),
        *((name, ctypes.c_void_p) for name in ("query", "keys", "values")),
        *((name, ctypes.c_int64) for name in ("key_stride", "value_stride", "stored")),
        *((name, ctypes.c_void_p) for name in ("start", "length", "mask")),
        *((name, ctypes.c_int64) for name in ("mask_batch", "mask_head", "mask_query", "heads", "q")),
        *((name, ctypes.c_void_p) for name in ("chunk_keys", "chunk_values")),
        *((name, ctypes.c_int64) for name in ("chunks", "chunk", "table_width")),
        ("table", ctypes.c_void_p),
        ("scaling", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("out", "lse", "mass")),
        ("mass_width", ctypes.c_int64),
    )


def problem() -> str | None:
    """Why this backend cannot be used here, None if it can. Builds the kernel if that was not done before."""
    return KERNEL.problem()


def supports(query: Tensor, runs: Runs) -> bool:
    """Whether these tensors are of a kind that the kernel reads."""
    return query.device.type == "cpu" and runs.codes is None and runs.keys.dtype in DTYPES and query.dtype in DTYPES


def attend(
    query: Tensor,
    runs: Runs,
    scaling: float,
    mask: Tensor | None = None,
    need_mass: bool = False,
    need_lse: bool = False,
    other_lse: Tensor | None = None,
) -> Attended:
    """See `foveakv.kernels.attend` for shapes.

    MethodError: tensors that the kernel does not read (float64, other devices), or no kernel, with the reason.
    """
    if other_lse is None:
        return _attend(query, runs, scaling, mask, need_mass, need_lse, None)
    raise NotImplementedError


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
    need_mass: bool = False,
    need_lse: bool = False,
) -> Attended:
    """Attention over chosen chunks of a store and over the runs' own slots, in one pass and without a copy.

    Args:
        query: [B, Hq, q, D], RoPE applied. runs, scaling: see `foveakv.kernels.attend`.
        chunk_keys: [N, T * D], chunk_values: [N, T * Dv]: N chunks of T tokens, in the dtype of the runs.
        table: int64 [R, K]: the chunks that run r = b * H + h reads; -1 = none. Every query may attend to all of them.
        mask: bool [B, 1 or H, q, M] over the runs' own slots.
        need_mass: also return mass [B, H, M] over the runs' own slots; what goes to chunks is missing in its sum.
        need_lse: also return the log-sum-exp [B, Hq, q], over both.
    MethodError: as in `attend`. ValueError: shapes that do not fit, or an index beyond the store.
    """
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
    return _attend(query, runs, scaling, mask, need_mass, need_lse, chunks)


def _attend(
    query: Tensor,
    runs: Runs,
    scaling: float,
    mask: Tensor | None,
    need_mass: bool,
    need_lse: bool,
    chunks: tuple[Tensor, Tensor, Tensor] | None,
) -> Attended:
    if not supports(query, runs):
        raise MethodError(
            f"the cpu backend reads float32, bfloat16 and float16 on the CPU, not {runs.keys.dtype} on "
            f"{query.device}; choose backend='blocks' or 'auto'"
        )
    try:
        library = KERNEL.library()
    except BuildError as error:
        raise MethodError(f"the cpu backend is not available: {error}; choose backend='blocks' or 'auto'") from error
    batch, query_heads, q, dim = query.shape
    keys, values, longest = runs.keys, runs.values, runs.max_length
    if keys.shape[1] != dim or query_heads % runs.heads or batch != runs.batch:
        raise ValueError(f"query {tuple(query.shape)} does not fit keys {tuple(keys.shape)} of {runs.heads} heads")
    if values.dtype != keys.dtype or keys.stride(1) != 1 or values.stride(1) != 1:
        raise ValueError("keys and values must be rows of one dtype, each row in one piece")
    total, group, value_dim = batch * runs.heads, query_heads // runs.heads, values.shape[1]
    source = query.to(torch.float32).contiguous()
    out = torch.empty(batch, query_heads, q, value_dim)
    lse = torch.empty(batch, query_heads, q)
    mass = torch.zeros(batch, runs.heads, longest) if need_mass else None
    start = runs.start if runs.start_host is None else runs.start_host
    length = runs.length if runs.length_host is None else runs.length_host
    mask_strides = (0, 0, 0)
    if mask is not None:
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        mask_strides = tuple(0 if mask.shape[i] == 1 else mask.stride(i) for i in range(3))  # type: ignore[assignment]
    chunk_keys, chunk_values, table = chunks or (None, None, None)
    # Tensors that are named above stay alive during the call.
    arguments = _Arguments(
        DTYPES[keys.dtype], total, group * q, dim, value_dim,
        source.data_ptr(), keys.data_ptr(), values.data_ptr(), keys.stride(0), values.stride(0), keys.shape[0],
        start.data_ptr(), length.data_ptr(), _pointer(mask), *mask_strides, runs.heads, q,
        _pointer(chunk_keys), _pointer(chunk_values),
        0 if chunk_keys is None else chunk_keys.shape[0], 0 if chunk_keys is None else chunk_keys.shape[1] // dim,
        0 if table is None else table.shape[1], _pointer(table),
        scaling, out.data_ptr(), lse.data_ptr(), _pointer(mass), longest,
    )  # fmt: skip
    status = library.foveakv_attend(ctypes.byref(arguments))
    if status:
        raise ValueError(f"decode attention on the CPU failed: {_FAILURES.get(status, f'status {status}')}")
    return Attended(out.to(query.dtype), mass, lse if need_lse else None)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
