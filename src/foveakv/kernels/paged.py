"""Attention over the slots of the segments and over chosen pages of a store, read in place.

Only the CPU kernel reads pages (`reads_pages`). Two cases that it does not cover take a copy of the chosen pages, with
any backend, and are merged by log-sum-exp: a mask that hides part of the pages, and so many query rows at once that
"auto" prefers another backend.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foveakv.errors import MethodError
from foveakv.kernels import attend, choose, cpu
from foveakv.kernels.contract import Attended
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
    MethodError: `need_attention_sum` together with a page_mask, or what `attend` raises. ValueError: shapes.
    """
    if not query.is_cpu:
        raise MethodError("pages are read in place on a CPU only; copy them into the segments on a device")
    many = backend == "auto" and choose(query, runs, need_attention_sum=need_attention_sum) != "cpu"
    if page_mask is None and not many:
        return cpu.attend_with_chunks(
            query, runs, scaling, pages.keys, pages.values, pages.table, mask, need_attention_sum=need_attention_sum
        )
    if need_attention_sum:
        raise MethodError(
            "pages that a mask hides in part cannot be combined with a method that needs the attention sum"
        )
    copied = _copied(pages, runs)
    if page_mask is not None:
        page_mask = page_mask[..., : copied.max_length]
    own = attend(query, runs, scaling, mask, need_lse=True, backend=backend)
    other = attend(query, copied, scaling, page_mask, need_lse=True, backend=backend)
    return Attended(_merged(own, other))


def _copied(pages: Pages, runs: Runs) -> Runs:
    """The chosen pages as runs of their own."""
    wanted = pages.table >= 0
    tokens = pages.keys.shape[1] // runs.keys.shape[1]
    index, length = pages.table[wanted], wanted.sum(-1) * tokens
    longest = int(length.max())
    keys = pages.keys.index_select(0, index).view(-1, runs.keys.shape[1])
    values = pages.values.index_select(0, index).view(-1, runs.values.shape[1])
    start = length.cumsum(0) - length
    return Runs(
        keys, values, torch.zeros(len(keys), dtype=torch.int32), start, length, runs.batch, runs.heads, longest,
        bool((length == longest).all()), start, length,
    )  # fmt: skip


def _merged(one: Attended, two: Attended) -> Tensor:
    """Outputs over two sets of slots -> the output over both."""
    if one.lse is None or two.lse is None:
        raise ValueError("outputs can be merged only with their log-sum-exp")
    top = torch.maximum(one.lse, two.lse)
    top = top.masked_fill(top == -torch.inf, 0)
    first, second = (one.lse - top).exp()[..., None], (two.lse - top).exp()[..., None]
    summed, norm = one.out * first + two.out * second, first + second
    return torch.where(norm == 0, 0, summed / norm).to(one.out.dtype)
