"""Decode attention over runs of different lengths: one function, several backends."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from foveakv.errors import MethodError
from foveakv.kernels import blocks, reference
from foveakv.memory.segments import Runs

Backend = Callable[[Tensor, Runs, float, Tensor | None, bool], tuple[Tensor, Tensor | None]]

# The one seam for further kernels: add a row here, and where it should be the default a line in `choose`.
BACKENDS: dict[str, Backend] = {"reference": reference.attend, "blocks": blocks.attend}


def choose(query: Tensor, runs: Runs) -> str:
    """The backend that "auto" stands for."""
    return "blocks"


@torch.no_grad()
def decode_attention(
    query: Tensor,
    runs: Runs,
    scaling: float,
    mask: Tensor | None = None,
    *,
    need_mass: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Attention of q new tokens over every stored slot of their run.

    query [B, Hq, q, D], RoPE applied; query head i reads KV head i // (Hq // H).
    mask bool [B, 1 or H, q, M] in padded run coordinates, True = may attend; None = every stored slot.
    Returns out [B, Hq, q, Dv] in the query's dtype, and with `need_mass` the attention probabilities summed over the
    query group and the q queries: mass [B, H, M] float32 (float64 for float64 queries), 0 beyond a run.
    A query that may attend to nothing gets 0. Sixteen-bit storage accumulates in float32. No gradients: what is
    stored was detached from its graph, and pieces merged by log-sum-exp would give wrong ones.
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
    name = choose(query, runs) if backend == "auto" else backend
    if name not in BACKENDS:
        raise MethodError(f"no attention backend {backend!r}; choose 'auto' or one of {sorted(BACKENDS)}")
    if mask is not None and mask.shape[0] != batch:
        mask = mask.expand(batch, -1, -1, -1)
    return BACKENDS[name](query, runs, scaling, mask, need_mass)
