"""Attention probabilities of chosen query rows, computed in tiles of bounded size.

Shapes and arguments are those of `foveakv.core.attention_stats`, which sums over the tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from foveakv.errors import InputError

Visible = Callable[[Tensor], Tensor]
"""Returns the attention mask of some query rows: columns int64 [B, n] -> bool [B, 1 or H, n, C]."""

_CPU_TILE = 8 * 2**20  # about one core's share of the last-level cache, so that softmax runs on cached data
_DEVICE_TILE = 64 * 2**20


@dataclass
class TiledRows:
    """The inputs of one pass over the rows, and how they are tiled."""

    query: Tensor
    keys: Tensor
    rows: Tensor
    valid: Tensor
    scaling: float
    visible: Visible | None
    tile_bytes: int
    dtype: torch.dtype

    @classmethod
    def of(
        cls,
        query: Tensor,
        keys: Tensor,
        rows: Tensor,
        valid: Tensor | None,
        scaling: float,
        visible: Visible | None,
        tile_bytes: int | None,
    ) -> TiledRows:
        """Check the shapes and choose the size of tiles and the dtype of the results.

        valid: None = all rows count. Rows before the first query row never do. tile_bytes: None = a default for the
        device.

        Raises:
            InputError: the shapes do not match.
        """
        batch, heads = keys.shape[:2]
        first = keys.shape[2] - query.shape[2]
        if query.shape[0] != batch or query.shape[3:] != keys.shape[3:] or query.shape[1] % heads or first < 0:
            raise InputError(f"query {tuple(query.shape)} and keys {tuple(keys.shape)} do not belong to one layer")
        if rows.dim() != 2 or rows.shape[0] != batch or (valid is not None and valid.shape != rows.shape):
            shapes = tuple(rows.shape), None if valid is None else tuple(valid.shape)
            raise InputError(f"rows and valid must be [{batch}, n], got {shapes[0]} and {shapes[1]}")
        if valid is None:
            valid = torch.ones_like(rows, dtype=torch.bool)
        if first:
            valid = valid & (rows >= first)
            rows = rows.clamp_min(min(first, keys.shape[2] - 1))
        if tile_bytes is None:
            tile_bytes = _CPU_TILE if keys.device.type == "cpu" else _DEVICE_TILE
        dtype = torch.float64 if keys.dtype == torch.float64 else torch.float32
        return cls(query, keys, rows, valid, scaling, visible, tile_bytes, dtype)

    @property
    def batch(self) -> int:
        """Number of sequences, B."""
        return self.keys.shape[0]

    @property
    def heads(self) -> int:
        """Number of KV heads, H."""
        return self.keys.shape[1]

    @property
    def columns(self) -> int:
        """Number of columns, C."""
        return self.keys.shape[2]

    @property
    def group(self) -> int:
        """Number of query heads per KV head, G."""
        return self.query.shape[1] // self.heads

    @property
    def first_row(self) -> int:
        """Column of the first query row, C - q."""
        return self.keys.shape[2] - self.query.shape[2]

    @property
    def masks_heads(self) -> bool:
        """Whether heads have masks of their own."""
        return self.visible is not None and bool(self.rows.numel()) and self.visible(self.rows[:, -1:]).shape[1] > 1

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros of this shape, in the dtype of the results and on the device of the keys."""
        return torch.zeros(shape, dtype=self.dtype, device=self.keys.device)

    def tiles(self) -> Iterator[Tile]:
        """Yield tiles of rows, sized for one KV head so that keys are read once per tile and head."""
        n = self.rows.shape[1]
        row_bytes = self.columns * self.dtype.itemsize
        step = max(1, min(n, self.tile_bytes // max(1, row_bytes * max(self.group, self.batch))))
        buffer: Tensor | None = None
        for start in range(0, n, step):
            tile = self._tile(slice(start, min(start + step, n)))
            if tile is None:
                continue
            if buffer is None:
                per_head = step * row_bytes * self.group
                most = self.batch * self.heads * per_head
                size = min(most, max(self.tile_bytes, per_head)) // self.dtype.itemsize
                buffer = torch.empty(size, dtype=self.dtype, device=self.keys.device)
            tile.buffer = buffer
            yield tile

    def _tile(self, span: slice) -> Tile | None:
        """Make a tile without its buffer; None if no row of it counts. Rows that do not count copy another row."""
        rows, valid = self.rows[:, span], self.valid[:, span]
        if not bool(valid.any()):
            return None
        last = rows.masked_fill(~valid, -1).amax()
        rows = torch.where(valid, rows, last)
        if self.visible is None:
            stop = int(last) + 1
            seen = (torch.arange(stop, device=rows.device) <= rows[..., None])[:, None]
            columns = slice(0, stop)
            counted, blind = valid, None
        else:
            seen = self.visible(rows).expand(self.batch, -1, rows.shape[1], self.columns)
            sees = seen.any(-1)  # [B, 1 or H, t]
            counted = valid & sees.any(1)
            blind = counted[:, None] & ~sees if sees.shape[1] > 1 else None
            blind = blind if blind is not None and bool(blind.any()) else None
            reached = (seen & counted[:, None, :, None]).flatten(0, 2).any(0).nonzero()
            if not len(reached):
                return None
            columns = slice(int(reached[0]), int(reached[-1]) + 1)
            seen = seen[..., columns]
        # Outside this range every row that counts sees every column.
        unseen = (~seen & counted[:, None, :, None]).flatten(0, 2).any(0).nonzero()
        masked = slice(int(unseen[0]), int(unseen[-1]) + 1) if len(unseen) else None
        return Tile(self, span, columns, rows, counted, seen, masked, bool(counted.all()), blind)


@dataclass
class Tile:
    """A tile of rows over the columns that they can see."""

    job: TiledRows
    rows: slice
    columns: slice
    index: Tensor  # [B, t] the rows' columns
    counted: Tensor  # [B, t] bool
    seen: Tensor  # [B, 1 or H, t, columns] bool
    masked: slice | None  # the part of `columns` where anything is masked
    all_counted: bool
    blind: Tensor | None = None  # [B, H, t] bool, rows that count and see nothing in this head; None = no such row
    buffer: Tensor | None = None

    def parts(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield sequences, KV heads and probabilities [b, h, G, t, columns], which the next part overwrites."""
        job = self.job
        count, width = self.index.shape[1], self.columns.stop - self.columns.start
        query = self._queries()
        head_bytes = job.group * count * width * job.dtype.itemsize
        keys_bytes = job.keys[:, :, self.columns].numel() * job.dtype.itemsize
        together = max(head_bytes * job.batch * job.heads, keys_bytes) <= job.tile_bytes
        sequences, heads = job.batch, job.heads
        if not together:
            sequences, heads = 1, max(1, min(job.heads, job.tile_bytes // head_bytes))
        for b in range(0, job.batch, sequences):
            for h in range(0, job.heads, heads):
                at = slice(b, b + sequences), slice(h, min(h + heads, job.heads))
                yield *at, self._probabilities(query[at], job.keys[(*at, self.columns)], at)

    def _queries(self) -> Tensor:
        """Return the scaled queries [B, H, G * t, D] in the dtype of the result; rows that do not count are 0."""
        job = self.job
        batch, count = self.index.shape
        dim = job.query.shape[-1]
        index = (self.index - job.first_row)[:, None, :, None].expand(batch, job.query.shape[1], count, dim)
        query = job.query.gather(2, index).to(job.dtype) * job.scaling
        if not self.all_counted:
            query = query.masked_fill(~self.counted[:, None, :, None], 0)
        return query.view(batch, job.heads, job.group * count, dim)

    def _probabilities(self, query: Tensor, keys: Tensor, at: tuple[slice, slice]) -> Tensor:
        job, (sequences, heads) = self.job, at
        b, h, count, _ = query.shape
        width = keys.shape[2]
        if self.buffer is None:
            raise RuntimeError("the tile has no buffer; iterate over `TiledRows.tiles`")
        logits = self.buffer[: b * h * count * width].view(b, h, count, width)
        if b == 1:
            _products(query[0], keys[0], logits[0], job.tile_bytes)
        else:
            _products(query, keys, logits, job.tile_bytes)
        logits = logits.view(b, h, job.group, self.index.shape[1], width)
        if self.masked is not None:
            seen = self.seen[sequences] if self.seen.shape[1] == 1 else self.seen[at]
            unseen = ~seen[:, :, None, :, self.masked]
            logits[..., self.masked].masked_fill_(unseen, torch.finfo(job.dtype).min)
        probs = torch.softmax(logits, -1, out=logits) if logits.device.type == "cpu" else torch.softmax(logits, -1)
        if not self.all_counted:
            probs.mul_(self.counted[sequences, None, None, :, None])
        if self.blind is not None:
            probs.masked_fill_(self.blind[sequences, heads, None, :, None], 0)
        return probs


def _products(query: Tensor, keys: Tensor, out: Tensor, limit: int) -> None:
    """Compute out[...] = query @ keys^T in the dtype of `out`, converting keys of another dtype blockwise."""
    if keys.dtype == out.dtype:
        torch.matmul(query, keys.mT, out=out)
        return
    columns = keys.shape[-2]
    step = max(1, limit * columns // max(1, keys.numel() * out.dtype.itemsize))
    for c in range(0, columns, step):
        out[..., c : c + step] = query @ keys[..., c : c + step, :].to(out.dtype).mT
