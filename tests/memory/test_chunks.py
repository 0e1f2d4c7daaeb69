"""The chunk store against a store made of Python lists."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from foveakv.memory.chunks import ChunkStore
from foveakv.memory.segments import Segments

CHUNK, DIM, VALUE_DIM, GROUP = 8, 16, 12, 3
PLACES = ["host", "device", "disk"]


class Layer:
    """A prompt whose `dynamic` heads keep only their incomplete last chunk in the segments."""

    def __init__(self, dynamic: list[list[bool]], lengths: list[int], seed: int = 0, **options: Any) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.dynamic = torch.tensor(dynamic)
        self.batch, self.heads = self.dynamic.shape
        self.columns = max(lengths)
        dtype = options.pop("dtype", torch.float32)
        shape = (self.batch, self.heads, self.columns)
        self.keys = torch.randn(*shape, DIM, generator=generator).to(dtype)
        self.values = torch.randn(*shape, VALUE_DIM, generator=generator).to(dtype)
        self.pads = [self.columns - length for length in lengths]
        self.real = torch.arange(self.columns) >= torch.tensor(self.pads)[:, None]
        self.positions = torch.arange(self.columns).expand(self.batch, -1)
        self.counts = [length // CHUNK for length in lengths]
        self.store = ChunkStore(self.keys, self.values, self.real, self.positions, self.dynamic, chunk=CHUNK, **options)
        rank = self.real.cumsum(-1) - 1
        tail = self.real & (rank >= (torch.tensor(self.counts) * CHUNK)[:, None])
        keep = torch.where(self.dynamic[..., None], tail[:, None], self.real[:, None])
        self.segments = Segments.from_dense(self.keys, self.values, keep, self.positions)
        self.generator = generator

    def columns_of(self, b: int, number: int) -> list[int]:
        first = self.pads[b] + number * CHUNK
        return list(range(first, first + CHUNK))

    def query(self, q: int = 1) -> Tensor:
        return torch.randn(self.batch, self.heads * GROUP, q, DIM, generator=self.generator).to(self.keys.dtype) * 2

    def best(self, query: Tensor, b: int, h: int, slots: int, scaling: float = 0.25) -> set[int]:
        """The chunks that head h of sequence b should hold, computed the slow way."""
        digests = torch.stack([self.keys[b, h, self.columns_of(b, n)].float().mean(0) for n in range(self.counts[b])])
        wanted = torch.zeros(self.counts[b])
        for g in range(GROUP):
            for t in range(query.shape[2]):
                scores = digests @ query[b, h * GROUP + g, t].float() * scaling
                wanted = torch.maximum(wanted, scores.softmax(-1))
        return set(wanted.topk(min(slots, self.counts[b])).indices.tolist())

    def stored(self, b: int, h: int) -> list[int]:
        found = self.segments.positions()[b, h]
        return found[found >= 0].tolist()

    def check(self, expected: dict[tuple[int, int], set[int]]) -> None:
        """Every dynamic head holds its tail and the expected chunks, with the right keys and values."""
        keys, values = self.segments.gather()
        positions = self.segments.positions()
        for (b, h), chunks in expected.items():
            tail = list(range(self.pads[b] + self.counts[b] * CHUNK, self.columns))
            columns = [c for number in chunks for c in self.columns_of(b, number)]
            assert sorted(self.stored(b, h)) == sorted(tail + columns)
            for slot in range(int(self.segments.lengths[b, h])):
                column = int(positions[b, h, slot])
                assert torch.equal(keys[b, h, slot], self.keys[b, h, column])
                assert torch.equal(values[b, h, slot], self.values[b, h, column])


def step(layer: Layer, query: Tensor, in_place: bool) -> Tensor:
    """Positions [B, H, M] that a step with this query attends to, -1 where none."""
    if not in_place:
        layer.store.fetch(layer.segments, query, 0.25)
        return layer.segments.positions()
    layer.store.pick(query, 0.25)
    chosen = layer.store.chosen_positions()
    own = layer.segments.positions()
    return own if chosen is None else torch.cat([own, chosen], -1)


RAGGED: dict[str, Any] = {"dynamic": [[True, False, True], [False, True, False]], "lengths": [83, 46]}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip(place: str, dtype: torch.dtype) -> None:
    layer = Layer(**RAGGED, place=place, dtype=dtype)
    layer.store.reserve(layer.segments, torch.full((2, 3), 99))
    everything = {(b, h): set(range(layer.counts[b])) for b, h in layer.dynamic.nonzero().tolist()}
    layer.check(everything)
    assert layer.store.choosing == 0
    assert layer.store.extra_slots == 0
    assert layer.store.fetch(layer.segments, layer.query(), 0.25) == (0, 0)
    for b, h in (~layer.dynamic).nonzero().tolist():
        assert layer.stored(b, h) == list(range(layer.pads[b], layer.columns))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("q", [1, 4])
def test_fetch_holds_the_most_relevant_chunks(place: str, q: int) -> None:
    layer = Layer(**RAGGED, place=place)
    layer.store.reserve(layer.segments, torch.tensor([[3, 0, 5], [0, 2, 0]]))
    slots = {(0, 0): 3, (0, 2): 5, (1, 1): 2}
    held = {(b, h): set(range(layer.counts[b] - n, layer.counts[b])) for (b, h), n in slots.items()}
    layer.check(held)  # until something is asked for, the newest
    for _ in range(6):
        query = layer.query(q)
        asked, hits = layer.store.fetch(layer.segments, query, 0.25)
        expected = {(b, h): layer.best(query, b, h, n) for (b, h), n in slots.items()}
        layer.check(expected)
        assert asked == sum(slots.values()) * CHUNK
        assert hits == sum(len(expected[run] & held[run]) for run in slots) * CHUNK
        held = expected


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pick_names_what_fetch_would_copy(place: str, dtype: torch.dtype) -> None:
    slots = torch.tensor([[3, 0, 99], [0, 2, 0]])
    copying, reading = (Layer(**RAGGED, place=place, dtype=dtype) for _ in range(2))
    copying.store.reserve(copying.segments, slots)
    reading.store.reserve(reading.segments, slots, in_place=True)
    assert reading.store.chosen_slots.tolist() == [[3 * CHUNK, 0, 0], [0, 2 * CHUNK, 0]]
    assert reading.store.extra_slots == copying.store.extra_slots
    own = reading.segments.positions()
    for _ in range(5):
        query = copying.query()
        assert reading.store.pick(query, 0.25) == copying.store.fetch(copying.segments, query, 0.25)
        chosen = reading.store.chosen_positions()
        assert chosen is not None
        together = torch.cat([own, chosen], -1)
        expected = copying.segments.positions()
        pages = reading.store.pages()
        for b in range(2):
            for h in range(3):
                positions = [p for p in together[b, h].tolist() if p >= 0]
                assert sorted(positions) == [p for p in sorted(expected[b, h].tolist()) if p >= 0]
                table = pages.table[b * 3 + h]
                count = int((table >= 0).sum())
                assert bool((table[:count] >= 0).all()), "pages come first"
                columns = chosen[b, h][: count * CHUNK]
                assert torch.equal(pages.keys[table[:count]].view(-1, DIM), reading.keys[b, h, columns])
                assert torch.equal(pages.values[table[:count]].view(-1, VALUE_DIM), reading.values[b, h, columns])
    assert torch.equal(reading.segments.positions(), own), "nothing may be written"


def test_the_same_query_again_copies_nothing() -> None:
    layer = Layer(**RAGGED)
    layer.store.reserve(layer.segments, torch.full((2, 3), 3))
    query = layer.query()
    asked, hits = layer.store.fetch(layer.segments, query, 0.25)
    assert asked == 72 > hits
    before = layer.segments.positions().clone()
    assert layer.store.fetch(layer.segments, query, 0.25) == (72, 72)
    assert torch.equal(layer.segments.positions(), before)


def test_a_delta_load_leaves_the_other_slots_in_place() -> None:
    layer = Layer(**RAGGED)
    layer.store.reserve(layer.segments, torch.full((2, 3), 4))
    for _ in range(5):
        layer.store.fetch(layer.segments, layer.query(), 0.25)
        before = layer.segments.positions()
        query = layer.query()
        layer.store.fetch(layer.segments, query, 0.25)
        after = layer.segments.positions()
        for b, h in layer.dynamic.nonzero().tolist():
            stay = set(before[b, h].tolist()) & set(after[b, h].tolist())
            kept = torch.tensor([int(p) in stay for p in before[b, h]])
            assert torch.equal(before[b, h][kept], after[b, h][kept])


def test_relevance_in_blocks_equals_relevance_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(**RAGGED)
    query = layer.query(7)
    whole = layer.store.relevance(query, 0.25)
    monkeypatch.setattr("foveakv.memory.chunks._SCORES_AT_ONCE", 90)
    torch.testing.assert_close(layer.store.relevance(query, 0.25), whole)


def test_mixed_heads_some_complete_some_choosing_some_without_slots() -> None:
    layer = Layer([[True, True, True]], [83])
    layer.store.reserve(layer.segments, torch.tensor([[10, 4, 0]]))
    assert layer.store.choosing == 1
    assert layer.store.extra_slots == (10 - 4) * CHUNK
    assert layer.store.digests.shape == (1, DIM, 10)
    query = layer.query()
    assert layer.store.fetch(layer.segments, query, 0.25)[0] == 4 * CHUNK
    layer.check({(0, 0): set(range(10)), (0, 1): layer.best(query, 0, 1, 4), (0, 2): set()})


def test_decoded_tokens_stay_behind_the_slots() -> None:
    layer = Layer([[True, True]], [83])
    layer.store.reserve(layer.segments, torch.full((1, 2), 3))
    for step in range(20):
        new = torch.full((1, 2, 1, DIM), 100.0 + step)
        layer.segments.append(new, new[..., :VALUE_DIM], torch.tensor([[83 + step]]))
        query = layer.query()
        layer.store.fetch(layer.segments, query, 0.25)
        positions = layer.segments.positions()
        for h in range(2):
            best = layer.best(query, 0, h, 3)
            expected = [c for n in best for c in layer.columns_of(0, n)] + list(range(80, 84 + step))
            assert sorted(positions[0, h].tolist()) == sorted(expected)
        assert positions[0, 0, -step - 1 :].tolist() == list(range(83, 84 + step))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("index", [[1, 0], [0, 0], [1, 1], [1, 0, 1, 1], [0], [0, 1]])
def test_select_sequences(index: list[int], in_place: bool) -> None:
    layer = Layer(**RAGGED)
    slots = torch.tensor([[3, 0, 5], [0, 2, 0]])
    layer.store.reserve(layer.segments, slots, in_place=in_place)
    step(layer, layer.query(), in_place)
    data = layer.store._keys.data_ptr(), layer.store.digests.data_ptr()
    layer.segments.select_sequences(torch.tensor(index))
    layer.store.select_sequences(torch.tensor(index))
    assert (layer.store._keys.data_ptr(), layer.store.digests.data_ptr()) == data
    for _ in range(3):
        query = torch.randn(len(index), 3 * GROUP, 1, DIM, generator=layer.generator)
        positions = step(layer, query, in_place)
        for new, old in enumerate(index):
            for h in range(3):
                if not layer.dynamic[old, h]:
                    continue
                moved = torch.zeros(2, 3 * GROUP, 1, DIM)
                moved[old] = query[new]
                chunks = layer.best(moved, old, h, int(slots[old, h]))
                columns = [c for number in chunks for c in layer.columns_of(old, number)]
                columns += range(layer.pads[old] + layer.counts[old] * CHUNK, layer.columns)
                found = positions[new, h]
                assert sorted(found[found >= 0].tolist()) == sorted(columns)


def test_selecting_the_same_sequences_is_free_and_keeps_hits() -> None:
    layer = Layer(**RAGGED)
    layer.store.reserve(layer.segments, torch.full((2, 3), 2))
    query = layer.query()
    asked, _ = layer.store.fetch(layer.segments, query, 0.25)
    layer.store.select_sequences(torch.tensor([1, 0]))
    layer.segments.select_sequences(torch.tensor([1, 0]))
    assert layer.store.fetch(layer.segments, query[[1, 0]], 0.25) == (asked, asked)


def test_a_copy_goes_its_own_way_over_the_same_chunks() -> None:
    layer = Layer(**RAGGED)
    layer.store.reserve(layer.segments, torch.full((2, 3), 2))
    layer.store.fetch(layer.segments, layer.query(), 0.25)
    other = copy.copy(layer)
    other.segments, other.store = copy.deepcopy((layer.segments, layer.store))
    assert other.store._keys is layer.store._keys
    assert other.store.digests is layer.store.digests
    for _ in range(2):
        for one in (layer, other):
            query = one.query()
            one.store.fetch(one.segments, query, 0.25)
            one.check({(b, h): one.best(query, b, h, 2) for b, h in layer.dynamic.nonzero().tolist()})


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_bytes(place: str, in_place: bool) -> None:
    layer = Layer(**RAGGED, place=place)
    tokens = (2 * layer.counts[0] + layer.counts[1]) * CHUNK
    stored = tokens * (DIM + VALUE_DIM) * 4
    assert layer.store.extra_slots == tokens
    assert layer.store.host_nbytes == (0 if place == "device" else stored)
    assert layer.store.digest_nbytes == 3 * layer.counts[0] * DIM * 4
    layer.store.reserve(layer.segments, torch.full((2, 3), 2), in_place=in_place)
    if in_place:
        layer.store.pick(layer.query(), 0.25)
        budget = 3 * 2 * CHUNK * (DIM + VALUE_DIM) * 4
        assert layer.store.host_nbytes == (0 if place == "device" else stored - budget)
    else:
        layer.store.fetch(layer.segments, layer.query(), 0.25)
    tensors = [value for value in vars(layer.store).values() if isinstance(value, Tensor)] + [layer.store.digests]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
    assert layer.store.device_nbytes + layer.store.host_nbytes == sum(storages.values())
    assert layer.store.extra_slots == tokens - 3 * 2 * CHUNK


def test_nothing_keeps_the_dense_tensors_alive() -> None:
    layer = Layer([[True]], [64])
    dense = layer.keys.untyped_storage().data_ptr()
    assert all(
        value.untyped_storage().data_ptr() != dense for value in vars(layer.store).values() if isinstance(value, Tensor)
    )


@pytest.mark.parametrize(
    ("dynamic", "lengths"), [([[False, False]], [50]), ([[True, True]], [5]), ([[True], [True]], [40, 3])]
)
def test_heads_without_chunks(dynamic: list[list[bool]], lengths: list[int]) -> None:
    for place in PLACES:
        layer = Layer(dynamic, lengths, place=place)
        layer.store.reserve(layer.segments, torch.full(layer.dynamic.shape, 2))
        layer.store.fetch(layer.segments, layer.query(), 0.25)
        assert bool((layer.segments.positions()[layer.segments.valid()] >= 0).all())


def test_a_later_step_may_leave_inference_mode() -> None:
    with torch.inference_mode():
        layer = Layer(**RAGGED)
        layer.store.reserve(layer.segments, torch.full((2, 3), 2))
        layer.store.fetch(layer.segments, layer.query(), 0.25)
    layer.store.select_sequences(torch.tensor([1, 0]))
    layer.segments.select_sequences(torch.tensor([1, 0]))
    layer.store.fetch(layer.segments, layer.query(), 0.25)
