"""Where kept KV lives: one contiguous run of slots for every (sequence, KV head).

Notation: B sequences, H KV heads, R = B * H runs (run r = b * H + h), M = longest run, N = rows of the flat buffers.
"Padded run coordinates" [B, H, M] address slot m of run (b, h); entries at or beyond the run's length are padding.

Slots lie in the order in which they came, until `evict` moves some: whoever needs the order of tokens reads positions.

With a `kv_dtype` the rows of keys and values are bytes (see `codes.py`). Whatever moves slots moves bytes; codes are
made once, when a slot is written. The newest tokens of every run have an exact copy as well (see `ring.py`): the side
field "exact" says which of its entries is a slot's, and follows it like every field.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foveakv.memory.quantizer import Quantizer, Residual
from foveakv.memory.residual import ResidualWindow
from foveakv.memory.rows import alike, flat, moves, shift, take

_CPU = torch.device("cpu")


@dataclass
class Runs:
    """What kernels see. No behaviour; made anew whenever a length or the layout changes."""

    keys: Tensor  # [N, D]; rows outside the runs are slack: they may hold anything, NaN included
    values: Tensor  # [N, Dv]
    positions: Tensor  # [N] int32
    start: Tensor  # [R] int64 on the keys' device: first row of every run, in ascending order
    length: Tensor  # [R] int64 on the keys' device
    batch: int
    heads: int
    max_length: int
    uniform: bool  # every run has max_length slots and starts at r * (N // R): dense views exist
    start_host: Tensor | None = None  # CPU copies of start and length: planning needs no device synchronisation
    length_host: Tensor | None = None
    codes: Quantizer | None = None  # how uint8 rows are to be read; None: rows are numbers
    exact: Residual | None = None  # full-precision copies of some slots, to be used in place of their codes


def slack(length: int) -> int:
    """Spare slots of a run with `length` stored slots."""
    return max(8, length // 16)


def dense(runs: Runs) -> tuple[Tensor, Tensor]:
    """Strided views keys [B, H, M, D] and values [B, H, M, Dv] of uniform runs (no copy)."""
    if not runs.uniform:
        raise ValueError("dense views exist for uniform runs only; use Segments.gather() for padded copies")
    shape = (runs.batch, runs.heads, runs.keys.shape[0] // (runs.batch * runs.heads), -1)
    return runs.keys.view(shape)[:, :, : runs.max_length], runs.values.view(shape)[:, :, : runs.max_length]


class Segments:
    """The KV slots of one layer, in flat buffers with room to grow behind every run.

    Lengths and layout are kept on the host, so nothing here waits for a device except `keep` and `crop`, whose masks
    decide how much memory is needed. Side fields (one value per slot) follow their slots through every operation.
    """

    batch: int
    heads: int
    # Host side: layout and lengths, [R] each. The room of a run is capacity - length; spare is the least of them.
    _start: Tensor
    _capacity: Tensor
    _length: Tensor
    _max_length: int
    _spare: int
    _total: int  # sum of the lengths
    _held: int  # bytes of all buffers
    _strided: bool  # start[r] = r * capacity for all runs
    _uniform: bool  # strided, and all lengths equal
    # Device side.
    _start_dev: Tensor
    _length_dev: Tensor
    _keys: Tensor  # [N, D]
    _values: Tensor  # [N, Dv]
    _positions: Tensor  # [N] int32
    _fields: dict[str, Tensor]  # [N] each
    _views: list[Tensor]  # the same buffers as [B, H, capacity, ...], where strided
    _runs: Runs | None
    _codes: Quantizer | None  # None: rows are numbers
    _ring: ResidualWindow | None  # None: no exact copies

    def __init__(
        self,
        batch: int,
        heads: int,
        keys: Tensor,
        values: Tensor,
        codes: Quantizer | None = None,
        residual_length: int = 0,
    ) -> None:
        """An empty memory for rows like keys [..., D] and values [..., Dv]; `from_dense` is the usual way in."""
        if batch < 1 or heads < 1:
            raise ValueError(f"a memory needs at least one sequence and one KV head, got {batch} and {heads}")
        self.batch = batch
        self.heads = heads
        self._device = keys.device
        self._codes = codes
        self._ring = None
        self._dtype = keys.dtype
        if codes is not None:
            self._ring = ResidualWindow(batch, heads, residual_length, keys, values) if residual_length else None
            keys = torch.empty(0, codes.key_bytes, dtype=torch.uint8, device=keys.device)
            values = torch.empty(0, codes.value_bytes, dtype=torch.uint8, device=keys.device)
        with torch.inference_mode(False):
            self._keys = torch.empty(0, keys.shape[-1], dtype=keys.dtype, device=keys.device)
            self._values = torch.empty(0, values.shape[-1], dtype=values.dtype, device=values.device)
            self._positions = torch.empty(0, dtype=torch.int32, device=keys.device)
        self._fields = {}
        self._fills: dict[str, float] = {}
        empty = torch.zeros(batch * heads, dtype=torch.int64)
        self._allocate(empty)
        self._set_lengths(empty)

    @classmethod
    def from_dense(
        cls,
        keys: Tensor,
        values: Tensor,
        keep: Tensor,
        positions: Tensor,
        *,
        kv_dtype: str | None = None,
        residual_length: int = 32,
        real: Tensor | None = None,
    ) -> Segments:
        """Copy the kept columns of a dense layer; nothing keeps the dense tensors alive afterwards.

        keys [B, H, C, D], values [B, H, C, Dv], keep bool [B, H, C] or [B, 1, C], positions [B, C] int64.
        The order inside a run is the order of the columns.

        kv_dtype: "int8" or "int4" stores codes. Key channels range over all columns that are real, bool [B, C] (None:
        all), and not only over the kept ones. The last residual_length tokens of each run stay exact as well.
        """
        batch, heads, columns = keys.shape[:3]
        if values.shape[:3] != keys.shape[:3]:
            raise ValueError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} differ in [B, H, C]")
        if keep.dtype != torch.bool or keep.dim() != 3 or keep.shape[0] != batch or keep.shape[2] != columns:
            raise ValueError(f"keep must be bool [B, H, C] or [B, 1, C], got {keep.dtype} {tuple(keep.shape)}")
        if positions.shape != (batch, columns):
            raise ValueError(f"positions must be [B, C] = {(batch, columns)}, got {tuple(positions.shape)}")
        codes = None if kv_dtype is None else Quantizer.of_prompt(kv_dtype, keys, values.shape[-1], real)
        self = cls(batch, heads, keys, values, codes, residual_length)
        mask = keep.to(keys.device).expand(batch, heads, columns).reshape(batch * heads, columns)
        lengths = mask.sum(-1).cpu()
        run, column = mask.nonzero(as_tuple=True)
        start = self._allocate(lengths)
        target = flat(start.to(self._device), lengths.to(self._device), run.shape[0])
        sequence, head = run // heads, run % heads
        for buffer, source in ((self._keys, keys.detach()), (self._values, values.detach())):
            # Projections are [B, C, H, D] in memory, rotated keys often too: read rows where they lie.
            if source.transpose(1, 2).is_contiguous():
                rows = source.transpose(1, 2).reshape(-1, source.shape[-1])
                index = (sequence * columns + column) * heads + head
            else:
                rows = source.reshape(-1, source.shape[-1])
                index = run * columns + column
            if codes is None:
                take(buffer, rows, target, index)
            else:
                codes.store(buffer, rows, target, index, run if buffer is self._keys else None)
        self._positions.index_copy_(0, target, positions.to(self._device)[sequence, column].to(torch.int32))
        self._set_lengths(lengths)
        if self._ring is not None:
            self.add_field("exact", dtype=torch.int16, fill=-1)
            entry = residual_length - (self._start_dev + self._length_dev)[run] + target  # the last slot: W - 1
            near = entry >= 0
            sequence, head, column, run, entry = (index[near] for index in (sequence, head, column, run, entry))
            self._ring.keys[run, entry] = keys.detach()[sequence, head, column]
            self._ring.values[run, entry] = values.detach()[sequence, head, column]
            self._fields["exact"].index_copy_(0, target[near], entry.to(torch.int16))
        return self

    # -- what is stored ----------------------------------------------------------------------------------------------

    @property
    def max_length(self) -> int:
        """M, the length of the longest run."""
        return self._max_length

    @property
    def lengths(self) -> Tensor:
        """[B, H] int64 on the CPU; no device synchronisation."""
        return self._length.view(self.batch, self.heads).clone()

    @property
    def sequence_lengths(self) -> list[int]:
        """[B], the lengths of the first heads, for methods whose heads hold equally many."""
        if self._uniform:
            return [self._max_length] * self.batch
        return self._length[:: self.heads].tolist()

    @property
    def total(self) -> int:
        """Stored slots of all runs."""
        return self._total

    @property
    def held_nbytes(self) -> int:
        """Bytes of the buffers: `nbytes` and `side_nbytes` but for starts and lengths. Kept up to date, free to ask."""
        return self._held

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def codes(self) -> Quantizer | None:
        """How keys and values are stored; None: as the model computed them."""
        return self._codes

    @property
    def runs(self) -> Runs:
        if self._runs is None:
            self._runs = Runs(
                self._keys,
                self._values,
                self._positions,
                self._start_dev,
                self._length_dev,
                self.batch,
                self.heads,
                self._max_length,
                self._uniform,
                self._start,
                self._length,
            )
            if self._codes is not None:
                self._runs.codes = self._codes
            if self._ring is not None:
                self._runs.exact = Residual(self._ring.keys, self._ring.values, self._fields["exact"])
        return self._runs

    def dense(self) -> tuple[Tensor, Tensor]:
        """Strided views [B, H, M, D] and [B, H, M, Dv], of codes [.., K] and [.., V]; only while `runs.uniform`."""
        return dense(self.runs)

    def positions(self) -> Tensor:
        """[B, H, M] int64 logical positions; -1 beyond a run's length and in blank slots."""
        return self._padded(self._positions, -1).to(torch.int64)

    def valid(self) -> Tensor:
        """[B, H, M] bool: True where a slot is stored."""
        slots = torch.arange(self._max_length, device=self._device)
        return (slots < self._length_dev[:, None]).view(self.batch, self.heads, self._max_length)

    def gather(self) -> tuple[Tensor, Tensor]:
        """Padded copies keys [B, H, M, D], values [B, H, M, Dv], zeros beyond a run: for tests and slow paths.

        Of codes it gives what attention reads, in the model's dtype: exact copies where there are any, else decoded.
        """
        keys, values = self._padded(self._keys, 0), self._padded(self._values, 0)
        codes = self._codes
        if codes is None:
            return keys, values
        run = torch.arange(self.batch * self.heads, device=self._device).view(self.batch, self.heads, 1)
        beyond = ~self.valid()
        keys, values = (
            numbers.to(self._dtype).masked_fill_(beyond[..., None], 0)
            for numbers in (codes.decode_keys(keys, run), codes.decode_values(values))
        )
        if self._ring is not None:
            entry = self._padded(self._fields["exact"], -1).to(torch.int64)
            newest = entry >= 0
            run, entry = run.expand_as(entry)[newest], entry[newest]
            keys[newest], values[newest] = self._ring.keys[run, entry], self._ring.values[run, entry]
        return keys, values

    @property
    def nbytes(self) -> int:
        """Bytes held by keys and values, slack and exact copies included."""
        exact = 0 if self._ring is None else self._ring.nbytes
        return self._keys.untyped_storage().nbytes() + self._values.untyped_storage().nbytes() + exact

    @property
    def saved_nbytes(self) -> int:
        """Bytes that codes save; negative where scales and exact copies take more. 0 without codes."""
        if self._codes is None:
            return 0
        plain = self._keys.shape[0] * (self._codes.dim + self._codes.value_dim) * self._dtype.itemsize
        entries = 0 if self._ring is None else self._fields["exact"].untyped_storage().nbytes()
        return plain - self.nbytes - self._codes.nbytes - entries

    @property
    def side_nbytes(self) -> int:
        """Bytes held by everything else: positions, starts, lengths, fields, scales."""
        held = [self._positions, self._start_dev, self._length_dev, *self._fields.values()]
        scales = 0 if self._codes is None else self._codes.nbytes
        return scales + sum(tensor.untyped_storage().nbytes() for tensor in held)

    # -- changing what is stored -------------------------------------------------------------------------------------

    def append(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Add q slots to every run, O(q) amortised: keys [B, H, q, D], values [B, H, q, Dv], positions [B or 1, q]."""
        q = keys.shape[2]
        if keys.shape[:2] != (self.batch, self.heads) or positions.shape not in ((self.batch, q), (1, q)):
            raise ValueError(
                f"append expects keys [{self.batch}, {self.heads}, q, D] and positions [{self.batch} or 1, q], "
                f"got {tuple(keys.shape)} and {tuple(positions.shape)}"
            )
        if q > self._spare:
            self._rebuild(self._length, self._length + q)
        if keys.requires_grad or values.requires_grad:
            keys, values = keys.detach(), values.detach()
        marks = None
        if self._codes is not None:
            if self._ring is not None:
                self._release(self._ring, q)
                marks = self._ring.enter(keys, values)
            keys, values = self._codes.encode_keys(keys), self._codes.encode_values(values)
        if self._uniform:
            at = self._max_length
            views = self._views
            views[0].narrow(2, at, q).copy_(keys)
            views[1].narrow(2, at, q).copy_(values)
            views[2].narrow(2, at, q).copy_(positions if len(positions) == 1 else positions[:, None])
            for view, fill in zip(views[3:], self._fills.values(), strict=True):
                view.narrow(2, at, q).fill_(fill)
            if marks is not None:
                self._field_view("exact").narrow(2, at + q - len(marks), len(marks)).copy_(marks)
        else:
            rows = self._start_dev + self._length_dev
            if q > 1:
                rows = (rows[:, None] + torch.arange(q, device=self._device)).view(-1)
            n = rows.shape[0]
            self._keys.index_copy_(0, rows, keys.reshape(n, -1).to(self._keys.dtype))
            self._values.index_copy_(0, rows, values.reshape(n, -1).to(self._values.dtype))
            spread = positions[:, None].to(self._device, torch.int32).expand(self.batch, self.heads, -1).reshape(n)
            self._positions.index_copy_(0, rows, spread)
            for name, buffer in self._fields.items():
                buffer.index_fill_(0, rows, self._fills[name])
            if marks is not None:
                newest = rows.view(-1, q)[:, q - len(marks) :]
                self._fields["exact"].index_copy_(0, newest.reshape(-1), marks.expand(newest.shape).reshape(-1))
        self._grow(q)

    def evict(self, slots: Tensor | int, counts: list[int]) -> None:
        """Drop single slots at the price of what is dropped: a run's last slots move into the holes.

        slots: int64 [B, H or 1, n], distinct in a run. Sequence b loses the first counts[b] of its n entries in every
        head; entries behind them are ignored. A number is that one slot in every run. The k-th hole before the run's
        new end takes the k-th of its last slots that survive; everything else stays where it is. Buffers are replaced
        by smaller ones when much is spare.
        """
        if isinstance(slots, int) and not self._uniform:
            slots = torch.full((self.batch, 1, 1), slots)
        n = 1 if isinstance(slots, int) else slots.shape[-1]
        if len(counts) != self.batch or not all(0 <= count <= n for count in counts):
            raise ValueError(f"evict expects slots [{self.batch}, {self.heads} or 1, n] and counts of at most n")
        most, least = max(counts), min(counts)
        if most == 0:
            return
        if self._ring is not None:
            self._ring.settled = 0
        if isinstance(slots, int) and least == 0:
            slots = torch.full((self.batch, 1, 1), slots)
        if isinstance(slots, int):
            last = self._max_length - 1
            if slots != last:
                for view in self._views:
                    view.select(2, slots).copy_(view.select(2, last))
        else:
            slots = slots[..., :most]
            if slots.dim() != 3 or slots.shape[:2] not in ((self.batch, self.heads), (self.batch, 1)):
                raise ValueError(f"slots must be [{self.batch}, {self.heads} or 1, n], got {tuple(slots.shape)}")
            if slots.device.type == "cpu":  # on a device the check would make it wait
                named = slots
                if most != least:  # entries behind a sequence's count may be anything
                    within = torch.arange(most) < torch.tensor(counts)[:, None, None]
                    named = slots[within.expand_as(slots)]
                low, high = torch.aminmax(named)
                if int(low) < 0 or int(high) >= self._max_length:
                    raise ValueError(f"evict names slots {int(low)} to {int(high)} of {self._max_length}")
            slots = slots.to(self._device)
            if most == least == 1:
                source = self._start_dev + (self._length_dev - 1)
                target = (self._start_dev.view(self.batch, self.heads) + slots[..., 0]).view(-1)
            else:
                spread = slots.expand(-1, self.heads, -1).flatten(0, 1)
                target, source = moves(self._start_dev, self._length_dev, spread, counts)
            for buffer in self._buffers():
                buffer.index_copy_(0, target, buffer.index_select(0, source))
        if most == least and self._uniform:
            self._grow(-most)
        else:
            self._set_lengths(self._length - torch.tensor(counts).repeat_interleave(self.heads))
        uniform, runs = self._uniform, self._length.shape[0]
        if uniform:  # `_wasteful` in plain numbers: this is asked in every step
            length = self._max_length
            wasteful = self._keys.shape[0] > runs * (length + 2 * max(8, length // 16))
        else:
            wasteful = self._wasteful(self._length)
        if wasteful:
            self._rebuild(self._length, self._length)

    def keep(self, mask: Tensor) -> None:
        """Drop every slot whose entry in mask (bool [B, H, M] or [B, 1, M]) is False; padding is ignored.

        Order is preserved. Runs are compacted in place; buffers are replaced by smaller ones when much is spare.
        """
        shape = (self.batch, self.heads, self._max_length)
        if mask.dtype != torch.bool or mask.dim() != 3 or mask.shape[-1] != self._max_length:
            raise ValueError(f"keep expects a bool mask {list(shape)}, got {mask.dtype} {tuple(mask.shape)}")
        mask = mask.to(self._device).expand(shape)
        if not self._uniform:
            mask = mask & self.valid()
        mask = mask.reshape(self.batch * self.heads, self._max_length)
        counts = mask.sum(-1).cpu()
        if torch.equal(counts, self._length):
            return
        if self._ring is not None:
            self._ring.settled = 0
        run, slot = mask.nonzero(as_tuple=True)
        source = self._start_dev[run] + slot
        if self._wasteful(counts):
            self._rebuild(counts, counts, source)
            return
        target = flat(self._start_dev, counts.to(self._device), source.shape[0])
        moved = (source != target).nonzero()[:, 0]
        source, target = source[moved], target[moved]
        for buffer in self._buffers():
            shift(buffer, target, source)
        self._set_lengths(counts)

    def crop(self, end: int) -> None:
        """Drop the slots whose position is `end` or later."""
        ring, before = self._ring, self._length
        kept = self._padded(self._positions, end) < end
        if ring is None:
            self.keep(kept)
            return
        newest = not bool((kept[..., 1:] & ~kept[..., :-1]).any())  # nothing goes but the ends of the runs
        settled = ring.settled
        self.keep(kept)
        gone = before - self._length
        if newest and int(gone.min()) == int(gone.max()):
            ring.rewind(int(gone[0]), settled)

    def extend_blank(self, extra: Tensor) -> None:
        """Append extra[r] blank slots (position -1, zeros, fields at their fill) to run r; extra [R] int64.

        Zeros of codes: a blank value is 0, a blank key is the lower end of its channels' ranges.
        """
        extra = extra.to("cpu", torch.int64)
        if extra.shape != self._length.shape or bool((extra < 0).any()):
            raise ValueError(f"extra must hold {self._length.shape[0]} counts of at least 0, got {extra.tolist()}")
        lengths = self._length + extra
        if bool((lengths > self._capacity).any()) or self._regular(lengths):
            self._rebuild(self._length, lengths)
        total = int(extra.sum())
        if self._ring is not None:
            self._ring.settled = 0
        rows = flat((self._start + self._length).to(self._device), extra.to(self._device), total)
        self._keys.index_fill_(0, rows, 0)
        self._values.index_fill_(0, rows, 0)
        self._positions.index_fill_(0, rows, -1)
        for name, buffer in self._fields.items():
            buffer.index_fill_(0, rows, self._fills[name])
        self._set_lengths(lengths)

    def write(self, runs: Tensor, slots: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Overwrite n distinct stored slots: runs [n], slots [n], keys [n, D], values [n, Dv], positions [n].

        Side fields keep their values, and exact copies of what was there are given up. Indices on the CPU are checked;
        on a device the check would make it wait.
        """
        if runs.device.type == "cpu" and slots.device.type == "cpu" and runs.numel():
            outside = (runs < 0) | (runs >= self._length.shape[0])
            if bool(outside.any()) or bool(((slots < 0) | (slots >= self._length[runs])).any()):
                raise ValueError("write reaches beyond the stored slots; call extend_blank first")
        runs = runs.to(self._device)
        rows = self._start_dev[runs] + slots.to(self._device)
        keys, values = keys.detach().to(self._device), values.detach().to(self._device)
        if self._codes is not None:
            keys, values = self._codes.encode_key_rows(keys, runs), self._codes.encode_values(values)
            if self._ring is not None:
                self._fields["exact"].index_fill_(0, rows, -1)
        self._keys.index_copy_(0, rows, keys.to(self._keys.dtype))
        self._values.index_copy_(0, rows, values.to(self._values.dtype))
        self._positions.index_copy_(0, rows, positions.to(self._device, torch.int32))

    def select_sequences(self, index: Tensor) -> None:
        """Sequence i becomes a copy of the former sequence index[i]; index [B'] int64. The identity is free."""
        index = index.to("cpu", torch.int64)
        if index.dim() != 1 or index.numel() == 0 or bool(((index < 0) | (index >= self.batch)).any()):
            raise ValueError(f"index must hold sequence numbers below {self.batch}, got {index.tolist()}")
        if index.tolist() == list(range(self.batch)):
            return
        former = (index[:, None] * self.heads + torch.arange(self.heads)).view(-1)
        lengths = self._length[former]
        start = self._start[former].to(self._device)
        source = flat(start, lengths.to(self._device), int(lengths.sum()))
        if self._codes is not None:
            self._codes = self._codes.select(former)
            if self._ring is not None:
                self._ring.select(index)
        self.batch = index.shape[0]
        self._rebuild(lengths, lengths, source)

    # -- side fields -------------------------------------------------------------------------------------------------

    def add_field(
        self, name: str, padded: Tensor | None = None, dtype: torch.dtype = torch.float32, fill: float = 0
    ) -> None:
        """Attach one value per slot: padded [B, H, M] gives those of the stored slots, new slots start at `fill`."""
        if name in self._fields:
            raise ValueError(f"field {name!r} exists already; use set_field to change it")
        with torch.inference_mode(False):
            self._fields[name] = torch.full(self._positions.shape, fill, dtype=dtype, device=self._device)
        self._fills[name] = fill
        self._held += self._fields[name].untyped_storage().nbytes()
        self._refresh_views()
        if padded is not None:
            self.set_field(name, padded)

    def field(self, name: str) -> Tensor:
        """[B, H, M] padded copy; 0 beyond a run's length."""
        return self._padded(self._field(name), 0)

    def view(self, name: str) -> Tensor:
        """[B, H, M], to be read only: the field itself where runs are uniform, else what `field` gives."""
        if not self._uniform:
            return self.field(name)
        self._field(name)  # says so when there is none
        return self._field_view(name).narrow(2, 0, self._max_length)

    def flat(self, name: str) -> Tensor:
        """[N], the field itself beside the rows of `runs`; rows outside the runs are slack."""
        return self._field(name)

    def view_positions(self) -> Tensor:
        """As `positions`, but int32 and to be read only: no copy where runs are uniform."""
        if not self._uniform:
            return self._padded(self._positions, -1)
        return self._views[2].narrow(2, 0, self._max_length)

    def add(self, name: str, amounts: Tensor) -> None:
        """Adds amounts [B, H, M] to a field; in place where runs are uniform. Padding is ignored."""
        if self._uniform:
            self.view(name).add_(amounts.detach())
        else:
            self.set_field(name, self.field(name).add_(amounts.detach()))

    def put(self, name: str, slots: Tensor, counts: list[int], value: float) -> None:
        """Sets a field at single slots; slots [B, H or 1, n] and counts as in `evict`."""
        n = slots.shape[-1]
        rows = self._start_dev.view(self.batch, self.heads, 1) + slots
        if min(counts) < n:
            wanted = torch.arange(n, device=self._device) < torch.tensor(counts, device=self._device)[:, None, None]
            rows = rows[wanted.expand_as(rows)]
        self._field(name).index_fill_(0, rows.view(-1), value)

    def set_field(self, name: str, padded: Tensor) -> None:
        """Replace the values of the stored slots by padded [B, H, M]; its padding is ignored."""
        buffer = self._field(name)
        shape = (self.batch, self.heads, self._max_length)
        if padded.shape != shape:
            raise ValueError(f"field {name!r} needs values {list(shape)}, got {tuple(padded.shape)}")
        if self._uniform:
            buffer.view(self.batch, self.heads, -1)[:, :, : self._max_length].copy_(padded.detach())
        else:
            kept = padded.detach().to(self._device, buffer.dtype)[self.valid()]
            buffer.index_copy_(0, flat(self._start_dev, self._length_dev, kept.shape[0]), kept)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _field(self, name: str) -> Tensor:
        if name not in self._fields:
            raise KeyError(f"no field {name!r} here, only {sorted(self._fields)}; add_field creates one")
        return self._fields[name]

    def _release(self, ring: ResidualWindow, q: int) -> None:
        """Takes the ring's entries for q new tokens from the slots that have them."""
        count, window = min(q, ring.window), ring.window
        entries = self._fields["exact"]
        if ring.settled < window or count == window:
            ring.release(entries, count)
        elif self._uniform:  # no search: they are the slots that are W from the end
            low, high = max(0, self._max_length - window), self._max_length - window + count
            if high > low:
                self._field_view("exact").narrow(2, low, high - low).fill_(-1)
        elif int(self._length.min()) < window:
            ring.release(entries, count)
        else:
            rows = self._start_dev + (self._length_dev - window)
            entries.index_fill_(0, (rows[:, None] + torch.arange(count, device=self._device)).view(-1), -1)

    def _field_view(self, name: str) -> Tensor:
        return self._views[3 + list(self._fields).index(name)]

    def _buffers(self) -> list[Tensor]:
        return [self._keys, self._values, self._positions, *self._fields.values()]

    def _padded(self, buffer: Tensor, beyond: float) -> Tensor:
        """[N, ...] -> [B, H, M, ...] copy with `beyond` in the padding."""
        shape = (self.batch, self.heads, self._max_length, *buffer.shape[1:])
        if self._uniform:
            return buffer.view(self.batch, self.heads, -1, *buffer.shape[1:])[:, :, : self._max_length].clone()
        slots = torch.arange(self._max_length, device=self._device)
        rows = self._start_dev[:, None] + slots
        padding = slots >= self._length_dev[:, None]
        padded = buffer[rows.masked_fill_(padding, 0)]
        padded[padding] = beyond
        return padded.view(shape)

    def _set_lengths(self, lengths: Tensor) -> None:
        """Record lengths [R] (CPU) that fit the present layout."""
        self._length = lengths
        self._length_dev = lengths.to(self._device, non_blocking=True)
        self._max_length = int(lengths.max())
        self._total = int(lengths.sum())
        self._spare = int((self._capacity - lengths).min())
        self._uniform = self._strided and int(lengths.min()) == self._max_length
        self._runs = None

    def _grow(self, by: int) -> None:
        """All runs got longer by so many slots, or shorter."""
        runs = self._length.shape[0]
        self._max_length += by
        self._spare -= by
        self._total += by * runs
        self._runs = None
        # Other tensors, not in-place sums: a Runs that was handed out keeps describing what it described.
        if self._uniform:
            self._length = alike(runs, self._max_length, _CPU)
            self._length_dev = self._length if self._device == _CPU else alike(runs, self._max_length, self._device)
        else:
            self._length = self._length + by
            self._length_dev = self._length if self._device == _CPU else self._length_dev + by

    def _room(self, lengths: Tensor) -> int:
        """Spare slots for each run: the mean of slack(length), the same for all, since appends grow all alike.

        It costs no more bytes than slack(length) per run, and one short run cannot force a regrow every 8 tokens.
        """
        return max(8, int((lengths // 16).sum()) // lengths.shape[0])

    def _regular(self, lengths: Tensor) -> bool:
        """Would a new layout for these lengths gain dense views?"""
        return not self._strided and int(lengths.min()) == int(lengths.max())

    def _wasteful(self, lengths: Tensor) -> bool:
        allowed = int(lengths.sum()) + 2 * lengths.shape[0] * self._room(lengths)
        return self._keys.shape[0] > allowed or self._regular(lengths)

    def _allocate(self, lengths: Tensor) -> Tensor:
        """Fresh, uninitialised buffers with room for lengths [R] and the usual slack; returns the starts [R] (CPU)."""
        self._capacity = lengths + self._room(lengths)
        end = self._capacity.cumsum(0)
        self._start = end - self._capacity
        self._start_dev = self._start.to(self._device, non_blocking=True)
        self._strided = int(lengths.min()) == int(lengths.max())
        rows = int(end[-1])
        # Normal tensors even under inference_mode: later steps may run outside of it and write here.
        with torch.inference_mode(False):
            self._keys = self._keys.new_empty(rows, self._keys.shape[1])
            self._values = self._values.new_empty(rows, self._values.shape[1])
            self._positions = self._positions.new_empty(rows)
            self._fields = {name: buffer.new_empty(rows) for name, buffer in self._fields.items()}
        self._held = sum(buffer.untyped_storage().nbytes() for buffer in self._buffers())
        self._held += 0 if self._codes is None else self._codes.nbytes
        self._held += 0 if self._ring is None else self._ring.nbytes
        self._refresh_views()
        return self._start

    def _refresh_views(self) -> None:
        """Dense views over the whole stride, for cheap appends to uniform runs."""
        self._views = []
        if self._strided:
            with torch.inference_mode(False):
                self._views = [b.view(self.batch, self.heads, -1, *b.shape[1:]) for b in self._buffers()]

    def _rebuild(self, carried: Tensor, lengths: Tensor, source: Tensor | None = None) -> None:
        """Move into fresh buffers that have room for lengths [R].

        The old rows `source` (in run order; by default all stored rows) become the first carried[r] slots of run r.
        """
        total = int(carried.sum())
        if source is None:
            source = flat(self._start_dev, self._length_dev, total)
        before = self._buffers()
        start = self._allocate(lengths)
        target = flat(start.to(self._device), carried.to(self._device), total)
        for old, new in zip(before, self._buffers(), strict=True):
            take(new, old, target, source)
        self._set_lengths(carried)
