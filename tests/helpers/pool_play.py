"""Random operations on the caches of one pool, with and without faults, and what each must still hold."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from segment_kinds import check_pages
from torch import Tensor

from foveakv.errors import PoolFullError
from foveakv.memory import page_space, page_table
from foveakv.memory.page_space import PageSpace
from foveakv.memory.page_table import PageTable
from foveakv.memory.paged import PagedSegments
from foveakv.memory.pool import Pool
from foveakv.memory.rows_of_pages import Rows


def copied_rows(device: torch.device, dtype: torch.dtype, width: int, rows: int, part: int) -> Rows:
    """As on a device: memory that moves when it grows."""
    return Rows(width, dtype, device)


@pytest.fixture(params=["reserved", "copied"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "copied":
        monkeypatch.setattr(page_space, "make_rows", copied_rows)


def make(pool: Pool, batch: int = 1, columns: int = 40, **given: Any) -> PagedSegments:
    keys, values = torch.randn(batch, 2, columns, 4), torch.randn(batch, 2, columns, 4)
    keep = torch.rand(batch, 2, columns) < 0.8
    return PagedSegments.from_dense(keys, values, keep, torch.arange(columns).repeat(batch, 1), pool=pool, **given)


def contents(segments: PagedSegments) -> list[Tensor]:
    return [*segments.gather(), segments.positions(), *[segments.field(name) for name in sorted(segments._fields)]]


def same(segments: PagedSegments, want: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(contents(segments), want, strict=True))


class Fault(Exception):
    """Something else than a full pool, such as an interrupt."""


class Faults:
    """Makes one of the next requests fail, at random: for pages or side data, and with `anywhere` also what follows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rng: random.Random, anywhere: bool = False) -> None:
        self.rng, self.left = rng, -1
        take, side = PageSpace.take, Pool.change_side

        def failing_take(space: PageSpace, count: int) -> Tensor:
            if count:
                self.strike()
            return take(space, count)

        def failing_side(pool: Pool, by: int) -> None:
            if by > 0:
                self.strike()
            side(pool, by)

        monkeypatch.setattr(PageSpace, "take", failing_take)
        monkeypatch.setattr(Pool, "change_side", failing_side)
        if anywhere:
            for owner, name in ((PageSpace, "copy"), (PageTable, "_widened"), (PageTable, "_contents")):
                monkeypatch.setattr(owner, name, self.failing(getattr(owner, name)))
            for name in ("copy_rows", "_pages"):
                monkeypatch.setattr(page_table, name, self.failing(getattr(page_table, name)))
            monkeypatch.setattr(Rows, "resized", self.failing(Rows.resized))

    def failing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.strike(Fault)
            return function(*args)

        return call

    def strike(self, kind: type[Exception] = PoolFullError) -> None:
        self.left -= 1
        if self.left == 0:
            raise kind("a fault of the test")

    def arm(self) -> None:
        self.left = self.rng.choice([1, 1, 2, 3, 10])

    def disarm(self) -> None:
        self.left = -1


def change(rng: random.Random, segments: PagedSegments) -> None:
    """One random operation."""
    batch, longest, shortest = segments.batch, segments.max_length, int(segments.lengths.min())
    name = rng.choice(["append", "append", "append", "evict", "keep", "crop", "write", "blank", "select", "field"])
    if name == "append":
        q = rng.choice([1, 1, 1, 3, 20])
        segments.append(torch.randn(batch, 2, q, 4), torch.randn(batch, 2, q, 4), torch.randint(0, 60, (batch, q)))
    elif name == "evict" and shortest:
        count = rng.randint(1, min(4, shortest))
        segments.evict(torch.randperm(shortest)[:count].view(1, 1, -1).expand(batch, 1, -1), [count] * batch)
    elif name == "keep":
        segments.keep(torch.rand(batch, 2, longest) < rng.choice([0.3, 0.9]))
    elif name == "crop":
        segments.crop(rng.choice([10, 40, 100]))
    elif name == "write" and shortest:
        place = torch.tensor([rng.randrange(2 * batch)]), torch.tensor([rng.randrange(shortest)])
        segments.write(*place, torch.randn(1, 4), torch.randn(1, 4), torch.tensor([5]))
    elif name == "blank":
        segments.extend_blank(torch.randint(0, 12, (2 * batch,)))
    elif name == "select":
        segments.select_sequences(torch.tensor([rng.randrange(batch) for _ in range(rng.randint(1, 3))]))
    elif name == "field" and f"f{longest % 3}" not in segments._fields:
        segments.add_field(f"f{longest % 3}", torch.rand(batch, 2, longest))


def play(rng: random.Random, pool: Pool, faults: Faults | None, steps: int) -> int:
    """Caches come, change, fork and go; each keeps exactly what it holds. Returns the number of failures."""
    members: list[tuple[PagedSegments, list[Tensor]]] = []
    failures = 0
    for number in range(steps):
        if faults is not None:
            faults.disarm()
            if rng.random() < 0.4:
                faults.arm()
        touched = rng.randrange(len(members)) if members else None
        try:
            action = rng.choice(["new", "fork", "drop", *["change"] * 6])
            if action == "new" or touched is None:
                quantized = (
                    {"kv_dtype": rng.choice(["int8", "int4"]), "residual_length": 3} if rng.random() < 0.3 else {}
                )
                made = make(pool, rng.randint(1, 2), rng.choice([1, 20, 70]), **quantized)
                members.append((made, contents(made)))
            elif action == "fork":
                forked = copy.deepcopy(members[touched][0])
                members.append((forked, members[touched][1]))
                assert forked.table.host.shape == members[touched][0].table.host.shape
            elif action == "drop":
                del members[touched]
            else:
                segments = members[touched][0]
                change(rng, segments)
                members[touched] = segments, contents(segments)
        except PoolFullError:
            failures += 1
        except Fault:  # pages are all accounted for, but contents may be lost
            failures += 1
            for segments, _ in members:
                check_pages(segments)
            if touched is not None and action == "change":
                del members[touched]
        if faults is not None:
            faults.disarm()
        if number % 5 == 0 or failures:
            assert all(same(segments, want) for segments, want in members)
            for space in {id(segments.table.space): segments for segments, _ in members}.values():
                check_pages(space)
        if len(members) > 5:
            del members[0]
    del members
    gc.collect()
    return failures
