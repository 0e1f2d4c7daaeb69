"""Failures in the middle of a change to a pool: no page is lost, and nobody writes into a page of another."""

from __future__ import annotations

import copy
import gc
import random

import pytest
import torch
from pool_play import Faults, contents, copied_rows, make, memory, play, same
from segment_kinds import check_pages

from foveakv.errors import PoolFullError
from foveakv.memory import page_space
from foveakv.memory.paged import PagedSegments
from foveakv.memory.pool import Pool

__all__ = ["memory"]


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("seed", range(6))
def test_failures_change_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    faults = Faults(monkeypatch, rng)
    assert play(rng, pool := Pool(page_size=8), faults, 100) > 5
    faults.disarm()
    assert pool.use().pages == pool.use().held == 0


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("seed", range(4))
def test_failures_anywhere_lose_no_page(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    faults = Faults(monkeypatch, rng, anywhere=True)
    assert play(rng, pool := Pool(page_size=8), faults, 150) > 10
    faults.disarm()
    assert pool.use().pages == pool.use().held == 0


@pytest.mark.slow
@pytest.mark.usefixtures("memory")
def test_ten_thousand_operations_under_faults_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    rng = random.Random(2)
    faults = Faults(monkeypatch, rng, anywhere=True)
    assert play(rng, pool := Pool("64KiB", page_size=16), faults, 10_000) > 1000
    faults.disarm()
    assert pool.use().held == 0


@pytest.mark.slow
def test_ten_thousand_operations_under_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    faults = Faults(monkeypatch, rng)
    assert play(rng, pool := Pool("64KiB", page_size=16), faults, 10_000) > 1000
    faults.disarm()
    assert pool.use().held == 0


@pytest.mark.parametrize("failing", ["fork", "reorder"])
def test_after_a_failed_copy_nothing_is_written_into_a_page_of_another(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page in reserve, where the next slot would go, was given back before the failure."""
    pool = Pool(page_size=8)
    keys = torch.randn(1, 2, 24, 4)
    keep, positions = torch.ones(1, 1, 24, dtype=torch.bool), torch.arange(24)[None]
    segments = PagedSegments.from_dense(keys, keys, keep, positions, pool=pool)
    new, at = torch.randn(1, 2, 1, 4), torch.tensor([[24]])
    segments.append(new, new, at)
    segments.evict(24, [1])  # its page is empty now, and the place of the next slot
    want = contents(segments)
    if failing == "fork":
        with monkeypatch.context() as patched:
            faults = Faults(patched, random.Random(0))
            faults.left = 1
            with pytest.raises(PoolFullError):
                copy.deepcopy(segments)
    else:
        with pytest.raises(ValueError, match="sequence numbers below 1"):
            segments.select_sequences(torch.tensor([5]))
    other = PagedSegments.from_dense(keys[:, :, :8], keys[:, :, :8], keep[..., :8], positions[:, :8], pool=pool)
    others = contents(other)
    assert same(segments, want)
    segments.append(new, new, at)
    assert same(other, others)
    assert torch.equal(segments.gather()[0][0, :, 24], new[0, :, 0])
    check_pages(segments)


def test_a_finalizer_moves_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write may be in progress in another thread; the memory goes back at the next call."""
    monkeypatch.setattr(page_space, "make_rows", copied_rows)
    pool = Pool(page_size=8)
    kept, dropped = make(pool, 1, 30), make(pool, 4, 2000)
    space, want = kept.table.space, contents(kept)
    rows, owners = space.keys, space.owners
    del dropped
    gc.collect()
    assert space.keys is rows
    assert space.owners is owners
    held = pool.held
    assert pool.use().held < held
    assert len(space.keys) < len(rows)
    assert pool.use().pages == kept.pages
    assert same(kept, want)


def test_a_finalizer_gives_reserved_memory_back_at_once() -> None:
    pool = Pool(page_size=8)
    kept, dropped = make(pool, 1, 30), make(pool, 4, 2000)
    held = pool.held
    del dropped
    gc.collect()
    if not kept.table.space.moves:
        assert pool.held < held
    check_pages(kept)
