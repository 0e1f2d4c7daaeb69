"""Prompt KV that lives outside of a layer's segments, in chunks that are chosen by relevance at every step.

Notation: S stored heads (sequence, KV head pairs whose complete chunks were moved here), T tokens per chunk, N chunks
of all stored heads, P chunks of the longest one; n rows, i.e. runs of the segments that choose among their chunks; K
chosen chunks of the row that has most.

A row's chosen chunks are copied into slots of the segments (`fetch`), or attention reads them in place (`pick`).
Chunks never change; further blocks add some. Beams and other reorderings only change which stored head a row reads.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foveakv.core.columns import real_first
from foveakv.memory.chunk_files import ChunkWriter, Place, Staging
from foveakv.memory.digests import ChunkKernel, DigestDtype, Digests, Summary, summarised
from foveakv.memory.pages import Pages
from foveakv.memory.segments import Segments

_ROWS = ("_first", "_count", "_sequence", "_digest", "_run", "_offset", "_slots", "_table", "_resident")  # all [n, ...]


class ChunkStore:
    """One layer's chunks with their digests, and a table of what was chosen.

    Created during prefill, then `reserve` once when the budgets are known, `fetch` before every decode attention; or,
    after `reserve(in_place=True)`, `pick` and `pages`.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        real: Tensor,
        positions: Tensor,
        heads: Tensor,
        *,
        chunk: int,
        place: Place = "host",
        directory: str | Path | None = None,
        digest_dtype: DigestDtype = "model",
        summary: Summary = "mean",
    ) -> None:
        """Copy the complete chunks of some heads.

        Args:
            keys: [B, H, C, D], after RoPE. values: [B, H, C, Dv]. Both are stored in the wider of their dtypes.
            real: bool [B, C]. A chunk is T real tokens in column order; what is left over stays with the caller.
            positions: LongTensor [B, C].
            heads: bool [B, H], the heads to store.
            place: where keys and values are stored: "host" (pinned when the keys are on CUDA), "device", or "disk" (a
                file in `directory` without a name, which the system removes with the process).
            digest_dtype: how digests are stored, see `foveakv.memory.digests`.
            summary: what a digest is, the "mean" of a chunk's keys or the "bounds" of their channels.
        StoreError: the file cannot be written.
        """
        self.chunk = chunk
        self.place = place
        self.summary: Summary = summary
        self.device = keys.device
        self.in_place = False
        self.reserved = False  # whether it is decided how many chunks each head reads
        self.room: Tensor | None = None  # [n] chunks that fit into the memory of every row, where it may grow in place
        self.batch, self.kv_heads = keys.shape[:2]
        sequence, head = heads.cpu().nonzero(as_tuple=True)
        count = (real.sum(-1) // chunk).cpu()[sequence]  # [S]
        order = real_first(real.to(self.device))
        stored = list(zip(sequence.tolist(), head.tolist(), count.tolist(), strict=True))
        exact = self._write_chunks(keys, values, order, stored, directory)
        self._digests = Digests(exact, count, digest_dtype, self._keys.dtype)
        with torch.inference_mode(False):  # later steps may run outside of inference_mode and write here
            longest = int(count.max()) if len(count) else 0
            columns = order[:, : longest * chunk]
            places = positions.to(self.device).gather(1, columns).to(torch.int32)
            self._positions = places.view(len(places), longest, chunk)  # [B, P, T]
            # Per row [n]; at first one row for every stored head.
            self._first = (count.cumsum(0) - count).to(self.device)  # its first chunk among all
            self._count = count.to(self.device)  # its chunks
            self._sequence = sequence.to(self.device)  # row of self._positions
            self._digest = torch.arange(len(count), device=self.device)  # row of self.digests
            self._run = (sequence * self.kv_heads + head).to(self.device)
            self._offset = torch.zeros_like(self._run)  # first retrieval slot of the run
            self._slots = torch.zeros_like(self._run)  # chunks of the run that are chosen
            self._table = self._run.new_empty(len(count), 0)  # [n, K] the chosen chunks; the one in a slot, with slots
            self._resident = torch.zeros(len(count), longest, dtype=torch.bool, device=self.device)  # [n, P] chosen?
        self._equal = False  # all rows choose K of P chunks: no masks needed
        self._straight = True  # row i reads digest i: no gather needed
        self._asked = 0  # slots that one fetch requests
        self._outside = int(count.sum()) * chunk
        self._staging: Staging | None = None

    def _write_chunks(
        self,
        keys: Tensor,
        values: Tensor,
        order: Tensor,
        stored: list[tuple[int, int, int]],
        directory: str | Path | None,
    ) -> Tensor:
        """Fills self._keys [N, T * D] and self._values [N, T * Dv]; returns exact digests [S, D or 2 D, P]."""
        chunk, total = self.chunk, sum(count for _, _, count in stored)
        longest = max((count for _, _, count in stored), default=0)
        exact = torch.float64 if keys.dtype == torch.float64 else torch.float32
        length = keys.shape[-1] * (1 if self.summary == "mean" else 2)
        digests = keys.new_zeros(len(stored), length, longest, dtype=exact)
        parts = []
        for source in (keys, values):
            width = source.shape[-1]
            like = source.new_empty(0, dtype=torch.promote_types(keys.dtype, values.dtype))
            writer = ChunkWriter(self.place, total, chunk * width, like, directory)
            for row, (b, h, count) in enumerate(stored):
                tokens = source[b, h].index_select(0, order[b, : count * chunk])  # a copy, so it is contiguous
                writer.write(tokens.view(count, chunk * width).to(like.dtype))
                if source is keys:
                    chunks = tokens.view(count, chunk, width).to(exact)
                    digests[row, :, :count] = summarised(chunks, self.summary).mT
            parts.append(writer.finish())
        self._keys, self._values = parts
        return digests

    # ---- accounting

    @property
    def digests(self) -> Tensor:
        """[S, D or 2 D, P] as they are stored."""
        return self._digests.data

    @property
    def digest_nbytes(self) -> int:
        """Storage bytes of the digests and their scales."""
        return self._digests.nbytes

    @property
    def _store_nbytes(self) -> int:
        return self._keys.untyped_storage().nbytes() + self._values.untyped_storage().nbytes()

    @property
    def _loaded_nbytes(self) -> int:
        """Bytes of the chosen chunks where they are read in place, as slots of the segments would take them."""
        if not self.in_place:
            return 0
        per_chunk = (self._keys.shape[1] + self._values.shape[1]) * self._keys.element_size()
        return min(self._asked // self.chunk * per_chunk, self._store_nbytes)  # beams may share chunks

    @property
    def device_nbytes(self) -> int:
        """Digests, positions, tables, and the chosen chunks that are read in place; with place "device" all chunks.

        In place nothing is copied: the host's memory is the device's. The chosen chunks then count as on the device
        and not as on the host, so that a budget costs the same bytes wherever it is read.
        """
        tensors = [t for t in (*vars(self).values(), self.digests) if isinstance(t, Tensor) and t.numel()]
        every = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
        every += self.digest_nbytes - self.digests.untyped_storage().nbytes()  # scales
        return every if self.place == "device" else every - self._store_nbytes + self._loaded_nbytes

    @property
    def host_nbytes(self) -> int:
        """Bytes in host memory or on disk."""
        return 0 if self.place == "device" else self._store_nbytes - self._loaded_nbytes

    @property
    def extra_slots(self) -> int:
        """Prompt slots stored here that are not chosen: what can be retrieved but is not resident."""
        return self._outside

    @property
    def stored(self) -> Tensor:
        """Keys of all chunks [N, T * D], not copied."""
        return self._keys

    @property
    def chosen_slots(self) -> Tensor:
        """int64 [B, H] on the CPU: tokens that a step attends to here, without a slot in the segments."""
        every = torch.zeros(self.batch * self.kv_heads, dtype=torch.int64)
        if self.in_place:
            every.index_put_((self._run.cpu(),), self._slots.cpu() * self.chunk)
        return every.view(self.batch, self.kv_heads)

    def chosen_positions(self) -> Tensor | None:
        """Positions of the tokens here that the present step attends to: int64 [B, H, K * T], -1 after the last.

        None where nothing is read in place: what is chosen then has slots in the segments.
        """
        if not self.in_place or not self.choosing:
            return None
        found = self._positions[self._sequence[:, None], self._table.clamp_min(0)].to(torch.int64)  # [n, K, T]
        found = found.masked_fill_((self._table < 0)[..., None], -1).flatten(1)
        every = found.new_full((self.batch * self.kv_heads, found.shape[1]), -1)
        return every.index_copy_(0, self._run, found).view(self.batch, self.kv_heads, -1)

    # ---- retrieval

    @property
    def choosing(self) -> int:
        """Rows that have fewer chunk slots than chunks, and therefore choose at every step."""
        return self._run.shape[0]

    def overlaps(self, stored: Tensor, chunks: Tensor) -> bool:
        """Return whether a head stores tokens on the device that are in chunks it may read.

        stored: positions of the stored slots, [B, H, M], -1 beyond a head's length. chunks: int64 [B, H].
        """
        if not len(self._run) or not self._positions.numel() or not stored.numel():
            return False
        last = max(int(stored.max()), int(self._positions.max()), 0)
        own = stored.flatten(0, 1)[self._run]  # [n, M]
        number = torch.arange(self._positions.shape[1], device=self.device)
        offloaded = self._positions[self._sequence].to(torch.int64)  # [n, P, T]
        offloaded = offloaded.masked_fill((number >= self._count[:, None])[..., None], last + 1).flatten(1)
        marks = torch.zeros(len(own), last + 2, dtype=torch.bool, device=self.device)
        marks = marks.scatter_(1, offloaded, True)
        marks[:, last + 1] = False
        found = marks.gather(1, own.to(torch.int64).clamp_min(0)) & (own >= 0)
        reads = chunks.to(self.device).flatten()[self._run] > 0
        return bool((found.any(1) & reads).any())

    def reserve(self, segments: Segments, chunks: Tensor, *, in_place: bool = False) -> None:
        """Give head (b, h) chunks[b, h] chosen chunks, at first its newest; entries of other heads are ignored.

        They get slots at the end of the runs; with `in_place` only those of heads whose chunks all fit, since the
        others are read from here. A head whose chunks all fit makes no choices from then on. One without a chosen
        chunk can never get any: its chunks no longer count as stored.
        """
        self.in_place, self.reserved = in_place, True
        run, count = self._run.cpu(), self._count.cpu()
        slots = torch.minimum(chunks.cpu().flatten()[run], count)
        choosing = (slots < count) & (slots > 0)
        loaded = slots.masked_fill(choosing, 0) if in_place else slots
        offset = segments.lengths.view(-1)[run]
        extra = torch.zeros(segments.batch * segments.heads, dtype=torch.int64)
        segments.extend_blank(extra.index_put((run,), loaded * self.chunk))
        self._outside = int((count - slots)[slots > 0].sum()) * self.chunk
        with torch.inference_mode(False):
            self._offset, self._slots = offset.to(self.device), slots.to(self.device)
            row = torch.arange(len(slots)).repeat_interleave(loaded)
            slot = torch.arange(len(row)) - (loaded.cumsum(0) - loaded)[row]
            number = (count - loaded)[row] + slot
            self._load(segments, row.to(self.device), number.to(self.device), slot.to(self.device))
            rows = choosing.nonzero()[:, 0].to(self.device)
            self._select_rows(rows)
            longest = int(self._count.max()) if len(rows) else 0
            if len(rows) < len(self._digests) or longest < self.digests.shape[-1]:
                self._digests = self._digests.take(rows, longest)
            self._digest = torch.arange(len(rows), device=self.device)
            column, unloaded = torch.arange(longest, device=self.device), (self._count - self._slots)[:, None]
            self._resident = (column >= unloaded) & (column < self._count[:, None])
            width = int(self._slots.max()) if len(rows) else 0
            self._table = column[:width] + unloaded
            if in_place:
                self._table = self._table.masked_fill(column[:width] >= self._slots[:, None], -1)
            else:
                self._table = self._table.clamp_max(longest - 1)
        self._describe()

    def relevance(self, query: Tensor, scaling: float, kernel: ChunkKernel | None = None) -> Tensor:
        """Relevance of every chunk to a step's queries: log of max over queries of softmax over chunks of q . digest.

        query [B, Hq, q, D]; returns [n, P], -inf beyond a row's chunks. The maximum runs over the query group and over
        all q new tokens. kernel: does the same in one pass, where it can.
        """
        batch, _, _, dim = query.shape
        grouped = query.detach().reshape(batch * self.kv_heads, -1, dim).index_select(0, self._run)  # [n, G * q, D]
        given = grouped * scaling, self._digest, self._count, self.summary
        if kernel is not None and (found := kernel.relevance(self._digests, *given)) is not None:
            return found
        return self._digests.relevance(*given, straight=self._straight, equal=self._equal)

    def _choose(self, relevance: Tensor) -> tuple[Tensor, Tensor | None]:
        """The most relevant chunks of every row, [n, K] (entries beyond its share come last), and which count."""
        width = self._table.shape[1]
        top = relevance.topk(width, dim=-1, sorted=not self._equal).indices
        return top, None if self._equal else torch.arange(width, device=self.device) < self._slots[:, None]

    def fetch(self, segments: Segments, relevance: Tensor) -> tuple[int, int]:
        """Make every row's slots hold its most relevant chunks, by relevance [n, P]; copies those not resident yet.

        Returns (slots requested, slots of these that were already resident).
        """
        if not self.choosing:
            return 0, 0
        top, usable = self._choose(relevance)
        wanted = torch.zeros_like(self._resident)
        wanted.scatter_(1, top, True if usable is None else usable)
        row, number = (wanted > self._resident).nonzero(as_tuple=True)
        self._resident = wanted
        if len(row):
            # Rows lack as many chunks as they hold unwanted ones, so the two lists match entry by entry.
            unwanted = wanted.gather(1, self._table).logical_not_()
            if usable is not None:
                unwanted &= usable
            slot = unwanted.nonzero(as_tuple=True)[1]
            self._table[row, slot] = number
            self._load(segments, row, number, slot)
        return self._asked, self._asked - len(row) * self.chunk

    def pick(self, relevance: Tensor, kernel: ChunkKernel | None = None) -> tuple[int, int]:
        """Choose every row's most relevant chunks for `pages`, by relevance [n, P]; copies nothing.

        kernel: does the same in one pass, where it can; of equally relevant chunks it then chooses the lower ones.

        Returns (slots requested, slots of these that were also chosen in the previous step).
        """
        if not self.choosing:
            return 0, 0
        if kernel is not None:
            table = torch.empty_like(self._table)  # the previous one may be in use
            count = kernel.choose(relevance, self._count, self._slots, self._resident, table)
            if count is not None:
                self._table = table
                return self._asked, count * self.chunk
        top, usable = self._choose(relevance)
        stayed = self._resident.gather(1, top)
        if usable is None:
            self._resident = torch.zeros_like(self._resident).scatter_(1, top, True)
        else:
            stayed &= usable
            self._resident = torch.zeros_like(self._resident).scatter_(1, top, usable)
            top = top.masked_fill(~usable, -1)
        self._table = top
        return self._asked, int(stayed.sum()) * self.chunk

    def pages(self) -> Pages:
        """The chosen chunks, for attention that reads them in place."""
        index = self._table + self._first[:, None]
        if not self._equal:
            index = index.masked_fill_(self._table < 0, -1)
        table = index.new_full((self.batch * self.kv_heads, index.shape[1]), -1)
        return Pages(self._keys, self._values, table.index_copy_(0, self._run, index))

    def _load(self, segments: Segments, row: Tensor, number: Tensor, slot: Tensor) -> None:
        """Copies chunk `number` of a row into its chunk slot `slot`; all three [m]."""
        if not len(row):
            return
        keys, values = self._read(self._first[row] + number)
        slots = (self._offset[row] + slot * self.chunk)[:, None] + torch.arange(self.chunk, device=self.device)
        segments.write(
            self._run[row].repeat_interleave(self.chunk),
            slots.view(-1),
            keys.view(len(row) * self.chunk, -1),
            values.view(len(row) * self.chunk, -1),
            self._positions[self._sequence[row], number].view(-1),
        )

    def _read(self, index: Tensor) -> list[Tensor]:
        """Keys [m, T * D] and values [m, T * Dv] of chunks on the compute device."""
        sources = [self._keys, self._values]
        if self._keys.device == self.device:
            return [source.index_select(0, index) for source in sources]
        if self.device.type != "cuda":
            return [source.index_select(0, index.cpu()).to(self.device) for source in sources]
        if self._staging is None:
            self._staging = Staging(self.device)
        return self._staging.read(sources, index)

    # ---- copies and beams

    def __deepcopy__(self, memo: dict[int, Any]) -> ChunkStore:
        """Tables of its own over the same chunks, which never change."""
        self.room = None  # neither store may grow in place any more
        copied = memo[id(self)] = copy.copy(self)
        with torch.inference_mode(False):
            for name in _ROWS:
                setattr(copied, name, getattr(self, name).clone())
        return copied

    def select_sequences(self, index: Tensor) -> None:
        """Sequence i becomes the former sequence index[i]: rows and tables follow, chunks and digests stay."""
        index = index.cpu()
        if index.tolist() == list(range(self.batch)):
            return
        self.batch = len(index)
        sequence = self._run.cpu() // self.kv_heads
        new, row = (index[:, None] == sequence).nonzero(as_tuple=True)
        new, row = new.to(self.device), row.to(self.device)
        with torch.inference_mode(False):
            self._select_rows(row)
            self._run = new * self.kv_heads + self._run % self.kv_heads
        self._describe()

    def _select_rows(self, row: Tensor) -> None:
        self.room = None if self.room is None else self.room[row.cpu()]
        for name in _ROWS:
            setattr(self, name, getattr(self, name)[row])

    def _describe(self) -> None:
        """Host-side facts that spare the hot path its masks and gathers."""
        self._straight = self._digest.tolist() == list(range(len(self._digests)))
        full = (self._slots == self._table.shape[1]) & (self._count == self.digests.shape[-1])
        self._equal = bool(full.all())
        self._asked = int(self._slots.sum()) * self.chunk
