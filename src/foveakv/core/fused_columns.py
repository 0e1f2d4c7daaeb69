"""Column sums of attention with a fused softmax and sum, given by the engine; see `attention_stats.column_sums`."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from foveakv.core.row_tiles import TiledRows


@runtime_checkable
class Fused(Protocol):
    """Sums over a tile in one pass, which an engine may offer; see `foveakv.kernels.cpu_columns`."""

    def add(self, scores: Tensor, stop: Tensor, seen: Tensor | None, sums: Tensor) -> None:
        """sums += the softmax of every row of scores, summed over the rows of a head."""

    def largest(self, values: Tensor, k: int) -> Tensor:
        """The k largest numbers of each row, summed over the rows of a head: [h, m, W] -> [h]."""


@runtime_checkable
class WholeColumns(Protocol):
    """Sums over all rows at once, which an engine may offer; see `foveakv.kernels.triton_columns`."""

    def column_sums(self, job: TiledRows) -> Tensor:
        """The attention that each column receives, summed over rows and query group: float32 [B, H, C]."""


_ROWS = 128  # of a tile at most: a tile spans the columns up to its last row, so high tiles waste products


def fused_column_sums(job: TiledRows, fused: Fused) -> Tensor:
    """Compute the attention that each column receives, summed over rows and query group: float32 [B, H, C].

    Equal to the sums over `job.tiles()` up to rounding. Keys of 16 bits are converted once per group of heads.
    """
    # A long prompt has thousands of tiles to add: in float64, so that rounding does not grow with them.
    out = torch.zeros(job.batch, job.heads, job.columns, dtype=torch.float64, device=job.keys.device)
    stop = torch.where(job.valid, job.rows + 1, 0)  # [B, n]
    n = stop.shape[1]
    if not n:
        return out.to(job.dtype)
    row_bytes = job.columns * job.dtype.itemsize * job.group
    step = max(1, min(n, _ROWS, job.tile_bytes // max(1, row_bytes)))
    together = max(1, min(job.heads, job.tile_bytes // (step * row_bytes)))
    widths = [int(width) for width in torch.stack([part.amax() for part in stop.split(step, 1)]).tolist()]
    first, last = int(job.rows[0, 0]), int(job.rows[-1, -1])
    straight = job.batch == 1 and last - first == n - 1 and bool((job.rows[0].diff() == 1).all())
    buffer = job.zeros(together * step * job.group * job.columns)
    for b in range(job.batch):
        for h in range(0, job.heads, together):
            heads = slice(h, min(h + together, job.heads))
            keys = job.keys[b, heads].to(job.dtype)
            queries = job.query[b].unflatten(0, (job.heads, job.group))[heads]  # [h, G, C, D]
            for tile, width in enumerate(widths):
                rows = slice(tile * step, min((tile + 1) * step, n))
                stops, seen = stop[b : b + 1, rows].contiguous(), None
                if job.visible is not None:
                    seen = job.visible(job.rows[:, rows])[:, 0].expand(job.batch, -1, job.columns)[b : b + 1]
                    # Rows that see nothing do not count; a mask may show columns after the row.
                    stops = torch.where(job.valid[b : b + 1, rows] & seen.any(-1), job.columns, 0)
                    width = job.columns
                if width == 0 or not bool(stops.any()):
                    continue
                if straight:
                    query = queries[:, :, first + rows.start : first + rows.stop]
                else:
                    query = queries.index_select(2, job.rows[b, rows])
                query = (query.to(job.dtype) * job.scaling).flatten(1, 2)  # [h, G * t, D]
                scores = buffer[: query.shape[0] * query.shape[1] * width].view(*query.shape[:2], width)
                torch.matmul(query, keys[:, :width].mT, out=scores)
                sums = job.zeros(1, len(queries), width)
                fused.add(scores[None], stops, seen, sums)
                out[b, heads, :width] += sums[0]
    return out.to(job.dtype)
