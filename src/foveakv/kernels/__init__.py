"""Decode attention over runs of different lengths: one function, several backends.

`backend="auto"` picks one (see `choose`):

| device | storage | backend |
|---|---|---|
| CPU | float32, bfloat16, float16, quantized | `cpu` if its kernel can be built and loaded here, else `blocks` |
| CPU, more than 48 query rows (G * q) per KV head, no attention sum | any | `blocks`, which uses matrix products |
| CPU | float64, or float64 queries | `blocks` |
| CUDA | the same, head dims up to 256 | `triton` where triton is installed, else `blocks` |
| other | any | `blocks` |

Column sums of a prompt's attention (`fused_columns`) come from `cpu_columns` and `triton_columns` in the same way;
float64 and other devices use tensor operations. The Triton kernels are tested in Triton's interpreter and compiled for
CUDA; they have not run on a GPU.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from foveakv.core.fused_columns import Fused, WholeColumns
from foveakv.errors import MethodError
from foveakv.kernels import blocks, reference
from foveakv.kernels.contract import Attended
from foveakv.kernels.residual import attend_with_residual
from foveakv.memory.runs import Runs

Backend = Callable[..., Attended]  # (query, runs, scaling, mask, need_attention_sum, need_lse, other_lse), see `attend`


def _cpu(*arguments: Any) -> Attended:
    return _module("cpu").attend(*arguments)


def _triton(*arguments: Any) -> Attended:
    return _module("triton_decode").attend(*arguments)


# To add a kernel: a row here, a line in `problem` if it cannot be used everywhere, and a line in `choose` where it
# should be the default. What a backend needs is imported when it is first used.
BACKENDS: dict[str, Backend] = {
    "reference": reference.attend,
    "blocks": blocks.attend,
    "cpu": _cpu,
    "triton": _triton,
}
COMPILED = ("auto", "cpu")  # caches with these use the compiled library for more than attention, where there is one
READS_RESIDUAL = ("cpu",)  # these read `runs.residual` themselves; for the others `attend_with_residual` does
MOST_ROWS_CPU = 48  # measured: even in float32 near 60 rows; in bfloat16, on a processor with AMX, from 20 on
_warned = False


def problem(name: str) -> str | None:
    """Why a backend cannot be used on this machine; None if it can. For "cpu" this builds and loads the kernel."""
    if name == "cpu":
        return _module("cpu").problem()
    if name == "triton" and not _module("triton_decode").available():
        return "it needs the triton package and a CUDA device"
    return None


def prepare(device: torch.device | str, *, itemsize: int = 4, backend: str = "auto") -> None:
    """Build and load what `attend` and `fused_columns` need on `device`, so that no measured step pays for it.

    Cheap after the first call in a process. Engines call it before they start the clock of a prefill. The first call
    on a machine compiles the CPU kernel (about 20 s). Triton compiles its kernels for each shape on first launch,
    which no call here can replace; only the import is done.

    Args:
        device: where queries, keys and values are stored.
        itemsize: bytes of one number of the queries; float64 (8) never uses the CPU kernel with "auto".
        backend: as in `attend`.

    MethodError: `backend` is named explicitly and cannot be used on this machine, with the reason.
    """
    kind = torch.device(device).type
    if backend != "auto" and backend not in BACKENDS:
        raise MethodError(f"no attention backend {backend!r}; choose 'auto' or one of {sorted(BACKENDS)}")
    if backend == "auto":
        if kind == "cpu" and itemsize <= 4:
            problem("cpu")  # a reason why there is none is reported when the kernel is first chosen
        elif kind == "cuda" and problem("triton") is None:
            _module("triton_kernels")
    elif (reason := problem(backend)) is not None:
        raise MethodError(f"the {backend} backend is not available: {reason}; choose backend='blocks' or 'auto'")


def choose(query: Tensor, runs: Runs, *, need_attention_sum: bool = False) -> str:
    """The backend that "auto" uses for these tensors: the table at the top of this module."""
    global _warned
    if query.is_cuda:
        triton = _module("triton_decode")
        return "triton" if triton.supports(query, runs) and triton.available() else "blocks"
    if not query.is_cpu:
        return "blocks"
    cpu = _module("cpu")
    shape = query.shape
    many = shape[1] // runs.heads * shape[2] > MOST_ROWS_CPU and not need_attention_sum
    if many or not cpu.supports(query, runs):
        return "blocks"
    reason = cpu.problem()
    if reason is None:
        return "cpu"
    if not _warned:
        _warned = True
        print(f"foveakv: no CPU attention kernel, using the slower `blocks`: {reason}", file=sys.stderr, flush=True)
    return "blocks"


def fused_columns(keys: Tensor, backend: str = "auto") -> Fused | WholeColumns | None:
    """The fused column sums for a prompt's keys [B, H, C, D] like these; None = tensor operations.

    Builds and loads nothing: `prepare` does, before the prompt is read. A backend that is named explicitly and is not
    the device's kernel ("blocks", "reference") has none.
    """
    name = "triton" if keys.is_cuda else "cpu"
    if backend not in ("auto", name):
        return None
    module: Any = _module(f"{name}_columns")
    return module if module.usable(keys) else None


def attend(
    query: Tensor,
    runs: Runs,
    scaling: float,
    mask: Tensor | None = None,
    *,
    need_attention_sum: bool = False,
    need_lse: bool = False,
    other_lse: Tensor | None = None,
    backend: str = "auto",
) -> Attended:
    """Attention of q new tokens over every stored slot of their run.

    Args:
        query: [B, Hq, q, D], RoPE applied; query head i reads KV head i // (Hq // H).
        runs: stored keys and values, see `foveakv.memory.runs`. Quantized runs are dequantized while they are read;
            slots that have a full-precision copy (`runs.residual`) are read from it.
        scaling: factor of the scores, usually D ** -0.5.
        mask: bool [B, 1 or H, q, M] in padded run coordinates, True = may attend; None = every stored slot.
        need_attention_sum: also return the attention probabilities summed over the query group and the q queries.
        need_lse: also return the log-sum-exp of the scores.
        other_lse: [B, Hq, q], the log-sum-exp of what every query attends to elsewhere. out and attention_sum are then
            the share of these runs in the whole, and the log-sum-exp is that of both together.
        backend: "auto" or a name in `BACKENDS`.

    Returns:
        out [B, Hq, q, Dv] in the query's dtype; attention_sum [B, H, M], 0 beyond a run; lse [B, Hq, q], the natural
        log-sum-exp of the scaled scores. The latter two are float32, and float64 for float64 queries. A query that may
        attend to nothing gets 0, and -inf as its log-sum-exp.

    Query, keys and values may differ in dtype, as they do under autocast: they meet in the widest of the three, and
    16-bit dtypes are summed in float32. Autocast itself has no effect here.
    No gradients: stored keys and values are detached, and pieces merged by log-sum-exp would give wrong ones.

    MethodError: an unknown backend, or one that cannot be used here or with these tensors. ValueError: shapes.
    """
    if torch.is_autocast_enabled(device := query.device.type):
        with torch.no_grad(), torch.autocast(device, enabled=False):
            return _attend(query, runs, scaling, mask, need_attention_sum, need_lse, other_lse, backend)
    if torch.is_grad_enabled():  # checked first: entering no_grad takes a few microseconds
        with torch.no_grad():
            return _attend(query, runs, scaling, mask, need_attention_sum, need_lse, other_lse, backend)
    return _attend(query, runs, scaling, mask, need_attention_sum, need_lse, other_lse, backend)


def _attend(
    query: Tensor,
    runs: Runs,
    scaling: float,
    mask: Tensor | None,
    need_attention_sum: bool,
    need_lse: bool,
    other_lse: Tensor | None,
    backend: str,
) -> Attended:
    batch, query_heads, q, _ = query.shape
    if batch != runs.batch or query_heads % runs.heads:
        raise ValueError(
            f"query {tuple(query.shape)} does not fit {runs.batch} sequences with {runs.heads} KV heads each"
        )
    if mask is not None and (
        mask.dim() != 4
        or mask.shape[0] not in (1, batch)
        or mask.shape[1] not in (1, runs.heads)
        or mask.shape[2:] != (q, runs.max_length)
    ):
        raise ValueError(f"mask must be [{batch}, 1 or {runs.heads}, {q}, {runs.max_length}], got {tuple(mask.shape)}")
    if other_lse is not None and other_lse.shape != query.shape[:3]:
        raise ValueError(f"other_lse must be {list(query.shape[:3])}, got {list(other_lse.shape)}")
    name = choose(query, runs, need_attention_sum=need_attention_sum) if backend == "auto" else backend
    if name not in BACKENDS:
        raise MethodError(f"no attention backend {backend!r}; choose 'auto' or one of {sorted(BACKENDS)}")
    if mask is not None and mask.shape[0] != batch:
        mask = mask.expand(batch, -1, -1, -1)
    if runs.residual is not None and name not in READS_RESIDUAL:
        return attend_with_residual(BACKENDS[name], query, runs, scaling, mask, need_attention_sum, need_lse, other_lse)
    return BACKENDS[name](query, runs, scaling, mask, need_attention_sum, need_lse, other_lse)


def decode_attention(
    query: Tensor,
    runs: Runs,
    scaling: float,
    mask: Tensor | None = None,
    *,
    need_attention_sum: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """`attend` without the log-sum-exp: (out, attention_sum), the latter None unless it is needed."""
    return attend(query, runs, scaling, mask, need_attention_sum=need_attention_sum, backend=backend)[:2]


@functools.cache
def _module(name: str) -> ModuleType:
    return importlib.import_module(f"foveakv.kernels.{name}")
