"""Column sums of attention with a fused softmax and sum, given by the engine; see `attention_stats.column_sums`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable

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


class _Part(NamedTuple):
    """Rows and what they see: stop int64 [B, K, m], the columns from 0 on that hold all that a row sees, 0 = none.

    K is H if heads have masks of their own, else 1. seen: for every sequence and mask bool [m, C], or None where each
    row sees all columns below its stop.
    """

    rows: slice
    stop: Tensor
    seen: list[list[Tensor | None]]


def fused_column_sums(job: TiledRows, fused: Fused) -> Tensor:
    """Compute the attention that each column receives, summed over rows and query group: float32 [B, H, C].

    Equal to the sums over `job.tiles()` up to rounding. A mask of all heads is read once, and keys of 16 bits are
    converted once for all tiles of a part.
    """
    # A long prompt has thousands of tiles to add: in float64, so that rounding does not grow with them.
    out = torch.zeros(job.batch, job.heads, job.columns, dtype=torch.float64, device=job.keys.device)
    n = job.rows.shape[1]
    if not n:
        return out.to(job.dtype)
    row_bytes = job.columns * job.dtype.itemsize * job.group
    step = max(1, min(n, _ROWS, job.tile_bytes // max(1, row_bytes)))
    together = max(1, min(job.heads, job.tile_bytes // (step * row_bytes)))
    straight = (job.rows.diff(dim=1) == 1).all(1).tolist()
    buffer = job.zeros(together * step * job.group * job.columns)
    for part in _parts(job, step):
        own = part.stop.shape[1] > 1
        for b in range(job.batch):
            stops = part.stop[b].split(step, 1)  # [K, t] each
            widths = torch.stack([stop.amax(1) for stop in stops]).tolist()
            for h in range(0, job.heads, 1 if own else together):
                heads, k = slice(h, h + 1 if own else min(h + together, job.heads)), h if own else 0
                keys = job.keys[b, heads].to(job.dtype)
                queries = job.query[b].unflatten(0, (job.heads, job.group))[heads]  # [h, G, C, D]
                for tile, each in enumerate(widths):
                    width = int(each[k])
                    if width == 0:
                        continue
                    stop, mask, begin = stops[tile][k : k + 1].contiguous(), part.seen[b][k], tile * step
                    seen = None if mask is None else mask[None, begin : begin + stop.shape[1], :width]
                    rows = job.rows[b, part.rows.start + begin :][: stop.shape[1]] - job.first_row
                    query = queries.narrow(2, int(rows[0]), len(rows)) if straight[b] else queries.index_select(2, rows)
                    query = (query.to(job.dtype) * job.scaling).flatten(1, 2)  # [h, G * t, D]
                    scores = buffer[: query.shape[0] * query.shape[1] * width].view(*query.shape[:2], width)
                    torch.matmul(query, keys[:, :width].mT, out=scores)
                    sums = job.zeros(1, len(queries), width)
                    fused.add(scores[None], stop, seen, sums)
                    out[b, heads, :width] += sums[0]
    return out.to(job.dtype)


def _parts(job: TiledRows, step: int) -> Iterator[_Part]:
    """Yield all rows, in parts of whole tiles of `step` rows whose mask takes about a tile's bytes."""
    n = job.rows.shape[1]
    if job.visible is None:
        yield _Part(slice(0, n), torch.where(job.valid, job.rows + 1, 0)[:, None], [[None]] * job.batch)
        return
    size = max(1, job.tile_bytes // (job.batch * job.columns * step)) * step
    for start in range(0, n, size):
        rows = slice(start, min(start + size, n))
        seen = job.visible(job.rows[:, rows]).expand(job.batch, -1, -1, job.columns)
        count = seen.sum(-1)
        # The last column that a row sees; a mask may show columns after the row.
        last = job.columns - seen.flip(-1).view(torch.uint8).argmax(-1)
        stop = torch.where(job.valid[:, None, rows] & (count > 0), last, 0)
        whole = ((stop == 0) | (stop == count)).all(-1).tolist()
        heads = range(seen.shape[1])
        masks = [[None if whole[b][k] else seen[b, k] for k in heads] for b in range(job.batch)]
        yield _Part(rows, stop, masks)
