"""Decode attention over runs of different lengths: one function, several backends.

"auto" stands for (see `choose`):

| device | storage | backend |
|---|---|---|
| CPU | float32, bfloat16, float16 | `cpu` if its kernel can be built and loaded here, else `blocks` |
| CPU, more than 48 query rows (G * q) per KV head, no mass wanted | any | `blocks`: that is a matrix product's work |
| CPU | float64 | `blocks` |
| CUDA | any that it reads | `triton` where triton is installed, else `blocks` |
| other | any | `blocks` |
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from foveakv.errors import MethodError
from foveakv.kernels import blocks, reference
from foveakv.kernels.contract import Attended
from foveakv.memory.segments import Runs

Backend = Callable[[Tensor, Runs, float, Tensor | None, bool, bool], Attended]


def _cpu(
    query: Tensor, runs: Runs, scaling: float, mask: Tensor | None = None, mass: bool = False, lse: bool = False
) -> Attended:
    return _module("cpu").attend(query, runs, scaling, mask, mass, lse)


def _triton(
    query: Tensor, runs: Runs, scaling: float, mask: Tensor | None = None, mass: bool = False, lse: bool = False
) -> Attended:
    out, spent, sums = _module("triton_decode").attend_with_lse(query, runs, scaling, mask, mass)
    return Attended(out, spent, sums if lse else None)


# The one seam for further kernels: a row here, a line in `problem` if it cannot be used everywhere, and where it
# should be the default a line in `choose`. What a backend needs is imported when it is first used.
BACKENDS: dict[str, Backend] = {
    "reference": reference.attend,
    "blocks": blocks.attend,
    "cpu": _cpu,
    "triton": _triton,
}
MOST_ROWS_CPU = 48  # measured: even in float32 near 60 rows; in bfloat16, on a processor with AMX, from 20 on
_warned = False


def problem(name: str) -> str | None:
    """Why a backend cannot be used on this machine; None if it can. Builds the CPU kernel if that is the question."""
    if name == "cpu":
        return _module("cpu").problem()
    if name == "triton" and not _module("triton_decode").available():
        return "it needs the triton package and a CUDA device"
    return None


def choose(query: Tensor, runs: Runs, *, need_mass: bool = False) -> str:
    """The backend that "auto" stands for: the table at the top of this module."""
    global _warned
    if query.device.type == "cuda":
        triton = _module("triton_decode")
        return "triton" if query.dtype in triton.DTYPES and triton.available() else "blocks"
    if query.device.type != "cpu":
        return "blocks"
    cpu = _module("cpu")
    many = query.shape[1] // runs.heads * query.shape[2] > MOST_ROWS_CPU and not need_mass
    if many or not cpu.supports(query, runs):
        return "blocks"
    reason = cpu.problem()
    if reason is None:
        return "cpu"
    if not _warned:
        _warned = True
        print(f"foveakv: no CPU attention kernel, using the slower `blocks`: {reason}", file=sys.stderr, flush=True)
    return "blocks"


@torch.no_grad()
def attend(
    query: Tensor,
    runs: Runs,
    scaling: float,
    mask: Tensor | None = None,
    *,
    need_mass: bool = False,
    need_lse: bool = False,
    backend: str = "auto",
) -> Attended:
    """Attention of q new tokens over every stored slot of their run.

    query [B, Hq, q, D], RoPE applied; query head i reads KV head i // (Hq // H).
    mask bool [B, 1 or H, q, M] in padded run coordinates, True = may attend; None = every stored slot.

    Returns out [B, Hq, q, Dv] in the query's dtype; with `need_mass` the attention probabilities summed over the
    query group and the q queries: mass [B, H, M] float32 (float64 for float64 queries), 0 beyond a run; with `need_lse`
    the natural log-sum-exp of the scaled scores, [B, Hq, q] in the dtype of the mass.
    A query that may attend to nothing gets 0, and -inf as its log-sum-exp. Sixteen-bit storage accumulates in float32.
    No gradients: what is stored was detached from its graph, and pieces merged by log-sum-exp would give wrong ones.

    MethodError: an unknown backend, or one that cannot be used here or with these tensors. ValueError: shapes.
    """
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
    name = choose(query, runs, need_mass=need_mass) if backend == "auto" else backend
    if name not in BACKENDS:
        raise MethodError(f"no attention backend {backend!r}; choose 'auto' or one of {sorted(BACKENDS)}")
    if mask is not None and mask.shape[0] != batch:
        mask = mask.expand(batch, -1, -1, -1)
    return BACKENDS[name](query, runs, scaling, mask, need_mass, need_lse)


def decode_attention(
    query: Tensor,
    runs: Runs,
    scaling: float,
    mask: Tensor | None = None,
    *,
    need_mass: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """`attend` for those who need no log-sum-exp: (out, mass)."""
    return attend(query, runs, scaling, mask, need_mass=need_mass, backend=backend)[:2]


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"foveakv.kernels.{name}")
