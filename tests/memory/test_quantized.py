"""Quantized slots: every operation of the memory, bit by bit."""

from __future__ import annotations

import copy
import itertools
import random

import pytest
import torch
from segment_kinds import both_kinds, check_pages, from_dense
from torch import Tensor

from foveakv.memory.layout import slack
from foveakv.memory.quantizer import Quantizer
from foveakv.memory.runs import padded_rows
from foveakv.memory.segments import Segments

__all__ = ["both_kinds"]
D, DV = 6, 4
KINDS = ["int8", "int4"]


# ---------------------------------------------------------------------------------------------- the memory, bit by bit


class Twin:
    """Quantized segments beside plain ones that hold, as their keys, nothing but each token's number.

    Whatever is done to both, slot m of a run must hold the bytes of the token whose number the plain ones have there,
    quantized once with the scales of the run in which it began, and a full-precision copy iff the window's simple
    model says so.
    """

    def __init__(self, rng: random.Random, kind: str, window: int, dtype: torch.dtype) -> None:
        self.rng, self.window, self.dtype = rng, window, dtype
        batch, heads, columns = rng.randint(1, 3), rng.randint(1, 3), rng.choice([1, 7, 33, 60])
        self.keys: list[Tensor] = []  # by number: the token's key and value as they came, and their bytes
        self.values: list[Tensor] = []
        self.rows: list[tuple[Tensor, Tensor]] = []
        keep = torch.rand(batch, heads, columns) < rng.choice([0.2, 0.7, 1.0])
        if rng.random() < 0.3:
            keep = torch.rand(batch, 1, columns) < 0.6
        keys, values = torch.randn(batch, heads, columns, D), torch.randn(batch, heads, columns, DV)
        keys, values = keys.to(dtype), values.to(dtype)
        if rng.random() < 0.5:  # the memory order of a projection
            keys = keys.transpose(1, 2).contiguous().transpose(1, 2)
        real = torch.rand(batch, columns) < 0.9
        real[:, -1] = True
        keep = keep & real[:, None]
        self.quantizer = Quantizer.of_prompt(kind, keys, DV, real)
        self.origin = list(range(batch * heads))
        positions = torch.arange(columns).repeat(batch, 1)
        self.segments = from_dense(keys, values, keep, positions, kv_dtype=kind, residual_length=window, real=real)
        self.plain = Segments.from_dense(*[self.tokens(keys, values)] * 2, keep, positions)
        for segments in (self.segments, self.plain):
            segments.add_field("score", fill=0.5)
        self.seen, self.next = columns, 0
        self.newest = [[-1] * window for _ in self.origin]
        ids = self.ids()
        for run, stored in enumerate(self.lengths()):
            newest = ids[run, max(0, stored - window) : stored].tolist()
            self.newest[run][window - len(newest) :] = newest

    def tokens(self, keys: Tensor, values: Tensor) -> Tensor:
        """Numbers [B, H, n, 1] of new tokens, which are recorded."""
        batch, heads, n, _ = keys.shape
        first = len(self.keys)
        self.record(keys.reshape(-1, D), values.reshape(-1, DV), torch.arange(batch * heads).repeat_interleave(n))
        return torch.arange(first, len(self.keys), dtype=torch.float64).view(batch, heads, n, 1)

    def record(self, keys: Tensor, values: Tensor, runs: Tensor) -> None:
        origin = torch.tensor(self.origin)[runs]
        rows = self.quantizer.quantize_key_rows(keys, origin), self.quantizer.quantize_values(values)
        self.keys += keys.clone().unbind()
        self.values += values.clone().unbind()
        self.rows += zip(*(part.unbind() for part in rows), strict=True)

    def lengths(self) -> list[int]:
        return self.plain.lengths.view(-1).tolist()

    def ids(self) -> Tensor:
        return self.plain.gather()[0].flatten(0, 1)[..., 0].long()  # [R, M]

    def both(self, name: str, *args: object) -> None:
        for segments in (self.segments, self.plain):
            getattr(segments, name)(*copy.deepcopy(args))

    def append(self, q: int) -> None:
        batch, heads = self.plain.batch, self.plain.heads
        keys, values = torch.randn(batch, heads, q, D) * 1.5, torch.randn(batch, heads, q, DV)
        keys, values = keys.to(self.dtype), values.to(self.dtype)
        numbers = self.tokens(keys, values)
        positions = torch.arange(self.seen, self.seen + q)[None].expand(batch, q)
        self.seen += q
        self.segments.append(keys, values, positions)
        self.plain.append(numbers, numbers, positions)
        for i in range(max(0, q - self.window), q):
            for run, number in enumerate(numbers[:, :, i].reshape(-1).long().tolist()):
                if self.window:
                    self.newest[run][self.next] = number
            self.next = (self.next + 1) % max(1, self.window)

    def crop(self, end: int) -> None:
        before, padded = self.lengths(), self.plain.positions().flatten(0, 1)
        kept = [(row[:stored] < end).tolist() for row, stored in zip(padded, before, strict=True)]
        self.both("crop", end)
        gone = {old - new for old, new in zip(before, self.lengths(), strict=True)}
        if self.window and len(gone) == 1 and all(row == sorted(row, reverse=True) for row in kept):
            self.next = (self.next - min(self.window, *gone)) % self.window
        self.seen = min(self.seen, end)

    def select(self, index: list[int]) -> None:
        heads = self.plain.heads
        self.both("select_sequences", torch.tensor(index))
        former = [i * heads + h for i in index for h in range(heads)]
        self.origin = [self.origin[run] for run in former]
        self.newest = [list(self.newest[run]) for run in former]

    def write(self) -> None:
        places = [(run, slot) for run, stored in enumerate(self.lengths()) for slot in range(stored)]
        chosen = torch.tensor(self.rng.sample(places, min(len(places), 5)), dtype=torch.int64).view(-1, 2)
        runs, slots = chosen.unbind(1)
        keys, values = torch.randn(len(chosen), D).to(self.dtype), torch.randn(len(chosen), DV).to(self.dtype)
        first = len(self.keys)
        self.record(keys, values, runs)
        numbers = torch.arange(first, len(self.keys), dtype=torch.float64)[:, None]
        positions = torch.randint(0, max(1, self.seen), (len(chosen),))
        self.segments.write(runs, slots, keys, values, positions)
        self.plain.write(runs, slots, numbers, numbers, positions)

    def step(self) -> str:
        rng, plain = self.rng, self.plain
        batch, heads, lengths = plain.batch, plain.heads, self.lengths()
        name = rng.choice(["append"] * 4 + ["keep", "evict", "evict one", "crop", "blank", "write", "select", "copy"])
        if name == "append":
            self.append(rng.choice([1, 1, 1, 2, 5, 40]))
        elif name == "keep":
            self.both("keep", torch.rand(batch, heads, plain.max_length) < rng.choice([0.3, 0.9, 1.0]))
        elif name in ("evict", "evict one"):
            counts = [rng.randint(0, min(3, *lengths)) for _ in range(batch)]
            slots = torch.stack([torch.randperm(max(1, min(lengths)))[:3] for _ in range(batch)])[:, None]
            if name == "evict":
                self.both("evict", slots, [min(count, slots.shape[-1]) for count in counts])
            elif min(lengths):
                self.both("evict", rng.randrange(min(lengths)), [1] * batch)
        elif name == "crop":
            self.crop(max(1, self.seen - rng.choice([0, 1, 3, 50])))
        elif name == "blank":
            self.plain.extend_blank(extra := torch.tensor([rng.choice([0, 1, 9]) for _ in lengths]))
            self.segments.extend_blank(extra)
            padded = self.plain.positions().flatten(0, 1)
            for run, stored in enumerate(self.lengths()):  # a blank slot is no token
                slots = torch.arange(stored)[padded[run, :stored] < 0]
                minus = torch.full((len(slots), 1), -1.0, dtype=torch.float64)
                self.plain.write(torch.full_like(slots, run), slots, minus, minus, torch.full_like(slots, -1))
        elif name == "write":
            self.write()
        elif name == "select":
            self.select([rng.randrange(batch) for _ in range(rng.randint(1, 3))])
        else:
            self.segments = copy.deepcopy(self.segments)
        return name

    def check(self) -> None:
        segments, plain, ids = self.segments, self.plain, self.ids()
        assert torch.equal(segments.lengths, plain.lengths)
        assert torch.equal(segments.positions(), plain.positions())
        assert torch.equal(segments.field("score"), plain.field("score"))
        assert segments.runs.uniform == plain.runs.uniform
        runs = segments.runs
        assert runs.keys.dtype == runs.values.dtype == torch.uint8
        assert runs.quantizer is segments.quantizer
        keys, values = (part.flatten(0, 1) for part in segments.gather())
        assert keys.dtype == values.dtype == self.dtype
        assert torch.equal(runs.quantizer.key_scale, self.quantizer.key_scale[self.origin])
        for run, stored in enumerate(self.lengths()):
            start = int(runs.start[run])
            for slot in range(stored):
                number, row = int(ids[run, slot]), start + slot
                place = row if runs.table is None else int(padded_rows(runs)[0][run, slot])
                got = runs.keys[place], runs.values[place]
                want = self.rows[number] if number >= 0 else [torch.zeros_like(part) for part in got]
                assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
                entry = -1 if runs.residual is None else int(runs.residual.slot_entry[row])
                assert (entry >= 0) == (number >= 0 and number in self.newest[run]), (
                    run,
                    slot,
                    number,
                    self.newest[run],
                )
                if entry >= 0:
                    assert torch.equal(runs.residual.keys[run, entry], self.keys[number])
                    assert torch.equal(runs.residual.values[run, entry], self.values[number])
                    assert torch.equal(keys[run, slot], self.keys[number])
                    assert torch.equal(values[run, slot], self.values[number])
                else:
                    assert torch.equal(keys[run, slot], runs.quantizer.dequantize_keys(got[0], run).to(self.dtype))
                    assert torch.equal(values[run, slot], runs.quantizer.dequantize_values(got[1]).to(self.dtype))
            assert not keys[run, stored:].any()
            assert not values[run, stored:].any()
            used = [] if runs.residual is None else runs.residual.slot_entry[start : start + stored].tolist()
            used = [entry for entry in used if entry >= 0]
            assert len(set(used)) == len(used)
        held = {runs.positions, runs.quantizer.key_scale, runs.quantizer.key_zero}
        held |= {runs.keys, runs.values} if runs.table is None else {runs.table}
        held |= {segments._fields[name] for name in segments._fields}
        held |= set() if runs.residual is None else {runs.residual.keys, runs.residual.values}
        if runs.table is not None:
            check_pages(segments)
        pages = 0 if runs.table is None else segments.table.nbytes
        assert segments.held_nbytes == pages + sum(tensor.untyped_storage().nbytes() for tensor in held)
        assert segments.nbytes + segments.side_nbytes == segments.held_nbytes + 2 * 8 * len(self.origin)


@pytest.mark.usefixtures("both_kinds")
@pytest.mark.parametrize("seed", range(60))
def test_random_sequences_of_operations(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    twin = Twin(rng, KINDS[seed % 2], rng.choice([0, 1, 4, 32]), rng.choice([torch.float32, torch.bfloat16]))
    twin.check()
    done = []
    for _ in range(14):
        done.append(twin.step())
        try:
            twin.check()
        except AssertionError as error:
            raise AssertionError(f"after {done}") from error


def made(kind: str, columns: int, window: int = 32, heads: int = 2, dim: int = 32) -> Segments:
    keys, values = torch.randn(1, heads, columns, dim), torch.randn(1, heads, columns, dim)
    keep = torch.ones(1, 1, columns, dtype=torch.bool)
    return Segments.from_dense(keys, values, keep, torch.arange(columns)[None], kv_dtype=kind, residual_length=window)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [0, 1, 8])
def test_the_newest_tokens_have_copies(kind: str, window: int) -> None:
    segments = made(kind, 40, window)
    for position in range(40, 60):
        segments.append(torch.randn(1, 2, 1, 32), torch.randn(1, 2, 1, 32), torch.tensor([[position]]))
        residual = segments.runs.residual
        if window == 0:
            assert residual is None
            continue
        entries = segments.field("residual")[0]
        positions = segments.positions()[0]
        assert torch.equal(entries >= 0, positions > position - window)
        assert all(
            sorted(run.tolist()) == list(range(window)) for run in entries.view(-1)[entries.view(-1) >= 0].view(2, -1)
        )


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_of_rows_scales_and_window(kind: str) -> None:
    columns, heads, dim, window = 1000, 2, 32, 16
    segments = made(kind, columns, window, heads, dim)
    capacity = columns + slack(columns)
    row = 2 * dim + 4 if kind == "int8" else dim + 4
    assert segments.nbytes == heads * (capacity * row + window * 2 * dim * 4)
    assert segments.side_nbytes == heads * (capacity * (4 + 2) + 2 * dim * 4 + 2 * 8)  # positions, entries, scales
    mask = torch.zeros(1, heads, columns, dtype=torch.bool)
    mask[..., :50] = True
    segments.keep(mask)
    assert segments.nbytes <= heads * ((50 + 2 * slack(50)) * row + window * 2 * dim * 4)


def test_nothing_is_quantized_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Appends quantize what is new, and nothing else quantizes at all."""
    segments = made("int8", 100)
    segments.add_field("score")
    quantized = []
    for name in ("quantize_keys", "quantize_key_rows", "quantize_values"):
        original = getattr(Quantizer, name)

        def counted(self: Quantizer, rows: Tensor, *args: Tensor, original=original) -> Tensor:  # type: ignore[no-untyped-def]
            quantized.append(rows.shape[:-1].numel())
            return original(self, rows, *args)

        monkeypatch.setattr(Quantizer, name, counted)
    segments.append(torch.randn(1, 2, 20, 32), torch.randn(1, 2, 20, 32), torch.arange(100, 120)[None])
    assert quantized == [40, 40]
    segments.keep(torch.rand(1, 2, 120) < 0.9)
    segments.evict(torch.tensor([[[3, 5]]]), [2])
    segments.select_sequences(torch.tensor([0, 0]))
    segments.keep(torch.rand(2, 2, segments.max_length) < 0.1)
    segments.crop(80)
    segments.extend_blank(torch.tensor([1, 0, 0, 3]))
    copy.deepcopy(segments).gather()
    assert quantized == [40, 40]


@pytest.mark.parametrize("kind", KINDS)
def test_beams_move_bytes_and_nothing_else(kind: str) -> None:
    keys, values = torch.randn(3, 2, 50, 8), torch.randn(3, 2, 50, 8)
    keep = torch.rand(3, 2, 50) < 0.6
    segments = Segments.from_dense(keys, values, keep, torch.arange(50).repeat(3, 1), kv_dtype=kind, residual_length=4)

    def bits(sequence: int) -> list[Tensor]:
        runs = segments.runs
        found = []
        for run in range(2 * sequence, 2 * sequence + 2):
            rows = slice(int(runs.start[run]), int(runs.start[run] + runs.length[run]))
            found += [runs.keys[rows], runs.values[rows], runs.residual.slot_entry[rows]]
            found += [
                runs.residual.keys[run],
                runs.residual.values[run],
                runs.quantizer.key_scale[run],
                runs.quantizer.key_zero[run],
            ]
        return [part.clone() for part in found]

    before = [bits(sequence) for sequence in range(3)]
    index = [2, 0, 2, 1]
    segments.select_sequences(torch.tensor(index))
    for sequence, former in enumerate(index):
        assert all(torch.equal(a, b) for a, b in zip(bits(sequence), before[former], strict=True))
    # From here on the copies live apart.
    segments.append(torch.randn(4, 2, 1, 8), torch.randn(4, 2, 1, 8), torch.tensor([[50]]))
    keys = segments.gather()[0]
    assert not torch.equal(keys[0], keys[2])


def test_ranges_come_from_the_whole_prompt_and_padding_has_no_say() -> None:
    keys, values = torch.randn(1, 1, 40, 4), torch.randn(1, 1, 40, 4)
    keys[..., :5, :] = 1e6
    keys[..., 20, :] = 9.0
    real = torch.arange(40)[None] >= 5
    keep = (real & (torch.arange(40) > 30))[:, None]  # the widest token is not kept, yet counts
    segments = Segments.from_dense(
        keys, values, keep, torch.arange(40)[None], kv_dtype="int4", residual_length=0, real=real
    )
    assert segments.quantizer is not None
    torch.testing.assert_close(segments.quantizer.key_zero + 15 * segments.quantizer.key_scale, torch.full((1, 4), 9.0))


def test_made_under_inference_mode_and_changed_outside() -> None:
    with torch.inference_mode():
        segments = made("int8", 20)
        segments.append(torch.ones(1, 2, 1, 32), torch.ones(1, 2, 1, 32), torch.tensor([[20]]))
    grown = torch.ones(1, 2, 40, 32, requires_grad=True) * 2
    segments.append(grown, grown, torch.arange(21, 61)[None])
    segments.select_sequences(torch.tensor([0, 0]))
    segments.append(torch.ones(2, 2, 1, 32), torch.ones(2, 2, 1, 32), torch.tensor([[61]]))
    segments.keep(torch.rand(2, 2, segments.max_length) < 0.5)
    segments.extend_blank(torch.tensor([1, 2, 0, 0]))
    place = torch.tensor([0])
    segments.write(place, place, torch.ones(1, 32), torch.ones(1, 32), place)
    assert torch.isfinite(segments.gather()[0]).all()


def test_steady_decoding_stays_in_place() -> None:
    segments = made("int4", 200)
    places = set()
    for step in range(60):
        segments.append(torch.randn(1, 2, 1, 32), torch.randn(1, 2, 1, 32), torch.tensor([[200 + step]]))
        segments.evict(7, [1])
        places.add((segments.runs.keys.data_ptr(), segments.runs.residual.keys.data_ptr()))
    assert len(places) == 1
    assert segments.max_length == 200


@pytest.mark.parametrize("moves", [1, 20])
def test_appends_regrow_rarely(moves: int) -> None:
    segments = made("int8", 1600)
    places = []
    for _ in range(10 * moves):
        segments.append(torch.zeros(1, 2, 1, 32), torch.zeros(1, 2, 1, 32), torch.zeros(1, 1, dtype=torch.int64))
        places.append(segments.runs.keys.data_ptr())
    assert sum(a != b for a, b in itertools.pairwise(places)) <= 2


def test_moved_slots_lose_their_copies_too() -> None:
    """The slot that an entry is taken from is found wherever it went, also after drafts came and went."""
    segments = made("int8", 20, window=4)

    def append(position: int) -> None:
        segments.append(torch.randn(1, 2, 1, 32), torch.randn(1, 2, 1, 32), torch.tensor([[position]]))

    segments.evict(2, [1])  # the newest slot moves there with its copy
    assert segments.field("residual")[0, 0, 2] == 3
    for position in (20, 21, 22):
        append(position)
    segments.crop(20)
    for position in (20, 21, 22, 23):
        append(position)
    entries = segments.field("residual")[0]
    assert bool((entries[:, 2] == -1).all())
    assert entries[:, -4:].sort(-1).values.tolist() == [[0, 1, 2, 3]] * 2
    assert int((entries >= 0).sum()) == 2 * 4
