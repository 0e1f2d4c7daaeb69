"""Prompt KV that lives outside of a layer's segments, in chunks that are fetched back by relevance.

Notation: S stored heads (sequence, KV head pairs whose complete chunks were moved here), T tokens per chunk, N chunks
of all stored heads, P chunks of the longest one; n rows, i.e. runs of the segments that choose among their chunks; K
chunk slots of the row that has most.

Chunks never change and are never copied again. Beams and other reorderings only change which stored head a row reads.
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from foveakv.errors import StoreError
from foveakv.memory.segments import Segments

Place = Literal["host", "device", "disk"]
_ROWS = ("_first", "_count", "_sequence", "_digest", "_run", "_offset", "_slots", "_table", "_resident")  # all [n, ...]
_SCORES_AT_ONCE = 1 << 24  # relevance of a long later turn is computed in blocks of this many scores


class ChunkStore:
    """One layer's chunks with their digests, and a table of which chunk lies in which slots of the segments.

    Life: made during prefill, `reserve` once when the budgets are known, `fetch` before every decode attention.
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
    ) -> None:
        """Copies the complete chunks of some heads.

        Args:
            keys: [B, H, C, D], after RoPE. values: [B, H, C, Dv].
            real: bool [B, C]. A chunk is T real tokens in column order; what is left over stays with the caller.
            positions: LongTensor [B, C].
            heads: bool [B, H], the heads to store.
            place: where keys and values lie: "host" (pinned when the keys are on CUDA), "device", or "disk" (a file in
                `directory` that has no name, so that it goes with the process whatever happens).
        """
        self.chunk = chunk
        self.place = place
        self.device = keys.device
        self.batch, self.kv_heads = keys.shape[:2]
        sequence, head = heads.cpu().nonzero(as_tuple=True)
        count = (real.sum(-1) // chunk).cpu()[sequence]  # [S]
        order = (~real).to(self.device, torch.int8).argsort(dim=-1, stable=True)  # real columns first, in order
        stored = list(zip(sequence.tolist(), head.tolist(), count.tolist(), strict=True))
        self._write_chunks(keys, values, order, stored, directory)
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
            self._slots = torch.zeros_like(self._run)  # chunk slots of the run
            self._table = self._run.new_empty(len(count), 0)  # [n, K] the chunk that lies in a slot
            self._resident = torch.zeros(len(count), longest, dtype=torch.bool, device=self.device)  # [n, P]
        self._equal = False  # all rows have K slots and P chunks: no masks needed
        self._straight = True  # row i reads digest i: no gather needed
        self._asked = 0  # slots that one fetch asks for
        self._outside = int(count.sum()) * chunk

    def _write_chunks(
        self,
        keys: Tensor,
        values: Tensor,
        order: Tensor,
        stored: list[tuple[int, int, int]],
        directory: str | Path | None,
    ) -> None:
        """Fills self._keys [N, T * D], self._values [N, T * Dv] and self.digests [S, D, P]."""
        chunk, total = self.chunk, sum(count for _, _, count in stored)
        longest = max((count for _, _, count in stored), default=0)
        exact = torch.float64 if keys.dtype == torch.float64 else torch.float32
        with torch.inference_mode(False):
            self.digests = keys.new_zeros(len(stored), keys.shape[-1], longest)
        parts = []
        for source in (keys, values):
            width = source.shape[-1]
            writer = _Writer(self.place, total, chunk * width, source, directory)
            for row, (b, h, count) in enumerate(stored):
                tokens = source[b, h].index_select(0, order[b, : count * chunk])  # a copy, so it is contiguous
                writer.write(tokens.view(count, chunk * width))
                if source is keys:
                    means = tokens.view(count, chunk, width).to(exact).mean(1)
                    self.digests[row, :, :count] = means.mT.to(keys.dtype)
            parts.append(writer.finish())
        self._keys, self._values = parts

    # ---- accounting (foveakv.layer.ExtraMemory)

    @property
    def digest_nbytes(self) -> int:
        return self.digests.untyped_storage().nbytes()

    @property
    def _store_nbytes(self) -> int:
        return self._keys.untyped_storage().nbytes() + self._values.untyped_storage().nbytes()

    @property
    def device_nbytes(self) -> int:
        """Digests, positions and tables; with place "device" the chunks as well."""
        tensors = [t for t in vars(self).values() if isinstance(t, Tensor) and t.numel()]
        every = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
        return every if self.place == "device" else every - self._store_nbytes

    @property
    def host_nbytes(self) -> int:
        """Bytes in host memory or on disk."""
        return 0 if self.place == "device" else self._store_nbytes

    @property
    def extra_slots(self) -> int:
        """Prompt slots that lie here and have no slot in the segments: what can be attended to but is not resident."""
        return self._outside

    # ---- retrieval

    @property
    def choosing(self) -> int:
        """Rows that have fewer chunk slots than chunks, and therefore choose at every step."""
        return self._run.shape[0]

    def reserve(self, segments: Segments, chunks: Tensor) -> None:
        """Reserves chunk slots behind what the runs hold, chunks[b, h] of them; entries of other heads are ignored.

        They are filled with the newest chunks. A head whose chunks all fit has no choice to make from then on. One
        without a chunk slot can never get any: its chunks no longer count as stored.
        """
        run, count = self._run.cpu(), self._count.cpu()
        slots = torch.minimum(chunks.cpu().view(-1)[run], count)
        offset = segments.lengths.view(-1)[run]
        extra = torch.zeros(segments.batch * segments.heads, dtype=torch.int64)
        segments.extend_blank(extra.index_put((run,), slots * self.chunk))
        self._outside = int((count - slots)[slots > 0].sum()) * self.chunk
        with torch.inference_mode(False):
            self._offset, self._slots = offset.to(self.device), slots.to(self.device)
            row = torch.arange(len(slots)).repeat_interleave(slots)
            slot = torch.arange(len(row)) - (slots.cumsum(0) - slots)[row]
            number = (count - slots)[row] + slot
            self._load(segments, row.to(self.device), number.to(self.device), slot.to(self.device))
            choosing = ((slots < count) & (slots > 0)).nonzero()[:, 0].to(self.device)
            self._select_rows(choosing)
            if len(choosing) < len(self.digests):
                self.digests = self.digests[choosing]
            longest = int(self._count.max()) if len(choosing) else 0
            if longest < self.digests.shape[-1]:
                self.digests = self.digests[..., :longest].contiguous()
            self._digest = torch.arange(len(choosing), device=self.device)
            column, unloaded = torch.arange(longest, device=self.device), (self._count - self._slots)[:, None]
            self._resident = (column >= unloaded) & (column < self._count[:, None])
            width = int(self._slots.max()) if len(choosing) else 0
            self._table = (column[:width] + unloaded).clamp_max(longest - 1)
        self._describe()

    def relevance(self, query: Tensor, scaling: float) -> Tensor:
        """How much a step's queries want every chunk: log of max over queries of softmax over chunks of q . digest.

        query [B, Hq, q, D]; returns [n, P], -inf beyond a row's chunks. The maximum runs over the query group and over
        all q new tokens.
        """
        batch, _, _, dim = query.shape
        grouped = query.reshape(batch * self.kv_heads, -1, dim).index_select(0, self._run)  # [n, G * q, D]
        digests = self.digests if self._straight else self.digests.index_select(0, self._digest)
        block = max(1, _SCORES_AT_ONCE // max(1, digests.shape[0] * digests.shape[-1]))
        best: Tensor | None = None
        for part in grouped.split(block, dim=1):
            scores = torch.bmm(part * scaling, digests)  # [n, block, P]
            if scores.dtype in (torch.float16, torch.bfloat16):
                scores = scores.float()
            if not self._equal:
                beyond = torch.arange(digests.shape[-1], device=self.device) >= self._count[:, None]
                scores = scores.masked_fill_(beyond[:, None], -torch.inf)
            top = scores.log_softmax(-1).amax(1)
            best = top if best is None else torch.maximum(best, top)
        assert best is not None  # split yields at least one part
        return best

    def fetch(self, segments: Segments, query: Tensor, scaling: float) -> tuple[int, int]:
        """Makes every row's slots hold its most relevant chunks; copies only those that are not there yet.

        Returns (slots asked for, slots of these that were there already).
        """
        if not self.choosing:
            return 0, 0
        relevance = self.relevance(query, scaling)
        width = self._table.shape[1]
        top = relevance.topk(width, dim=-1, sorted=not self._equal).indices  # [n, K]
        wanted = torch.zeros_like(self._resident)
        if self._equal:
            usable = None
            wanted.scatter_(1, top, True)
        else:
            usable = torch.arange(width, device=self.device) < self._slots[:, None]
            wanted.scatter_(1, top, usable)
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

    def _load(self, segments: Segments, row: Tensor, number: Tensor, slot: Tensor) -> None:
        """Copies chunk `number` of a row into its chunk slot `slot`; all three [m]."""
        if not len(row):
            return
        index = self._first[row] + number
        keys, values = self._read(self._keys, index), self._read(self._values, index)
        slots = (self._offset[row] + slot * self.chunk)[:, None] + torch.arange(self.chunk, device=self.device)
        segments.write(
            self._run[row].repeat_interleave(self.chunk),
            slots.view(-1),
            keys.view(len(row) * self.chunk, -1),
            values.view(len(row) * self.chunk, -1),
            self._positions[self._sequence[row], number].view(-1),
        )

    def _read(self, source: Tensor, index: Tensor) -> Tensor:
        """Chunks [m, T * D] on the compute device."""
        if source.device == self.device:
            return source.index_select(0, index)
        index = index.cpu()
        staged = torch.empty(len(index), source.shape[1], dtype=source.dtype, pin_memory=self.device.type == "cuda")
        torch.index_select(source, 0, index, out=staged)
        return staged.to(self.device, non_blocking=True)

    # ---- copies and beams

    def __deepcopy__(self, memo: dict[int, Any]) -> ChunkStore:
        """Tables of its own over the same chunks, which never change."""
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
        for name in _ROWS:
            setattr(self, name, getattr(self, name)[row])

    def _describe(self) -> None:
        """Host-side facts that spare the hot path its masks and gathers."""
        self._straight = self._digest.tolist() == list(range(len(self.digests)))
        full = (self._slots == self._table.shape[1]) & (self._count == self.digests.shape[-1])
        self._equal = bool(full.all())
        self._asked = int(self._slots.sum()) * self.chunk


class _Writer:
    """Collects rows of one width, at their place of storage."""

    def __init__(self, place: Place, rows: int, width: int, like: Tensor, directory: str | Path | None) -> None:
        self.shape, self.dtype, self.next = (rows, width), like.dtype, 0
        self.nbytes = rows * width * like.element_size()
        self.directory = Path(directory if directory is not None else tempfile.gettempdir())
        self.file = None
        if place == "disk" and self.nbytes:
            try:
                self.file = tempfile.TemporaryFile(buffering=0, dir=self.directory)  # noqa: SIM115, closed by finish
            except OSError as error:
                raise self._error(error) from error
            return
        device = like.device if place == "device" else torch.device("cpu")
        pinned = device.type == "cpu" and like.device.type == "cuda"
        with torch.inference_mode(False):
            self.buffer = torch.empty(self.shape, dtype=like.dtype, device=device, pin_memory=pinned)

    def write(self, rows: Tensor) -> None:
        if self.file is None:
            self.buffer[self.next : self.next + len(rows)] = rows
            self.next += len(rows)
            return
        try:
            rest = rows.cpu().view(-1).view(torch.uint8).numpy().data
            while rest:
                rest = rest[self.file.write(rest) :]
        except OSError as error:
            self.file.close()
            raise self._error(error) from error

    def finish(self) -> Tensor:
        """[rows, width]; from disk a mapping, read on demand, private to this process."""
        if self.file is None:
            return self.buffer
        try:
            with self.file:
                mapped = np.memmap(self.file, dtype=np.uint8, mode="c", shape=(self.nbytes,))
        except OSError as error:
            raise self._error(error) from error
        return torch.from_numpy(mapped).view(self.dtype).view(self.shape)

    def _error(self, error: OSError) -> StoreError:
        return StoreError(
            f"cannot write {self.nbytes:,} bytes to {self.directory}: {error.strerror or error}; choose another "
            'store_dir with more room, or store="host"'
        )
