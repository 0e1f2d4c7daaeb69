"""Pages of a pool: none lost, none shared by accident, bytes conserved, also where memory runs out in the middle."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import sys
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_play import contents, make, memory, play, same
from segment_kinds import check_pages
from torch import Tensor

from foveakv.errors import MethodError, PoolFullError, UnsupportedModeError
from foveakv.memory.page_space import PageSpace
from foveakv.memory.pool import Pool

__all__ = ["memory"]

CPU = torch.device("cpu")


# ------------------------------------------------------------------------------------------------------------- a space


def marked(space: PageSpace, pages: Tensor, number: float) -> None:
    for page in pages.tolist():
        space.keys[page * space.size : (page + 1) * space.size] = number


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("limit", [None, 40 * 8 * 8 * 4])
@pytest.mark.parametrize("seed", range(10))
def test_a_space_against_a_dictionary(seed: int, limit: int | None) -> None:
    """Random takes, shares and releases, and the pages keep what was written."""
    rng, pool = random.Random(seed), Pool(limit, page_size=8)
    space = pool.space(CPU, torch.float32, 4, 4)
    assert pool.space(CPU, torch.float32, 4, 4) is space
    owners: list[tuple[Tensor, float]] = []
    for number in range(150):
        action = rng.choice(["take", "take", "share", "release", "release", "copy"])
        if action == "take":
            count = rng.choice([0, 1, 2, 7, 30])
            try:
                pages = space.take(count)
            except PoolFullError:
                assert limit is not None
                assert space.used + count > 40 - space.slab
            else:
                assert len(pages.unique()) == count
                owners.append((pages, float(number)))
                marked(space, pages, number)
        elif owners and action == "share":
            owners.append(rng.choice(owners))
            space.share(owners[-1][0])
        elif owners and action == "release":
            space.release(owners.pop(rng.randrange(len(owners)))[0])
        elif len(owners) > 1:
            (source, name), (target, former) = rng.sample(owners, 2)
            n = min(len(source), len(target))
            if sum(value == former for _, value in owners) == 1:
                space.copy(source[:n], target[:n])
                assert n == 0 or bool((space.keys.view(-1, 8, 4)[target[:n]] == name).all())
                marked(space, target, former)
        counted = torch.zeros(len(space.owners), dtype=torch.int64)
        for pages, name in owners:
            counted[pages] += 1
            assert bool((space.keys.view(-1, 8, 4)[pages] == name).all())
        assert torch.equal(counted, space.owners.clamp_min(0).long())
        assert space.used == int((counted > 0).sum())
        assert space.held_nbytes == int((space.owners >= 0).sum()) * space.page_nbytes
        assert space.free < (2 * space.slab if limit is None or not space.moves else 10**9) or space.moves or space.used
        if limit is not None:
            assert pool.use().held <= limit
    for pages, _ in owners:
        space.release(pages)
    assert pool.use().held == 0


def test_pages_that_are_taken_together_are_neighbours() -> None:
    pool = Pool(page_size=8)
    space = pool.space(CPU, torch.float32, 4, 4)
    first, second, third = space.take(5), space.take(20), space.take(5)
    space.release(first)
    space.release(third)
    again = space.take(8)
    assert torch.equal(again.diff(), torch.ones(7, dtype=torch.int64))
    assert not set(again.tolist()) & set(second.tolist())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_goes_back_to_the_system() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    pool = Pool()
    space = pool.space(CPU, torch.float32, 128, 128)
    before, size = resident(), 200 * 2**20
    pages = space.take(size // space.page_nbytes)
    space.keys.view(-1, 64 * 128)[pages] = 1.0
    space.values.view(-1, 64 * 128)[pages] = 1.0
    assert resident() - before > 0.9 * size
    space.release(pages[64:])
    assert resident() - before < 0.2 * size
    assert pool.use().held < 0.2 * size
    assert bool((space.keys.view(-1, 64 * 128)[pages[:64]] == 1).all())


# ----------------------------------------------------------------------------------------------------- caches in a pool


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("seed", range(6))
def test_caches_of_one_pool_do_not_disturb_each_other(seed: int) -> None:
    torch.manual_seed(seed)
    play(random.Random(seed), pool := Pool(page_size=8), None, 80)
    assert pool.use().pages == pool.use().held == 0


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([16, 64]), st.integers(20, 200))
def test_a_small_pool_is_full_now_and_then(seed: int, page_size: int, kib: int) -> None:
    torch.manual_seed(seed)
    pool = Pool(kib * 1024, page_size=page_size)
    play(random.Random(seed), pool, None, 60)
    assert pool.use().pages == pool.use().held == 0


def test_a_shared_page_is_copied_once_and_only_where_it_is_written() -> None:
    pool = Pool(page_size=16)
    segments = make(pool, 1, 100)
    once = segments.pages
    forks = [copy.deepcopy(segments) for _ in range(3)]
    assert pool.use().pages == once
    new = torch.randn(1, 2, 1, 4)
    at = torch.tensor([[100]])
    forks[0].append(new, new, at)
    partly = int((segments.lengths % 16 != 0).sum())
    assert pool.use().pages == once + 2  # a new page, or a copy of the last one, for each of two runs
    assert partly
    forks[0].append(new, new, at)
    forks[0].evict(3, [1])
    assert pool.use().pages <= once + 4 + 2
    assert same(forks[1], contents(segments))
    del forks
    gc.collect()
    before = pool.use().pages
    segments.append(new, new, at)
    assert pool.use().pages <= before + 2  # nobody else reads them any more
    check_pages(segments)


@pytest.mark.usefixtures("memory")
def test_a_pool_goes_with_its_last_cache_and_without_garbage_collection() -> None:
    gc.collect()
    gc.disable()
    try:
        segments = make(Pool(page_size=8))
        pool, space = weakref.ref(segments.pool), weakref.ref(segments.table.space)
        forked = copy.deepcopy(segments)
        del segments
        assert pool() is not None
        forked.append(torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 4), torch.arange(9)[None])
        check_pages(forked)
        del forked
        assert pool() is None
        assert space() is None
    finally:
        gc.enable()


def test_beams_share_pages() -> None:
    pool = Pool(page_size=16)
    segments = make(pool, 2, 200)
    once = pool.use().pages
    segments.select_sequences(torch.tensor([0, 0, 1, 1, 1]))
    assert pool.use().pages <= once
    new = torch.randn(5, 2, 1, 4)
    segments.append(new, new, torch.full((5, 1), 200))
    assert pool.use().pages <= once + 10
    check_pages(segments)


def test_overhead_is_half_a_page_a_run_on_average() -> None:
    torch.manual_seed(0)
    pool = Pool(page_size=32)
    members = [make(pool, 1, columns) for columns in torch.randint(40, 400, (60,)).tolist()]
    use = pool.use()
    assert use.runs == 120
    assert 0.4 * 32 < use.unused_slots / use.runs < 0.6 * 32
    assert use.unused_slots * 8 * 4 == sum(member.overhead_nbytes for member in members)
    assert use.used == sum(member.table.nbytes for member in members)


def test_a_full_pool_names_the_request_and_what_would_fit() -> None:
    pool = Pool("64KiB", page_size=16)
    kept = make(pool, 1, 700)
    with pytest.raises(
        PoolFullError, match=r"the pool of 64 KiB is full: \d+ pages of 16 slots of one KV head are needed"
    ):
        make(pool, 1, 700)
    with pytest.raises(PoolFullError, match=r", and \d+ would fit \([\d.]+ .*\); drop other caches of this pool"):
        make(pool, 1, 700)
    assert isinstance(PoolFullError("x"), MemoryError)
    want = contents(kept)
    with pytest.raises(PoolFullError, match="full"):
        kept.append(torch.randn(1, 2, 900, 4), torch.randn(1, 2, 900, 4), torch.zeros(1, 900, dtype=torch.int64))
    assert same(kept, want)
    with pytest.raises(PoolFullError, match="positions and side fields"):  # noqa: PT012
        for number in range(100):
            kept.add_field(f"score {number}")
    del kept
    gc.collect()
    make(pool, 1, 700)


def test_free_memory_of_one_kind_serves_another() -> None:
    pool = Pool("256KiB", page_size=16)
    space = pool.space(CPU, torch.float32, 16, 16)
    pages = space.take(100)
    other = pool.space(CPU, torch.bfloat16, 16, 16)
    with pytest.raises(PoolFullError, match="would fit"):
        other.take(100)
    space.release(pages[2:])
    assert len(other.take(100)) == 100


def test_wrong_sizes_and_copies_are_refused() -> None:
    for wrong in (0, -1, "0.5", "abc", 2.5, True):
        with pytest.raises((MethodError, ValueError)):
            Pool(wrong)  # type: ignore[arg-type]
    for size in (0, 7, 512, "64"):
        with pytest.raises(MethodError, match="page_size must be one of 8, 16"):
            Pool(page_size=size)  # type: ignore[arg-type]
    assert Pool("2GiB").limit == 2**31
    assert "2 GiB" in repr(Pool("2GiB"))
    with pytest.raises(UnsupportedModeError, match="cannot be pickled"):
        pickle.dumps(Pool())
