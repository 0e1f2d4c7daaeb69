"""The chunk store against a store made of Python lists."""

from __future__ import annotations

import copy

import pytest
import torch
from offloaded import CHUNK, DIM, GROUP, RAGGED, VALUE_DIM, Layer, attended, fetch, pick
from torch import Tensor

PLACES = ["host", "device", "disk"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip(place: str, dtype: torch.dtype) -> None:
    layer = Layer(**RAGGED, place=place, dtype=dtype)
    layer.store.reserve(layer.segments, torch.full((2, 3), 99))
    everything = {(b, h): set(range(layer.counts[b])) for b, h in layer.dynamic.nonzero().tolist()}
    layer.check(everything)
    assert layer.store.choosing == 0
    assert layer.store.extra_slots == 0
    assert fetch(layer, layer.query()) == (0, 0)
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
        asked, hits = fetch(layer, query)
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
        assert pick(reading, query) == fetch(copying, query)
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
    asked, hits = fetch(layer, query)
    assert asked == 72 > hits
    before = layer.segments.positions().clone()
    assert fetch(layer, query) == (72, 72)
    assert torch.equal(layer.segments.positions(), before)


def test_a_delta_load_leaves_the_other_slots_in_place() -> None:
    layer = Layer(**RAGGED)
    layer.store.reserve(layer.segments, torch.full((2, 3), 4))
    for _ in range(5):
        fetch(layer, layer.query())
        before = layer.segments.positions()
        query = layer.query()
        fetch(layer, query)
        after = layer.segments.positions()
        for b, h in layer.dynamic.nonzero().tolist():
            stay = set(before[b, h].tolist()) & set(after[b, h].tolist())
            kept = torch.tensor([int(p) in stay for p in before[b, h]])
            assert torch.equal(before[b, h][kept], after[b, h][kept])


def test_relevance_in_blocks_equals_relevance_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(**RAGGED)
    query = layer.query(7)
    whole = layer.store.relevance(query, 0.25)
    monkeypatch.setattr("foveakv.memory.digests._SCORES_AT_ONCE", 90)
    torch.testing.assert_close(layer.store.relevance(query, 0.25), whole)


def test_mixed_heads_some_complete_some_choosing_some_without_slots() -> None:
    layer = Layer([[True, True, True]], [83])
    layer.store.reserve(layer.segments, torch.tensor([[10, 4, 0]]))
    assert layer.store.choosing == 1
    assert layer.store.extra_slots == (10 - 4) * CHUNK
    assert layer.store.digests.shape == (1, DIM, 10)
    query = layer.query()
    assert fetch(layer, query)[0] == 4 * CHUNK
    layer.check({(0, 0): set(range(10)), (0, 1): layer.best(query, 0, 1, 4), (0, 2): set()})


def test_decoded_tokens_stay_behind_the_slots() -> None:
    layer = Layer([[True, True]], [83])
    layer.store.reserve(layer.segments, torch.full((1, 2), 3))
    for step in range(20):
        new = torch.full((1, 2, 1, DIM), 100.0 + step)
        layer.segments.append(new, new[..., :VALUE_DIM], torch.tensor([[83 + step]]))
        query = layer.query()
        fetch(layer, query)
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
    attended(layer, layer.query(), in_place)
    data = layer.store._keys.data_ptr(), layer.store.digests.data_ptr()
    layer.segments.select_sequences(torch.tensor(index))
    layer.store.select_sequences(torch.tensor(index))
    assert (layer.store._keys.data_ptr(), layer.store.digests.data_ptr()) == data
    for _ in range(3):
        query = torch.randn(len(index), 3 * GROUP, 1, DIM, generator=layer.generator)
        positions = attended(layer, query, in_place)
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
    asked, _ = fetch(layer, query)
    layer.store.select_sequences(torch.tensor([1, 0]))
    layer.segments.select_sequences(torch.tensor([1, 0]))
    assert fetch(layer, query[[1, 0]]) == (asked, asked)


def test_a_copy_goes_its_own_way_over_the_same_chunks() -> None:
    layer = Layer(**RAGGED)
    layer.store.reserve(layer.segments, torch.full((2, 3), 2))
    fetch(layer, layer.query())
    other = copy.copy(layer)
    other.segments, other.store = copy.deepcopy((layer.segments, layer.store))
    assert other.store._keys is layer.store._keys
    assert other.store.digests is layer.store.digests
    for _ in range(2):
        for one in (layer, other):
            query = one.query()
            fetch(one, query)
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
        pick(layer, layer.query())
        budget = 3 * 2 * CHUNK * (DIM + VALUE_DIM) * 4
        assert layer.store.host_nbytes == (0 if place == "device" else stored - budget)
    else:
        fetch(layer, layer.query())
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
        fetch(layer, layer.query())
        assert bool((layer.segments.positions()[layer.segments.valid()] >= 0).all())


def test_a_later_step_may_leave_inference_mode() -> None:
    with torch.inference_mode():
        layer = Layer(**RAGGED)
        layer.store.reserve(layer.segments, torch.full((2, 3), 2))
        fetch(layer, layer.query())
    layer.store.select_sequences(torch.tensor([1, 0]))
    layer.segments.select_sequences(torch.tensor([1, 0]))
    fetch(layer, layer.query())


@pytest.mark.parametrize("lengths", [[5 * CHUNK], [CHUNK - 1], [5 * CHUNK, CHUNK - 1]])
def test_overlaps_where_nothing_is_stored_or_offloaded(lengths: list[int]) -> None:
    """A prompt of complete chunks stores no slot of a dynamic head; one below a chunk offloads nothing."""
    layer = Layer([[True, True]] * len(lengths), lengths)
    two = torch.full((len(lengths), 2), 2)
    assert not layer.store.overlaps(layer.segments.positions(), two)
    everything = torch.where(layer.real, layer.positions, -1)[:, None].expand(-1, 2, -1)
    assert layer.store.overlaps(everything, two) == (max(lengths) >= CHUNK)
    assert not layer.store.overlaps(everything, torch.zeros_like(two))
