"""Attention statistics of a few query rows, without a C x C tensor.

Shapes: B sequences, H KV heads, G query heads per KV head, Hq = H * G, C columns, D head dim, n query rows.
`query` [B, Hq, C, D] and `keys` [B, H, C, D] are the dense tensors of one layer's prefill, after RoPE; query head i
reads KV head i // G. `rows` [B, n] int64 names the query rows by column, `valid` [B, n] bool says which of them count.
`visible(rows)` returns bool [B, 1, n, C], True where a row may attend to a column; None is plain causal attention
(column j is visible to row i iff j <= i). A row that is not valid, or that sees nothing, counts as if it were absent.

The work goes in tiles of rows and heads whose probabilities stay under `tile_bytes`, over the columns that the rows of
the tile can see. Results are float32, or float64 for float64 inputs; lower precisions are widened tile by tile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from foveakv.core.prompt import PromptMap
from foveakv.errors import InputError

Visible = Callable[[Tensor], Tensor]

_CPU_TILE = 8 * 2**20  # about a core's share of the last-level cache: softmax then runs on cached data
_DEVICE_TILE = 64 * 2**20

P = ParamSpec("P")
R = TypeVar("R")


class HeadMeanStats(NamedTuple):
    """Of A[i, j], the attention of row i to column j averaged over all query heads.

    sums, maxima, variance: [B, C] over the rows that count (variance with divisor n). counts: [B] int64, those rows.
    """

    sums: Tensor
    maxima: Tensor
    variance: Tensor
    counts: Tensor


def _exact(function: Callable[P, R]) -> Callable[P, R]:
    """Run without autograd and without autocast."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        query = kwargs["query"] if "query" in kwargs else args[0]
        device = query.device.type if isinstance(query, Tensor) else "cpu"
        with torch.no_grad(), torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return wrapped


@_exact
def attention_rows(
    query: Tensor,
    keys: Tensor,
    rows: Tensor,
    scaling: float,
    visible: Visible | None = None,
    valid: Tensor | None = None,
    *,
    tile_bytes: int | None = None,
) -> Tensor:
    """Attention probabilities of the rows themselves: [B, H, G, n, C]; rows that do not count are 0.

    The only function here whose result grows with n x C: for a handful of rows.
    """
    job = _Job.of(query, keys, rows, valid, scaling, visible, tile_bytes)
    out = job.zeros(job.batch, job.heads, job.group, rows.shape[1], job.columns)
    for tile in job.tiles():
        for b, h, probs in tile.parts():
            out[b, h, :, tile.rows, tile.columns] = probs
    return out


@_exact
def column_sums(
    query: Tensor,
    keys: Tensor,
    rows: Tensor,
    valid: Tensor | None,
    scaling: float,
    visible: Visible | None = None,
    *,
    tile_bytes: int | None = None,
) -> Tensor:
    """Attention that each column receives, summed over the rows and the query group: [B, H, C]."""
    return _column_sums(_Job.of(query, keys, rows, valid, scaling, visible, tile_bytes))[0]


@_exact
def window_scores(
    query: Tensor,
    keys: Tensor,
    window: int,
    scaling: float,
    visible: Visible | None = None,
    real: Tensor | None = None,
    *,
    tile_bytes: int | None = None,
) -> Tensor:
    """Mean attention from the last `window` real rows of each sequence, over rows and query group: [B, H, C].

    real: [B, C] bool, False for padding on either side; None = no padding. This is the score s of HybridKV's static
    heads (arXiv 2604.05887, App. A) and of SnapKV (arXiv 2404.14469).
    """
    if real is None:
        real = torch.ones(query.shape[0], query.shape[2], dtype=torch.bool, device=query.device)
    rows, valid = last_rows(real, window)
    job = _Job.of(query, keys, rows, valid, scaling, visible, tile_bytes)
    sums, counts = _column_sums(job)
    return sums / (counts.clamp_min(1) * job.group)[:, None, None]


@_exact
def head_mean_stats(
    query: Tensor,
    keys: Tensor,
    rows: Tensor,
    valid: Tensor | None,
    scaling: float,
    visible: Visible | None = None,
    *,
    tile_bytes: int | None = None,
) -> HeadMeanStats:
    """Sum, maximum and variance over rows of the head-mean attention to each column.

    With the text rows of layer 0 these are a_j (HAE, arXiv 2602.02197, Eq. 1-2) and m_j (Eq. 3). The mean over heads
    and the variance over rows are not stated in the paper; we take them because the thresholds only make sense for a
    mean. A row that cannot see a column counts there with 0.
    """
    job = _Job.of(query, keys, rows, valid, scaling, visible, tile_bytes)
    counts = torch.zeros(job.batch, dtype=torch.float64, device=keys.device)
    mean, squares = torch.zeros(2, job.batch, job.columns, dtype=torch.float64, device=keys.device)
    maxima = job.zeros(job.batch, job.columns)
    for tile in job.tiles():
        width = tile.columns.stop - tile.columns.start
        share = job.zeros(job.batch, tile.rows.stop - tile.rows.start, width)
        for b, _, probs in tile.parts():
            share[b] += probs.sum((1, 2))
        share /= job.heads * job.group
        maxima[:, tile.columns] = torch.maximum(maxima[:, tile.columns], share.amax(1))
        # merge the tile into the running mean and sum of squared deviations (Chan et al. 1983)
        fresh = tile.counted.sum(1).to(torch.float64)
        total = (counts + fresh).clamp_min(1)
        tile_mean, tile_squares = torch.zeros_like(mean), torch.zeros_like(squares)
        part = share.sum(1, dtype=torch.float64) / fresh.clamp_min(1)[:, None]
        tile_mean[:, tile.columns] = part
        deviation = (share - part[:, None].to(share.dtype)) * tile.counted[..., None]
        tile_squares[:, tile.columns] = deviation.square_().sum(1, dtype=torch.float64)
        delta = tile_mean - mean
        mean += delta * (fresh / total)[:, None]
        squares += tile_squares + delta.square() * (counts * fresh / total)[:, None]
        counts += fresh
    sums = mean * counts[:, None]
    variance = squares / counts.clamp_min(1)[:, None]
    return HeadMeanStats(sums.to(job.dtype), maxima, variance.to(job.dtype), counts.to(torch.int64))


@_exact
def topk_attention(
    query: Tensor,
    keys: Tensor,
    rows: Tensor,
    valid: Tensor | None,
    scaling: float,
    visible: Visible | None,
    k: Tensor | Sequence[int] | int,
    *,
    tile_bytes: int | None = None,
) -> Tensor:
    """Mean over rows of the k largest probabilities' sum: [B, H], between 0 and 1 (HybridKV, Eq. 3).

    k: one number, or one for each sequence. A KV head's score is the mean over its query heads (not stated in the
    paper; ours). A sequence without rows that count scores 0.
    """
    job = _Job.of(query, keys, rows, valid, scaling, visible, tile_bytes)
    if isinstance(k, Tensor):
        k = k.tolist()
    per_sequence = [k] * job.batch if isinstance(k, int) else [int(n) for n in k]
    if len(per_sequence) != job.batch or min(per_sequence, default=1) < 1:
        raise InputError(f"topk_attention needs k >= 1 for each of {job.batch} sequences, got {per_sequence}")
    attention_sum = job.zeros(job.batch, job.heads)
    counts = torch.zeros(job.batch, dtype=torch.int64, device=keys.device)
    for tile in job.tiles():
        counts += tile.counted.sum(1)
        for b, h, probs in tile.parts():
            for i, sequence in enumerate(range(b.start, b.stop)):
                attention_sum[sequence, h] += _largest(probs[i], per_sequence[sequence]).sum((1, 2, 3))
    return attention_sum / (counts.clamp_min(1) * job.group)[:, None]


@_exact
def sparsity(
    query: Tensor,
    keys: Tensor,
    rows: Tensor,
    valid: Tensor | None,
    scaling: float,
    visible: Visible | None,
    columns: Sequence[Tensor],
    *,
    threshold: float = 1e-4,
    tile_bytes: int | None = None,
) -> Tensor:
    """Share of probabilities <= `threshold` within sets of columns: [len(columns), B], 0 where a set is never seen.

    columns: bool [B, C] each, for example (prompt.visual, prompt.text). The threshold is HAE's. Not stated in the
    paper; we count only pairs that the mask lets see each other, since hidden pairs are 0 by construction.
    """
    job = _Job.of(query, keys, rows, valid, scaling, visible, tile_bytes)
    small, seen = torch.zeros(2, job.batch, job.columns, dtype=torch.float64, device=keys.device)
    for tile in job.tiles():
        pairs = tile.seen & tile.counted[..., None]
        total = pairs.sum(1)
        seen[:, tile.columns] += total * (job.heads * job.group)
        hidden = pairs.shape[1] - total
        for b, _, probs in tile.parts():
            low = (probs <= threshold).sum((1, 2, 3))  # hidden pairs and rows that do not count are 0: take them off
            small[b, tile.columns] += low - hidden[b] * (probs.shape[1] * job.group)
    sets = torch.stack([c.to(torch.float64) for c in columns])
    return ((sets * small).sum(-1) / (sets * seen).sum(-1).clamp_min(1)).to(job.dtype)


def last_rows(real: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """The last `window` real columns of each sequence, ascending: rows [B, n] int64, valid [B, n] bool.

    real: [B, C] bool; padding may stand on either side.
    """
    if window < 1:
        raise InputError(f"a window needs at least one row, got {window}")
    columns = torch.arange(real.shape[1], device=real.device)
    last = torch.where(real, columns, -1).topk(min(window, real.shape[1]), dim=1).values.flip(1)
    return last.clamp_min(0), last >= 0


def text_rows(prompt: PromptMap, after_first_visual: bool = True, max_rows: int | None = 64) -> tuple[Tensor, Tensor]:
    """The text rows to score with: rows [B, n] int64 ascending, valid [B, n] bool.

    after_first_visual: only text that can see visual tokens; a sequence that has none of it uses all its text. Not
    stated in the papers; an early row sees few columns, which would inflate HybridKV's Eq. 3.
    max_rows: take at most so many, of which a quarter are the last ones and the others evenly spaced; None = all.
    """
    if max_rows is not None and max_rows < 1:
        raise InputError(f"max_rows must be at least 1 or None, got {max_rows}")
    text = prompt.text
    if after_first_visual:
        columns = torch.arange(prompt.columns, device=text.device)
        after = text & (columns > prompt.first_visual[:, None])
        text = torch.where(after.any(1, keepdim=True), after, text)
    picked = [_spread(row.nonzero().flatten(), max_rows) for row in text]
    n = max((len(p) for p in picked), default=0)
    rows = torch.zeros(prompt.batch, n, dtype=torch.int64, device=text.device)
    valid = torch.zeros(prompt.batch, n, dtype=torch.bool, device=text.device)
    for b, p in enumerate(picked):
        rows[b, : len(p)], valid[b, : len(p)] = p, True
    return rows, valid


def _spread(columns: Tensor, limit: int | None) -> Tensor:
    if limit is None or len(columns) <= limit:
        return columns
    last = max(1, limit // 4)
    head, tail = columns[:-last], columns[-last:]
    spaced = torch.arange(limit - last, device=columns.device) * len(head) // max(1, limit - last)
    return torch.cat([head[spaced], tail])


def _largest(values: Tensor, k: int) -> Tensor:
    """The k largest of the last dim, in no order. May reorder `values`."""
    if k >= values.shape[-1]:
        return values
    if values.device.type == "cpu":
        values.numpy().partition(-k, axis=-1)  # in place, five times as fast as topk
        return values[..., -k:]
    return values.topk(k, sorted=False).values


def _column_sums(job: _Job) -> tuple[Tensor, Tensor]:
    out = job.zeros(job.batch, job.heads, job.columns)
    counts = torch.zeros(job.batch, dtype=torch.int64, device=out.device)
    for tile in job.tiles():
        counts += tile.counted.sum(1)
        for b, h, probs in tile.parts():
            out[b, h, tile.columns] += probs.sum((2, 3))
    return out, counts


@dataclass
class _Job:
    """One pass over the rows: the inputs, and how they are cut."""

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
    ) -> _Job:
        batch, heads = keys.shape[:2]
        if query.shape[0] != batch or query.shape[2:] != keys.shape[2:] or query.shape[1] % heads:
            raise InputError(f"query {tuple(query.shape)} and keys {tuple(keys.shape)} do not belong to one layer")
        if rows.dim() != 2 or rows.shape[0] != batch or (valid is not None and valid.shape != rows.shape):
            shapes = tuple(rows.shape), None if valid is None else tuple(valid.shape)
            raise InputError(f"rows and valid must be [{batch}, n], got {shapes[0]} and {shapes[1]}")
        if valid is None:
            valid = torch.ones_like(rows, dtype=torch.bool)
        if tile_bytes is None:
            tile_bytes = _CPU_TILE if keys.device.type == "cpu" else _DEVICE_TILE
        dtype = torch.float64 if keys.dtype == torch.float64 else torch.float32
        return cls(query, keys, rows, valid, scaling, visible, tile_bytes, dtype)

    @property
    def batch(self) -> int:
        return self.keys.shape[0]

    @property
    def heads(self) -> int:
        return self.keys.shape[1]

    @property
    def columns(self) -> int:
        return self.keys.shape[2]

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.heads

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.keys.device)

    def tiles(self) -> Iterator[_Tile]:
        """Tiles of rows. A tile is as many rows as one KV head affords: keys are read once per tile and head."""
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

    def _tile(self, span: slice) -> _Tile | None:
        """The tile without its buffer; None when no row of it counts. Rows that do not count copy another row."""
        rows, valid = self.rows[:, span], self.valid[:, span]
        if not bool(valid.any()):
            return None
        last = rows.masked_fill(~valid, -1).amax()
        rows = torch.where(valid, rows, last)
        if self.visible is None:
            stop = int(last) + 1
            seen = torch.arange(stop, device=rows.device) <= rows[..., None]
            columns = slice(0, stop)
            counted = valid
        else:
            seen = self.visible(rows)[:, 0].expand(self.batch, rows.shape[1], self.columns)
            counted = valid & seen.any(-1)
            reached = (seen & counted[..., None]).flatten(0, 1).any(0).nonzero()
            if not len(reached):
                return None
            columns = slice(int(reached[0]), int(reached[-1]) + 1)
            seen = seen[..., columns]
        # outside this range every row that counts sees every column
        hidden = (~seen & counted[..., None]).flatten(0, 1).any(0).nonzero()
        masked = slice(int(hidden[0]), int(hidden[-1]) + 1) if len(hidden) else None
        return _Tile(self, span, columns, rows, counted, seen, masked, bool(counted.all()))


@dataclass
class _Tile:
    """Some rows over the columns that they can see."""

    job: _Job
    rows: slice
    columns: slice
    index: Tensor  # [B, t] the rows' columns
    counted: Tensor  # [B, t] bool
    seen: Tensor  # [B, t, columns] bool
    masked: slice | None  # within `columns`: where anything is hidden
    all_counted: bool
    buffer: Tensor | None = None

    def parts(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """(sequences, KV heads, probabilities [b, h, G, t, columns]); the probabilities live until the next part."""
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
                yield *at, self._probabilities(query[at], job.keys[(*at, self.columns)], at[0])

    def _queries(self) -> Tensor:
        """[B, H, G * t, D], scaled, in the dtype of the result; rows that do not count are 0."""
        job = self.job
        batch, count = self.index.shape
        dim = job.query.shape[-1]
        index = self.index[:, None, :, None].expand(batch, job.query.shape[1], count, dim)
        query = job.query.gather(2, index).to(job.dtype) * job.scaling
        if not self.all_counted:
            query = query.masked_fill(~self.counted[:, None, :, None], 0)
        return query.view(batch, job.heads, job.group * count, dim)

    def _probabilities(self, query: Tensor, keys: Tensor, sequences: slice) -> Tensor:
        job = self.job
        b, h, count, _ = query.shape
        width = keys.shape[2]
        if self.buffer is None:
            raise RuntimeError("a tile needs its buffer before its parts are read")
        logits = self.buffer[: b * h * count * width].view(b, h, count, width)
        if b == 1:
            _products(query[0], keys[0], logits[0], job.tile_bytes)
        else:
            _products(query, keys, logits, job.tile_bytes)
        logits = logits.view(b, h, job.group, self.index.shape[1], width)
        if self.masked is not None:
            hidden = ~self.seen[sequences, None, None, :, self.masked]
            logits[..., self.masked].masked_fill_(hidden, torch.finfo(job.dtype).min)
        probs = torch.softmax(logits, -1, out=logits) if logits.device.type == "cpu" else torch.softmax(logits, -1)
        if not self.all_counted:
            probs.mul_(self.counted[sequences, None, None, :, None])
        return probs


def _products(query: Tensor, keys: Tensor, out: Tensor, limit: int) -> None:
    """out[...] = query @ keys^T in the dtype of `out`; keys of another dtype are widened a few columns at a time."""
    if keys.dtype == out.dtype:
        torch.matmul(query, keys.mT, out=out)
        return
    columns = keys.shape[-2]
    step = max(1, limit * columns // max(1, keys.numel() * out.dtype.itemsize))
    for c in range(0, columns, step):
        out[..., c : c + step] = query @ keys[..., c : c + step, :].to(out.dtype).mT
