"""Attention statistics of selected query rows, without a C x C tensor.

Shapes: B sequences, H KV heads, G query heads per KV head, Hq = H * G, C columns, D head dim, n query rows.
`query` [B, Hq, q, D] and `keys` [B, H, C, D] are the dense tensors of one layer's prefill, after RoPE; query head i
reads KV head i // G. `query` has the rows of the last q <= C columns. `rows` int64 [B, n] are the columns of the query
rows, `valid` bool [B, n] says which of them count; those before the last q columns never do. `visible(rows)` returns
bool [B, 1 or H, n, C], True where a row may attend to a column; None is plain causal attention (column j is visible to
row i iff j <= i). Rows that are not valid, or that see no column, are ignored; a row that sees columns in some heads
only counts, and gives nothing in the others.

Work is split into tiles of rows and heads whose probabilities take at most `tile_bytes`, over the columns that the rows
of the tile can see. Results are float32, or float64 for float64 inputs; lower precisions are converted tile by tile.
All functions raise `InputError` if the shapes of their inputs do not match.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from foveakv.core.fused_columns import Fused, WholeColumns, fused_column_sums
from foveakv.core.prompt import PromptMap
from foveakv.core.row_tiles import TiledRows, Visible
from foveakv.errors import InputError

P = ParamSpec("P")
R = TypeVar("R")
_MASKED_ROWS = 256


class HeadMeanStats(NamedTuple):
    """Statistics of A[i, j], the attention of row i to column j averaged over all query heads.

    sums, maxima, variance: [B, C] over the rows that count (variance with divisor n). counts: int64 [B], the number of
    these rows.
    """

    sums: Tensor
    maxima: Tensor
    variance: Tensor
    counts: Tensor


def _full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function without autograd and autocast."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        query = kwargs["query"] if "query" in kwargs else args[0]
        device = query.device.type if isinstance(query, Tensor) else "cpu"
        with torch.no_grad(), torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return wrapped


@_full_precision
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
    """Compute the attention probabilities of the rows: [B, H, G, n, C]; rows that do not count are 0.

    The result grows with n x C, unlike that of all other functions here; use it for few rows.
    """
    job = TiledRows.of(query, keys, rows, valid, scaling, visible, tile_bytes)
    out = job.zeros(job.batch, job.heads, job.group, rows.shape[1], job.columns)
    for tile in job.tiles():
        for b, h, probs in tile.parts():
            out[b, h, :, tile.rows, tile.columns] = probs
    return out


@_full_precision
def column_sums(
    query: Tensor,
    keys: Tensor,
    rows: Tensor,
    valid: Tensor | None,
    scaling: float,
    visible: Visible | None = None,
    *,
    fused: Fused | WholeColumns | None = None,
    tile_bytes: int | None = None,
) -> Tensor:
    """Compute the attention that each column receives, summed over the rows and the query group: [B, H, C].

    fused: the engine's fused sums, for float32; None = tensor operations.
    """
    job = TiledRows.of(query, keys, rows, valid, scaling, visible, tile_bytes)
    sums = _fused_sums(job, fused)
    return _column_sums(job)[0] if sums is None else sums


@_full_precision
def window_scores(
    query: Tensor,
    keys: Tensor,
    window: int,
    scaling: float,
    visible: Visible | None = None,
    real: Tensor | None = None,
    *,
    fused: Fused | WholeColumns | None = None,
    tile_bytes: int | None = None,
) -> Tensor:
    """Compute the mean attention from the last `window` real rows of each sequence, over rows and query group.

    This is the score s of HybridKV's static heads (arXiv 2604.05887, App. A) and of SnapKV (arXiv 2404.14469).

    Args:
        query, keys, scaling, visible, tile_bytes: see the module.
        window: number of rows, at least 1.
        real: bool [B, C], False for padding on either side; None = no padding.
        fused: as in `column_sums`.

    Returns:
        [B, H, C].
    """
    if real is None:
        real = torch.ones(keys.shape[0], keys.shape[2], dtype=torch.bool, device=query.device)
    rows, valid = last_rows(real, window)
    job = TiledRows.of(query, keys, rows, valid, scaling, visible, tile_bytes)
    sums = _fused_sums(job, fused)
    if sums is None:
        sums, counts = _column_sums(job)
    else:
        counts = _counted_rows(job)
    return sums / (counts.clamp_min(1) * job.group)[:, None, None]


@_full_precision
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
    """Compute the sum, maximum and variance over rows of the head-mean attention to each column.

    With the text rows of layer 0 these are a_j (HAE, arXiv 2602.02197, Eq. 1-2) and m_j (Eq. 3). The mean over heads
    and the variance over rows are not stated in the paper; we use them because the thresholds are meaningful for a mean
    only. A row that cannot see a column counts there as 0.
    """
    job = TiledRows.of(query, keys, rows, valid, scaling, visible, tile_bytes)
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
        # Merge the tile into the running mean and sum of squared deviations (Chan et al. 1983).
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


@_full_precision
def topk_attention(
    query: Tensor,
    keys: Tensor,
    rows: Tensor,
    valid: Tensor | None,
    scaling: float,
    visible: Visible | None,
    k: Tensor | Sequence[int] | int,
    *,
    fused: Fused | WholeColumns | None = None,
    tile_bytes: int | None = None,
) -> Tensor:
    """Compute the mean over rows of the sum of the k largest probabilities: [B, H], between 0 and 1 (HybridKV, Eq. 3).

    k: one number, or one for each sequence. fused: as in `column_sums`. The score of a KV head is the mean over its
    query heads (not stated in the paper). A sequence without rows that count scores 0.

    Raises:
        InputError: k is below 1, or the shapes do not match.
    """
    job = TiledRows.of(query, keys, rows, valid, scaling, visible, tile_bytes)
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
                if isinstance(fused, Fused) and job.dtype == torch.float32:
                    attention_sum[sequence, h] += fused.largest(probs[i].flatten(1, 2), per_sequence[sequence])
                else:
                    attention_sum[sequence, h] += _largest(probs[i], per_sequence[sequence]).sum((1, 2, 3))
    return attention_sum / (counts.clamp_min(1) * job.group)[:, None]


@_full_precision
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
    per: Literal["visible", "all"] = "visible",
    tile_bytes: int | None = None,
) -> Tensor:
    """Compute the share of probabilities <= `threshold` in sets of columns: [len(columns), B], 0 without any pair.

    columns: bool [B, C] each, for example (prompt.visual, prompt.text). The default threshold is HAE's (arXiv
    2602.02197). per: what the share is of. "all" is the paper's divisor (App. A.1, Eq. 7), all pairs of a row that
    counts and a column of the set; pairs that the mask hides are 0 and so count as small, which is our reading.
    "visible" (not in the paper) leaves these pairs out.
    """
    job = TiledRows.of(query, keys, rows, valid, scaling, visible, tile_bytes)
    large, seen = torch.zeros(2, job.batch, job.columns, dtype=torch.float64, device=keys.device)
    for tile in job.tiles():
        pairs = (tile.seen & tile.counted[:, None, :, None]).sum((1, 2))
        seen[:, tile.columns] += pairs * (job.heads // tile.seen.shape[1] * job.group)
        for b, _, probs in tile.parts():
            large[b, tile.columns] += (probs > threshold).sum((1, 2, 3))  # masked pairs are 0, never above it
    sets = torch.stack([c.to(torch.float64) for c in columns])
    rows_that_count = job.valid.sum(1) * (job.heads * job.group)
    total = (sets * seen).sum(-1) if per == "visible" else sets.sum(-1) * rows_that_count
    return torch.where(total > 0, 1 - (sets * large).sum(-1) / total.clamp_min(1), 0).to(job.dtype)


def last_rows(real: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Return the last `window` real columns of each sequence, ascending: rows int64 [B, n], valid bool [B, n].

    real: bool [B, C]; padding may be on either side.

    Raises:
        InputError: the window is below 1.
    """
    if window < 1:
        raise InputError(f"a window needs at least one row, got {window}")
    columns = torch.arange(real.shape[1], device=real.device)
    last = torch.where(real, columns, -1).topk(min(window, real.shape[1]), dim=1).values.flip(1)
    return last.clamp_min(0), last >= 0


def text_rows(
    prompt: PromptMap, after_first_visual: bool = True, max_rows: int | None = 64, start: int = 0
) -> tuple[Tensor, Tensor]:
    """Select the text rows used for scoring: rows int64 [B, n], ascending, valid bool [B, n].

    Args:
        prompt: the map of the prompt.
        after_first_visual: use only text that can see visual tokens; a sequence without such text uses all its text.
            Not stated in the papers; an early row sees few columns, which would inflate HybridKV's Eq. 3.
        max_rows: the most rows, of which a quarter are the last ones and the others evenly spaced; None = all.
        start: first column of the newest block; earlier text does not count.

    Raises:
        InputError: `max_rows` is below 1.
    """
    if max_rows is not None and max_rows < 1:
        raise InputError(f"max_rows must be at least 1 or None, got {max_rows}")
    text = prompt.text
    columns = torch.arange(prompt.columns, device=text.device)
    if start:
        text = text & (columns >= start)
    if after_first_visual:
        after = text & (columns > prompt.first_visual[:, None])
        text = torch.where(after.any(1, keepdim=True), after, text)
    picked = [_spread(row.nonzero().flatten(), max_rows) for row in text]
    n = max((len(p) for p in picked), default=0)
    rows = torch.zeros(prompt.batch, n, dtype=torch.int64, device=text.device)
    valid = torch.zeros(prompt.batch, n, dtype=torch.bool, device=text.device)
    for b, p in enumerate(picked):
        rows[b, : len(p)], valid[b, : len(p)] = p, True
    return rows, valid


def seeing_rows(rows: Tensor, valid: Tensor, columns: int, visible: Visible | None, first_row: int = 0) -> Tensor:
    """Count the rows that can see each column, in any head: int64 [B, C].

    rows, valid: int64 and bool [B, n], the rows and which of them count. columns: C. visible: see the module; masks of
    at most 256 rows are held at once. first_row: C - q; earlier rows do not count.
    """
    if first_row:
        valid = valid & (rows >= first_row)
        rows = rows.clamp_min(min(first_row, columns - 1))
    counts = torch.zeros(rows.shape[0], columns, dtype=torch.int64, device=rows.device)
    if visible is None:  # row i sees column j iff j <= i
        return counts.scatter_add_(1, rows, valid.long()).flip(1).cumsum(1).flip(1)
    for block, counted in zip(rows.split(_MASKED_ROWS, 1), valid.split(_MASKED_ROWS, 1), strict=True):
        counts += (visible(block).any(1) & counted[..., None]).sum(1)
    return counts


def _spread(columns: Tensor, limit: int | None) -> Tensor:
    if limit is None or len(columns) <= limit:
        return columns
    last = max(1, limit // 4)
    head, tail = columns[:-last], columns[-last:]
    spaced = torch.arange(limit - last, device=columns.device) * len(head) // max(1, limit - last)
    return torch.cat([head[spaced], tail])


def _largest(values: Tensor, k: int) -> Tensor:
    """Return the k largest values of the last dim, unordered. May reorder `values` in place."""
    if k >= values.shape[-1]:
        return values
    if values.device.type == "cpu":
        values.numpy().partition(-k, axis=-1)  # in place, much faster than topk
        return values[..., -k:]
    return values.topk(k, sorted=False).values


def _counted_rows(job: TiledRows) -> Tensor:
    """Count the rows of each sequence that are valid and see a column: int64 [B]."""
    if job.visible is None:
        return job.valid.sum(1)
    counts = torch.zeros(job.batch, dtype=torch.int64, device=job.keys.device)
    for rows, valid in zip(job.rows.split(_MASKED_ROWS, 1), job.valid.split(_MASKED_ROWS, 1), strict=True):
        counts += (valid & job.visible(rows).any(-1).any(1)).sum(1)
    return counts


def _fused_sums(job: TiledRows, fused: Fused | WholeColumns | None) -> Tensor | None:
    """Compute `_column_sums` with the engine's sums; None if there are none for this dtype or mask."""
    if job.dtype != torch.float32 or not job.query.shape[2]:
        return None
    if isinstance(fused, WholeColumns):
        return None if job.masks_heads else fused.column_sums(job)
    return fused_column_sums(job, fused) if isinstance(fused, Fused) else None


def _column_sums(job: TiledRows) -> tuple[Tensor, Tensor]:
    out = job.zeros(job.batch, job.heads, job.columns)
    counts = torch.zeros(job.batch, dtype=torch.int64, device=out.device)
    for tile in job.tiles():
        counts += tile.counted.sum(1)
        for b, h, probs in tile.parts():
            out[b, h, tile.columns] += probs.sum((2, 3))
    return out, counts
