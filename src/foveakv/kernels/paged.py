"""Attention over the slots of the segments and over chosen pages of a store, read in place.

Only the CPU kernel reads pages (`reads_pages`). Cases that it does not cover attend to a copy of the chosen pages, with
any backend, and are merged by log-sum-exp: a mask that hides part of the pages, pages in another dtype than the slots,
and more than MOST_ROWS_CPU query rows, where "auto" prefers another backend.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foveakv.errors import MethodError
from foveakv.kernels import attend, choose, cpu
from foveakv.kernels.contract import Attended, safe, value_dim
from foveakv.memory.pages import Pages
from foveakv.memory.runs import Runs


def reads_pages(runs: Runs, stored: Tensor, backend: str) -> bool:
    """Whether a cache with this `backend` can read pages like `stored` in place: on the CPU, in the runs' dtype."""
    if backend not in ("auto", "cpu") or stored.device.type != "cpu" or stored.dtype != runs.keys.dtype:
        return False
    one = runs.keys.new_empty(runs.batch, runs.heads, 1, runs.keys.shape[1])  # a query row per KV head
    if backend == "auto":
        return choose(one, runs) == "cpu"
    return cpu.supports(one, runs) and cpu.problem() is None


@torch.no_grad()
def attend_with_pages(
    query: Tensor,
    runs: Runs,
    scaling: float,
    pages: Pages,
    mask: Tensor | None = None,
    page_mask: Tensor | None = None,
    *,
    need_attention_sum: bool = False,
    backend: str = "auto",
) -> Attended:
    """Attention of query [B, Hq, q, D] over the runs' own slots and their pages.

    mask: bool [B, 1 or H, q, M] over own slots. page_mask: bool [B, H, q, K * T] over the pages in the order of the
    table; None = every query may attend to all of them. Returns out [B, Hq, q, Dv], and with `need_attention_sum` the
    attention sum [B, H, M] of the own slots.
    MethodError: tensors on another device, or what `attend` raises. ValueError: shapes.
    """
    if not query.is_cpu:
        raise MethodError("pages are read in place on a CPU only; copy them into the segments on a device")
    in_place = page_mask is None and pages.keys.dtype == pages.values.dtype == runs.keys.dtype
    if in_place and backend == "auto":
        in_place = choose(query, runs, need_attention_sum=need_attention_sum) == "cpu"
    if in_place and backend in ("auto", "cpu"):
        return cpu.attend_with_chunks(
            query, runs, scaling, pages.keys, pages.values, pages.table, mask, need_attention_sum=need_attention_sum
        )
    copied = _copied(pages, runs, query.shape[-1], value_dim(runs))
    if page_mask is not None:
        page_mask = page_mask[..., : copied.max_length]
    other = attend(query, copied, scaling, page_mask, need_lse=True, backend=backend)
    own = attend(
        query, runs, scaling, mask,
        need_attention_sum=need_attention_sum, need_lse=True, other_lse=other.lse, backend=backend,
    )  # fmt: skip
    if own.lse is None or other.lse is None:
        raise ValueError("outputs can be merged only with their log-sum-exp")
    share = torch.exp(other.lse - safe(own.lse))[..., None]  # of the pages in the whole; own.out has its own
    out = own.out + torch.where(share == 0, 0, other.out * share)
    return Attended(out.to(query.dtype), own.attention_sum)


def _copied(pages: Pages, runs: Runs, dim: int, value_dim: int) -> Runs:
    """The chosen pages as runs of their own."""
    wanted = pages.table >= 0
    tokens = pages.keys.shape[1] // dim
    index, length = pages.table[wanted], wanted.sum(-1) * tokens
    longest = int(length.max())
    keys = pages.keys.index_select(0, index).view(-1, dim)
    values = pages.values.index_select(0, index).view(-1, value_dim)
    start = length.cumsum(0) - length
    return Runs(
        keys, values, torch.zeros(len(keys), dtype=torch.int32), start, length, runs.batch, runs.heads, longest,
        bool((length == longest).all()), start, length,
    )  # fmt: skip
