"""Digests of chunks: one vector for every chunk, scored against the queries of a step.

Notation: S stored heads, D digest dim, P chunks of the longest head; n rows of queries, r queries each.

A digest is the mean of a chunk's keys, as long as a key, or the bounds of its key channels, twice as long.

The softmax over a head's chunks does not change when the same vector is subtracted from all its digests. Digests of
16 bits or less are therefore stored as distances from the middle of each channel's range: channels far from zero, as
biases of key projections make them, lose no precision, and scores, which 16-bit products round, are small. The middles
are not needed again.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

DigestDtype = Literal["model", "bf16", "int8", "int4"]
Summary = Literal["mean", "bounds"]
_SCORES_AT_ONCE = 1 << 24  # relevance of a long later turn is computed in blocks of this many scores
_LEVELS = {"int8": 127, "int4": 7}  # from -127 to 127, from -7 to 7
_AT_ONCE = 1 << 19  # numbers of fewer bits that are widened at once: they should stay in a cache, in few calls


class Digests:
    """Digests [S, D, P] in the model's dtype, in bfloat16, or in int8 or int4 with one scale per head and channel.

    int4 stores two channels in a byte: channel i of the first half in the lower bits of row i, the channel half as many
    further in the upper bits.
    """

    def __init__(self, exact: Tensor, count: Tensor, kind: DigestDtype, dtype: torch.dtype) -> None:
        """Store the digests of every head's chunks; entries beyond its chunks become 0.

        exact: [S, D, P] float32 or float64. count: int64 [S], chunks of every head. dtype: the model's.
        """
        self.kind, self.length = kind, exact.shape[1]
        beyond = torch.arange(exact.shape[-1], device=exact.device) >= count.to(exact.device)[:, None]
        with torch.inference_mode(False), torch.no_grad():
            self.scale: Tensor | None = None  # [S, D] float32
            if kind == "model" and dtype.itemsize > 2:
                self.data = exact.masked_fill(beyond[:, None], 0).to(dtype)
                return
            high = exact.masked_fill(beyond[:, None], -torch.inf).amax(-1) if exact.shape[-1] else exact.sum(-1)
            low = exact.masked_fill(beyond[:, None], torch.inf).amin(-1) if exact.shape[-1] else exact.sum(-1)
            middle = torch.where(high >= low, (high + low) / 2, 0)  # a head without chunks has no range
            spread = (exact - middle[..., None]).masked_fill(beyond[:, None], 0)
            if kind in ("model", "bf16"):
                self.data = spread.to(torch.bfloat16 if kind == "bf16" else dtype)
                return
            levels = _LEVELS[kind]
            scale = torch.where(high > low, (high - low) / (2 * levels), 1)
            whole = (spread / scale[..., None]).round_().clamp_(-levels, levels).to(torch.int8)
            self.data = _packed(whole) if kind == "int4" else whole
            self.scale = scale.to(torch.float32)

    def __len__(self) -> int:
        return self.data.shape[0]

    @property
    def nbytes(self) -> int:
        """Storage bytes, scales included."""
        scale = 0 if self.scale is None else self.scale.untyped_storage().nbytes()
        return self.data.untyped_storage().nbytes() + scale

    def take(self, heads: Tensor, longest: int) -> Digests:
        """The digests of some heads [S'], cut to `longest` chunks; the others are not referenced."""
        made = object.__new__(Digests)
        made.kind, made.length = self.kind, self.length
        with torch.inference_mode(False):
            made.data = self.data.index_select(0, heads)[..., :longest].contiguous()
            made.scale = None if self.scale is None else self.scale.index_select(0, heads)
        return made

    def centre(self, exact: Tensor, heads: Tensor) -> Tensor:
        """The vector that was subtracted from the digests of heads [n], from exact digests of some of their chunks.

        exact: [n, D, p], of the first p chunks. Returns [n, D], 0 where nothing was subtracted; else off by the mean
        rounding error of p digests, which is why p should not be small.
        """
        if self.kind == "model" and self.data.dtype.itemsize > 2:
            return exact.new_zeros(exact.shape[:2])
        stored = self.restored(heads)[..., : exact.shape[-1]]
        return (exact - stored.to(exact.dtype)).mean(-1)

    def restored(self, heads: Tensor) -> Tensor:
        """Digests of heads [n] as numbers, without what was subtracted: [n, D, P], at least float32."""
        data = self.data.index_select(0, heads)
        data = _unpacked(data, self.length) if self.kind == "int4" else data
        wide = data.to(torch.float64 if data.dtype == torch.float64 else torch.float32)
        return wide if self.scale is None else wide * self.scale.index_select(0, heads)[..., None]

    @classmethod
    def of_spread(cls, spread: Tensor, kind: DigestDtype, dtype: torch.dtype) -> Digests:
        """Store digests [S, D, P] from which a vector per head has been subtracted; entries beyond a head's are 0.

        What was stored with a scale that still suffices stays bit for bit the same.
        """
        made = object.__new__(cls)
        made.kind, made.length, made.scale = kind, spread.shape[1], None
        with torch.inference_mode(False), torch.no_grad():
            if kind in ("model", "bf16"):
                made.data = spread.to(torch.bfloat16 if kind == "bf16" else dtype)
                return made
            levels = _LEVELS[kind]
            high = spread.abs().amax(-1) if spread.shape[-1] else spread.sum(-1)
            scale = torch.where(high > 0, high / levels, 1)
            whole = (spread / scale[..., None]).round_().clamp_(-levels, levels).to(torch.int8)
            made.data = _packed(whole) if kind == "int4" else whole
            made.scale = scale.to(torch.float32)
        return made

    def scores(self, query: Tensor, heads: Tensor | None = None) -> Tensor:
        """query [n, r, D] . digest of every chunk, up to a constant per query: [n, r, P], at least float32.

        heads: int64 [n], the head of every row; None = row i belongs to head i. Autocast has no effect here.
        """
        if torch.is_autocast_enabled(query.device.type):
            with torch.autocast(query.device.type, enabled=False):
                return self.scores(query, heads)
        data, scale = self.data, self.scale
        if heads is not None:
            data, scale = data.index_select(0, heads), None if scale is None else scale.index_select(0, heads)
        if self.kind == "model" and query.dtype == data.dtype:
            found = torch.bmm(query, data)
            return found if found.dtype == torch.float64 else found.float()
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        query = query.to(wide)
        if scale is not None:
            query = query * scale.to(wide)[:, None]
        columns = max(1, _AT_ONCE // max(1, data.shape[0] * data.shape[1]))
        found = query.new_empty(*query.shape[:2], data.shape[-1])
        for first in range(0, data.shape[-1], columns):
            part = slice(first, first + columns)
            block = _unpacked(data[..., part], self.length) if self.kind == "int4" else data[..., part]
            torch.bmm(query, block.to(wide), out=found[..., part])
        return found

    def relevance(
        self, query: Tensor, heads: Tensor, count: Tensor, summary: Summary, *, straight: bool, equal: bool
    ) -> Tensor:
        """Log of the largest softmax over the chunks of a row, of all its queries: [n, P], -inf beyond count [n].

        query: [n, r, D], scaled. heads: int64 [n]. straight: row i reads head i. equal: all rows have P chunks.
        """
        longest = self.data.shape[-1]
        beyond = None if equal else (torch.arange(longest, device=query.device) >= count[:, None])[:, None]
        best: Tensor | None = None
        for part in query.split(max(1, _SCORES_AT_ONCE // max(1, len(query) * longest)), dim=1):
            scores = self.scores(widened_query(part, summary), None if straight else heads)  # [n, block, P]
            if beyond is not None:
                scores = scores.masked_fill_(beyond, -torch.inf)
            top = scores.log_softmax(-1).amax(1)
            best = top if best is None else torch.maximum(best, top)
        if best is None or not query.shape[1]:
            raise ValueError("relevance needs at least one query")
        return best


class ChunkKernel(Protocol):
    """A faster form of two steps of a store, see `foveakv.kernels.cpu_chunks`. None: it does not serve this case."""

    def relevance(
        self, digests: Digests, query: Tensor, heads: Tensor, count: Tensor, summary: Summary
    ) -> Tensor | None:
        """See `Digests.relevance`."""

    def choose(self, relevance: Tensor, count: Tensor, share: Tensor, resident: Tensor, table: Tensor) -> int | None:
        """Choose chunks, in place in `resident` and `table`; return how many of them were resident."""


def _packed(whole: Tensor) -> Tensor:
    """Pack int8 [S, D, P] from -8 to 7 into uint8 [S, ceil(D / 2), P]."""
    half = (whole.shape[1] + 1) // 2
    nibbles = (whole + 8).to(torch.uint8)
    packed = nibbles[:, :half].clone()
    packed[:, : whole.shape[1] - half] |= nibbles[:, half:] << 4
    return packed


def _unpacked(packed: Tensor, length: int) -> Tensor:
    """Unpack uint8 [S, ceil(D / 2), P] into int8 [S, D, P], D = length."""
    both = torch.cat([packed & 15, packed >> 4], 1)[:, :length]
    return both.to(torch.int8) - 8


def summarised(tokens: Tensor, summary: Summary) -> Tensor:
    """Digests of chunks of keys [N, T, D]: their mean [N, D], or their maximum and minimum by channel [N, 2 D]."""
    if summary == "mean":
        return tokens.mean(1)
    low, high = tokens.aminmax(dim=1)
    return torch.cat([high, low], -1)


def widened_query(query: Tensor, summary: Summary) -> Tensor:
    """Queries [..., D] in the form that scores digests, [..., D] or [..., 2 D].

    With bounds this gives the largest q . k of any key within them (Quest, arXiv 2406.10774, Alg. 1): channels
    where q is positive meet their maximum, the others their minimum.
    """
    return query if summary == "mean" else torch.cat([query.clamp_min(0), query.clamp_max(0)], -1)
