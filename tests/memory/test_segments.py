"""Segments against a plain model: a Python list of slots for every run."""

from __future__ import annotations

import copy
import gc
import random
import weakref

import pytest
import torch
from segment_kinds import both_kinds, check_pages, from_dense, paged

from foveakv.memory.runs import dense
from foveakv.memory.segments import Segments

__all__ = ["both_kinds"]
D, DV = 3, 2
pytestmark = pytest.mark.usefixtures("both_kinds")


class Model:
    """runs[b][h] is a list of (key, value, position, field) with tuples of floats."""

    def __init__(self, runs: list[list[list[tuple]]]) -> None:
        self.runs = runs

    @property
    def max_length(self) -> int:
        return max(len(run) for row in self.runs for run in row)

    def padded(self, part: int, beyond: object) -> torch.Tensor:
        longest = self.max_length
        rows = [[[slot[part] for slot in run] + [beyond] * (longest - len(run)) for run in row] for row in self.runs]
        return torch.tensor(rows, dtype=torch.float64)


def make(batch: int, heads: int, columns: int, keep: torch.Tensor) -> tuple[Segments, Model]:
    keys, values = torch.randn(batch, heads, columns, D), torch.randn(batch, heads, columns, DV)
    positions = torch.arange(columns).repeat(batch, 1)
    segments = from_dense(keys, values, keep, positions)
    segments.add_field("score", fill=0.5)
    wide = keep.expand(batch, heads, columns)
    model = Model(
        [
            [
                [
                    (tuple(keys[b, h, c].tolist()), tuple(values[b, h, c].tolist()), c, 0.5)
                    for c in range(columns)
                    if wide[b, h, c]
                ]
                for h in range(heads)
            ]
            for b in range(batch)
        ]
    )
    return segments, model


def check(segments: Segments, model: Model) -> None:
    batch, heads, longest = len(model.runs), len(model.runs[0]), model.max_length
    lengths = torch.tensor([[len(run) for run in row] for row in model.runs])
    assert (segments.batch, segments.heads, segments.max_length) == (batch, heads, longest)
    assert torch.equal(segments.lengths, lengths)
    assert torch.equal(segments.valid(), torch.arange(longest) < lengths[..., None])
    keys, values = segments.gather()
    shape = (batch, heads, longest, -1)
    assert torch.equal(keys.double(), model.padded(0, (0.0,) * D).view(keys.shape))
    assert torch.equal(values.double(), model.padded(1, (0.0,) * DV).view(values.shape))
    assert torch.equal(segments.positions().double(), model.padded(2, -1).view(shape[:3]))
    assert segments.positions().dtype == torch.int64
    assert torch.equal(segments.field("score").double(), model.padded(3, 0).view(shape[:3]))
    assert torch.equal(segments.view("score"), segments.field("score"))
    assert torch.equal(segments.view_positions().long(), segments.positions())
    assert segments.total == int(lengths.sum())
    assert segments.sequence_lengths == lengths[:, 0].tolist()
    assert segments.held_nbytes == segments.nbytes + segments.side_nbytes - 2 * 8 * batch * heads
    assert segments.overhead_nbytes == segments.nbytes - segments.total * (D + DV) * 4
    runs = segments.runs
    assert torch.equal(runs.length.cpu(), lengths.view(-1))
    assert torch.equal(runs.start, runs.start_host)
    assert torch.equal(runs.length, runs.length_host)
    ends = runs.start + runs.length
    assert bool((ends[:-1] <= runs.start[1:]).all())
    assert int(ends[-1]) <= runs.positions.shape[0]
    assert runs.uniform == bool((lengths == longest).all())
    if paged():
        check_pages(segments)
    elif runs.uniform:
        assert torch.equal(segments.dense()[0], keys)
        assert torch.equal(segments.dense()[1], values)
        assert segments.dense()[0].untyped_storage().data_ptr() == runs.keys.untyped_storage().data_ptr()


def evicted(run: list[tuple], leaving: list[int]) -> list[tuple]:
    """The rule of `Segments.evict` in words: holes, in the order named, take the last slots that survive, in order."""
    end = len(run) - len(leaving)
    kept = dict(enumerate(run))
    holes = [m for m in leaving if m < end]
    survivors = [m for m in range(end, len(run)) if m not in leaving]
    for hole, survivor in zip(holes, survivors, strict=True):
        kept[hole] = run[survivor]
    return [kept[m] for m in range(end)]


def random_step(rng: random.Random, segments: Segments, model: Model) -> str:
    batch, heads = segments.batch, segments.heads
    runs = [run for row in model.runs for run in row]
    names = ["append", "append", "keep", "uniform keep", "crop", "blank", "write", "select", "field", "put", "add"]
    name = rng.choice([*names, "evict", "uniform evict", "evict one"])
    if name == "append":
        q = rng.choice([1, 1, 2, 5, 40])
        keys, values = torch.randn(batch, heads, q, D), torch.randn(batch, heads, q, DV)
        if rng.random() < 0.5:  # the memory order of a projection
            keys = keys.transpose(1, 2).contiguous().transpose(1, 2)
        positions = torch.randint(0, 100, (batch, q))
        segments.append(keys, values, positions)
        for b in range(batch):
            for h in range(heads):
                for i in range(q):
                    key, value = tuple(keys[b, h, i].tolist()), tuple(values[b, h, i].tolist())
                    model.runs[b][h].append((key, value, int(positions[b, i]), 0.5))
    elif name == "keep":
        mask = torch.rand(batch, heads, segments.max_length) < rng.choice([0.0, 0.3, 0.9, 1.0])
        segments.keep(mask)
        model.runs = [
            [[slot for m, slot in enumerate(model.runs[b][h]) if mask[b, h, m]] for h in range(heads)]
            for b in range(batch)
        ]
    elif name == "uniform keep":
        most = min(len(run) for run in runs)
        count = rng.randint(0, most)
        chosen = [[sorted(rng.sample(range(len(run)), count)) for run in row] for row in model.runs]
        mask = torch.zeros(batch, heads, segments.max_length, dtype=torch.bool)
        for b in range(batch):
            for h in range(heads):
                mask[b, h, chosen[b][h]] = True
        segments.keep(mask)
        model.runs = [[[model.runs[b][h][m] for m in chosen[b][h]] for h in range(heads)] for b in range(batch)]
    elif name in ("evict", "uniform evict"):
        least = [min(len(run) for run in row) for row in model.runs]
        counts = [rng.choice([0, 1, rng.randint(0, most)]) if most else 0 for most in least]
        if name == "uniform evict":
            counts = [min(rng.choice([1, 1, 4]), *least)] * batch
        shared = rng.random() < 0.5
        n = max(counts) + rng.randint(0, 2)
        slots = torch.randint(0, 1000, (batch, 1 if shared else heads, n))  # what lies behind the counts is ignored
        for b, row in enumerate(model.runs):
            for h, run in enumerate(row):
                if h == 0 or not shared:
                    leaving = rng.sample(range(least[b]), counts[b])
                    slots[b, h, : counts[b]] = torch.tensor(leaving, dtype=torch.int64)
                row[h] = evicted(run, leaving)
        segments.evict(slots, counts)
    elif name == "evict one":
        least = min(len(run) for run in runs)
        counts = [rng.choice([1, 1, 1, 0]) if least else 0] * batch
        if rng.random() < 0.3 and least:
            counts = [rng.randint(0, 1) for _ in range(batch)]
        slot = rng.randrange(max(1, least))
        model.runs = [
            [evicted(run, [slot][:count]) for run in row] for row, count in zip(model.runs, counts, strict=True)
        ]
        segments.evict(slot, counts)
    elif name == "put":
        counts = [rng.randint(0, min(len(run) for run in row)) for row in model.runs]
        slots = torch.zeros(batch, heads, max(counts), dtype=torch.int64)
        for b, row in enumerate(model.runs):
            for h, run in enumerate(row):
                chosen = rng.sample(range(len(run)), counts[b])
                slots[b, h, : counts[b]] = torch.tensor(chosen, dtype=torch.int64)
                for m in chosen:
                    run[m] = (*run[m][:3], 7.25)
        segments.put("score", slots, counts, 7.25)
    elif name == "add":
        amounts = torch.randint(0, 100, (batch, heads, segments.max_length)) / 4.0
        before = segments.field("score")
        segments.add("score", amounts)
        after = before + amounts
        model.runs = [
            [[(*slot[:3], after[b, h, m].item()) for m, slot in enumerate(run)] for h, run in enumerate(row)]
            for b, row in enumerate(model.runs)
        ]
    elif name == "crop":
        end = rng.randint(0, 110)
        segments.crop(end)
        model.runs = [[[slot for slot in run if slot[2] < end] for run in row] for row in model.runs]
    elif name == "blank":
        extra = torch.tensor([rng.choice([0, 0, 1, 20]) for _ in runs])
        segments.extend_blank(extra)
        for run, count in zip(runs, extra.tolist(), strict=True):
            run += [((0.0,) * D, (0.0,) * DV, -1, 0.5)] * count
    elif name == "write":
        places = [(r, m) for r, run in enumerate(runs) for m in range(len(run))]
        places = rng.sample(places, min(len(places), 7))
        index = torch.tensor(places, dtype=torch.int64).view(-1, 2)
        keys, values = torch.randn(len(places), D), torch.randn(len(places), DV)
        positions = torch.randint(0, 100, (len(places),))
        segments.write(index[:, 0], index[:, 1], keys, values, positions)
        for i, (r, m) in enumerate(places):
            runs[r][m] = (tuple(keys[i].tolist()), tuple(values[i].tolist()), int(positions[i]), runs[r][m][3])
    elif name == "select":
        index = [rng.randrange(batch) for _ in range(rng.randint(1, 3))]
        segments.select_sequences(torch.tensor(index))
        model.runs = [copy.deepcopy(model.runs[i]) for i in index]
    else:
        padded = torch.rand(batch, heads, segments.max_length)
        segments.set_field("score", padded)
        model.runs = [
            [[(*slot[:3], padded[b, h, m].item()) for m, slot in enumerate(run)] for h, run in enumerate(row)]
            for b, row in enumerate(model.runs)
        ]
    return name


@pytest.mark.parametrize("seed", range(40))
def test_random_sequences_of_operations(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    batch, heads, columns = rng.randint(1, 3), rng.randint(1, 4), rng.choice([0, 1, 7, 33])
    kind = rng.choice(["all", "shared", "ragged"])
    keep = torch.ones(batch, 1, columns, dtype=torch.bool)
    if kind == "shared":
        keep = torch.rand(batch, 1, columns) < 0.6
    elif kind == "ragged":
        keep = torch.rand(batch, heads, columns) < torch.rand(batch, heads, 1)
    segments, model = make(batch, heads, columns, keep)
    check(segments, model)
    done = []
    for _ in range(14):
        done.append(random_step(rng, segments, model))
        try:
            check(segments, model)
        except AssertionError as error:
            raise AssertionError(f"after {done}") from error


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])
def test_from_dense_reads_any_memory_order(layout: str) -> None:
    keys, values = torch.randn(2, 3, 10, D), torch.randn(2, 3, 10, DV)
    keep = torch.rand(2, 3, 10) < 0.5
    want = from_dense(keys, values, keep, torch.arange(10).repeat(2, 1)).gather()
    if layout == "transposed":
        keys, values = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (keys, values))
    elif layout == "sliced":
        keys, values = (torch.cat([x, x], -1)[..., : x.shape[-1]] for x in (keys, values))
    got = from_dense(keys, values, keep, torch.arange(10).repeat(2, 1)).gather()
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_nothing_keeps_the_dense_tensors_alive(share: float) -> None:
    keys, values = torch.randn(1, 2, 1000, 16), torch.randn(1, 2, 1000, 16)
    storages = [weakref.ref(keys.untyped_storage()), weakref.ref(values.untyped_storage())]
    keep = torch.rand(1, 2, 1000) < share
    segments = from_dense(keys, values, keep, torch.arange(1000)[None])
    runs = segments.runs
    assert runs.keys.untyped_storage().data_ptr() != keys.untyped_storage().data_ptr()
    del keys, values
    gc.collect()
    assert all(storage() is None for storage in storages)


@pytest.mark.parametrize("ragged", [False, True])
def test_steady_eviction_of_single_slots_touches_those_slots_alone(ragged: bool) -> None:
    keep = torch.ones(2, 2, 500, dtype=torch.bool)
    if ragged:
        keep[1, 0, 300:] = False
    segments, _ = make(2, 2, 500, keep)
    if paged():  # rows are not in the order of `start`
        return
    place, before = segments.runs.keys.data_ptr(), segments.runs.keys.clone()
    for step in range(100):
        segments.append(torch.ones(2, 2, 1, D), torch.ones(2, 2, 1, DV), torch.tensor([[500 + step]]))
        segments.evict(torch.full((2, 1, 1), 4 + step), [1, 1])
    assert segments.runs.keys.data_ptr() == place
    start, length = segments.runs.start.tolist(), segments.runs.length.tolist()
    changed = set((segments.runs.keys != before).any(-1).nonzero()[:, 0].tolist())
    assert changed <= {first + slot for first, n in zip(start, length, strict=True) for slot in (*range(4, 104), n)}
    held = segments.positions()
    assert set(held[0, 0].tolist()) == {*range(4), *range(104, 600)}
    assert held[0, 0, 4:104].tolist() == list(range(500, 600))


def test_eviction_of_uneven_counts_and_back_to_even() -> None:
    segments, _ = make(2, 1, 10, torch.ones(2, 1, 10, dtype=torch.bool))
    segments.evict(torch.tensor([[[0, 9]], [[3, 0]]]), [2, 1])
    assert segments.lengths.tolist() == [[8], [9]]
    assert segments.positions()[0, 0].tolist() == [8, 1, 2, 3, 4, 5, 6, 7, -1]
    assert segments.positions()[1, 0].tolist() == [0, 1, 2, 9, 4, 5, 6, 7, 8]
    segments.evict(torch.tensor([[[0]], [[8]]]), [0, 1])
    assert segments.runs.uniform
    segments.evict(torch.zeros(2, 1, 1, dtype=torch.int64), [0, 0])
    assert segments.max_length == 8
    for slots, counts in ((torch.zeros(2, 1, 1, dtype=torch.int64), [2, 0]), (0, [1, 1, 1]), (0, [1, 2])):
        with pytest.raises(ValueError, match="evict expects"):
            segments.evict(slots, counts)


def test_a_ragged_memory_that_becomes_even_gets_dense_views() -> None:
    keep = torch.ones(1, 3, 40, dtype=torch.bool)
    keep[0, 1, 20:] = False
    segments, _ = make(1, 3, 40, keep)
    assert not segments.runs.uniform
    if paged():
        return
    with pytest.raises(ValueError, match="uniform"):
        dense(segments.runs)
    segments.extend_blank(torch.tensor([0, 20, 0]))
    assert segments.runs.uniform
    assert segments.positions()[0, 1].tolist() == [*range(20), *[-1] * 20]
    mask = torch.ones(1, 3, 40, dtype=torch.bool)
    mask[0, 0, :5] = False
    segments.keep(mask)
    mask = torch.ones(1, 3, 40, dtype=torch.bool)
    mask[0, 1:, :5] = False
    segments.keep(mask)
    assert segments.dense()[0].shape == (1, 3, 35, D)


def test_select_identity_is_free_and_beams_copy() -> None:
    segments, model = make(2, 2, 9, torch.rand(2, 2, 9) < 0.7)
    place = segments.runs.keys.data_ptr()
    segments.select_sequences(torch.tensor([0, 1]))
    assert segments.runs.keys.data_ptr() == place
    segments.select_sequences(torch.tensor([1, 1, 0, 1]))
    model.runs = [copy.deepcopy(model.runs[i]) for i in (1, 1, 0, 1)]
    check(segments, model)
    segments.append(torch.ones(4, 2, 1, D), torch.ones(4, 2, 1, DV), torch.full((4, 1), 9))
    for row in model.runs:
        for run in row:
            run.append(((1.0,) * D, (1.0,) * DV, 9, 0.5))
    check(segments, model)


def test_a_runs_object_keeps_describing_its_moment() -> None:
    segments, _ = make(1, 2, 20, torch.rand(1, 2, 20) < 0.7)
    runs, before = segments.runs, segments.lengths
    segments.append(torch.zeros(1, 2, 1, D), torch.zeros(1, 2, 1, DV), torch.tensor([[20]]))
    assert torch.equal(runs.length.view(1, 2), before)
    assert runs.max_length == int(before.max())


@pytest.mark.parametrize("ragged", [False, True])
def test_deep_copies_are_independent(ragged: bool) -> None:
    keep = torch.rand(1, 2, 20) < 0.7 if ragged else torch.ones(1, 1, 20, dtype=torch.bool)
    segments, model = make(1, 2, 20, keep)
    twin = copy.deepcopy(segments)
    for _ in range(3):
        segments.append(torch.ones(1, 2, 9, D), torch.ones(1, 2, 9, DV), torch.zeros(1, 9, dtype=torch.int64))
    check(twin, model)
    twin.append(torch.full((1, 2, 1, D), 2.0), torch.ones(1, 2, 1, DV), torch.tensor([[77]]))
    for run in model.runs[0]:
        run.append(((2.0,) * D, (1.0,) * DV, 77, 0.5))
    check(twin, model)


@pytest.mark.parametrize("ragged", [False, True])
def test_made_under_inference_mode_and_changed_outside(ragged: bool) -> None:
    keep = torch.rand(1, 2, 20) < 0.7 if ragged else torch.ones(1, 1, 20, dtype=torch.bool)
    with torch.inference_mode():
        segments, _ = make(1, 2, 20, keep)
        segments.append(torch.ones(1, 2, 1, D), torch.ones(1, 2, 1, DV), torch.tensor([[20]]))
    grown = torch.ones(1, 2, 30, D, requires_grad=True) * 2
    segments.append(grown, torch.ones(1, 2, 30, DV), torch.zeros(1, 30, dtype=torch.int64))
    segments.set_field("score", torch.rand(1, 2, segments.max_length))
    segments.extend_blank(torch.tensor([1, 2]))
    segments.keep(torch.rand(1, 2, segments.max_length) < 0.5)
    assert not segments.runs.keys.requires_grad


def test_bfloat16_and_fields_of_other_types() -> None:
    keys = torch.randn(1, 2, 6, D, dtype=torch.bfloat16)
    keep = torch.tensor([[[1, 1, 0, 1, 0, 1], [1, 0, 0, 0, 0, 0]]]).bool()
    segments = from_dense(keys, keys[..., :DV], keep, torch.arange(6)[None])
    assert segments.runs.keys.dtype == torch.bfloat16
    assert torch.equal(segments.gather()[0][0, 0], keys[0, 0, keep[0, 0]])
    segments.add_field("bin", torch.arange(8).view(1, 2, 4), dtype=torch.int64, fill=-7)
    segments.append(keys[:, :, :1].float(), keys[:, :, :1, :DV], torch.tensor([[6]]))
    assert segments.field("bin").tolist() == [[[0, 1, 2, 3, -7], [4, -7, 0, 0, 0]]]


def test_wrong_use_is_explained() -> None:
    segments, _ = make(1, 2, 6, torch.rand(1, 2, 6) < 2)
    with pytest.raises(ValueError, match="positions"):
        segments.append(torch.zeros(1, 2, 1, D), torch.zeros(1, 2, 1, DV), torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="bool mask"):
        segments.keep(torch.ones(1, 2, 5, dtype=torch.bool))
    one = torch.tensor([0])
    with pytest.raises(ValueError, match="extend_blank"):
        segments.write(one, torch.tensor([6]), torch.zeros(1, D), torch.zeros(1, DV), one)
    with pytest.raises(ValueError, match="below 1"):
        segments.select_sequences(torch.tensor([1]))
    with pytest.raises(ValueError, match="exists already"):
        segments.add_field("score")
    with pytest.raises(KeyError, match="add_field"):
        segments.field("other")
    with pytest.raises(ValueError, match="keep must be bool"):
        from_dense(*[torch.zeros(1, 2, 3, D)] * 2, torch.ones(1, 2, 4).bool(), torch.arange(3)[None])
