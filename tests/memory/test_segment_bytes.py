"""Bytes of segments: what is stored and its slack, and how seldom buffers move."""

from __future__ import annotations

import itertools

import pytest
import torch
from test_segments import DV, D, make

from foveakv.memory.layout import slack
from foveakv.memory.segments import Segments


def make_zeros(keep: torch.Tensor) -> tuple[Segments, torch.Tensor]:
    """Slots with keys and values of one number."""
    batch, heads, columns = keep.shape
    keys = torch.zeros(batch, heads, columns, 1)
    return Segments.from_dense(keys, keys, keep, torch.arange(columns).repeat(batch, 1)), keys


def held(segments: Segments, itemsize: int = 4) -> int:
    """Most bytes that keys and values may take: lengths and twice the slack of every run."""
    slots = sum(n + 2 * slack(n) for n in segments.lengths.view(-1).tolist())
    return slots * (D + DV) * itemsize


@pytest.mark.parametrize("ragged", [False, True])
def test_bytes_follow_what_is_stored(ragged: bool) -> None:
    columns = 2000
    keep = torch.ones(2, 2, columns, dtype=torch.bool)
    if ragged:
        keep[0, 0, 100:] = False
    segments, _ = make(2, 2, columns, keep)
    full = segments.nbytes
    assert full <= held(segments)
    runs = segments.runs
    assert full == runs.keys.untyped_storage().nbytes() + runs.values.untyped_storage().nbytes()
    assert segments.side_nbytes == runs.keys.shape[0] * (4 + 4) + 2 * 4 * 8  # positions and one field, starts, lengths
    mask = torch.zeros(2, 2, columns, dtype=torch.bool)
    mask[:, :, :50] = True
    segments.keep(mask)
    assert segments.nbytes <= held(segments) < full / 10
    for _ in range(500):
        segments.append(torch.randn(2, 2, 1, D), torch.randn(2, 2, 1, DV), torch.zeros(2, 1, dtype=torch.int64))
        assert segments.nbytes <= held(segments)
    segments.crop(0)
    assert segments.nbytes <= 2 * 4 * 8 * 2 * 4 * (D + DV)


@pytest.mark.parametrize("ragged", [False, True])
def test_appends_regrow_rarely(ragged: bool) -> None:
    keep = torch.ones(1, 2, 1600, dtype=torch.bool)
    if ragged:
        keep[0, 0, 10:] = False  # a short run must not force a regrow of the long one every 8 tokens
    segments, _ = make(1, 2, 1600, keep)
    places = []
    for _ in range(200):
        segments.append(torch.zeros(1, 2, 1, D), torch.zeros(1, 2, 1, DV), torch.zeros(1, 1, dtype=torch.int64))
        places.append(segments.runs.keys.data_ptr())
    moves = sum(a != b for a, b in itertools.pairwise(places))
    assert moves <= (4 if ragged else 2)


def test_steady_eviction_stays_in_place() -> None:
    segments, _ = make(1, 2, 200, torch.ones(1, 1, 200, dtype=torch.bool))
    places = set()
    for step in range(100):
        segments.append(torch.zeros(1, 2, 1, D), torch.zeros(1, 2, 1, DV), torch.tensor([[200 + step]]))
        mask = torch.ones(1, 2, 201, dtype=torch.bool)
        mask[:, :, 4] = False
        segments.keep(mask)
        places.add(segments.runs.keys.data_ptr())
        assert segments.max_length == 200
    assert len(places) == 1
    assert segments.positions()[0, 0].tolist() == [0, 1, 2, 3, *range(104, 300)]


@pytest.mark.parametrize("ragged", [False, True])
def test_a_thousand_appends_at_32k_move_few_bytes(ragged: bool) -> None:
    """Amortised: what regrowing copied is at most a few times what was appended."""
    columns, steps = 2**15, 1000
    keep = torch.ones(1, 2, columns, dtype=torch.bool)
    if ragged:
        keep[0, 0, columns // 2 :] = False
    segments, _ = make_zeros(keep)
    moves, regrown, row = 0, 0, 2 * 4  # bytes of a slot: one float of key and value
    place = segments.runs.keys.data_ptr()
    new = torch.ones(1, 2, 1, 1)
    for step in range(steps):
        stored = segments.total
        segments.append(new, new, torch.tensor([[columns + step]]))
        if segments.runs.keys.data_ptr() != place:
            place = segments.runs.keys.data_ptr()
            regrown, moves = regrown + stored * row, moves + 1
    appended = steps * 2 * row
    assert segments.total == int(keep.sum()) + 2 * steps
    assert moves <= 1
    for _ in range(5 * columns // 16):  # a slack that is used up again and again
        stored = segments.total
        segments.append(new, new, torch.tensor([[0]]))
        appended += 2 * row
        if segments.runs.keys.data_ptr() != place:
            place = segments.runs.keys.data_ptr()
            regrown += stored * row
    assert regrown <= 20 * appended


@pytest.mark.parametrize("ragged", [False, True])
def test_evicting_much_frees_memory(ragged: bool) -> None:
    keep = torch.ones(1, 2, 1000, dtype=torch.bool)
    if ragged:
        keep[0, 0, 900:] = False
    segments, _ = make(1, 2, 1000, keep)
    full = segments.nbytes
    for _ in range(8):
        segments.evict(torch.arange(100)[None, None], [100])
        assert segments.nbytes <= held(segments)
    assert segments.nbytes < full / 3
    assert segments.lengths.tolist() == [[100 if ragged else 200, 200]]
