"""Run tests of `Segments` with both kinds of memory: contiguous runs, and pages of a pool."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foveakv.memory.paged import PagedSegments
from foveakv.memory.pool import Pool
from foveakv.memory.segments import Segments

_page_size = 0  # 0: contiguous


def from_dense(*args: Any, **kwargs: Any) -> Segments:
    """`Segments.from_dense`, of the kind that the running test asks for; paged ones have a pool of their own."""
    if _page_size == 0:
        return Segments.from_dense(*args, **kwargs)
    return PagedSegments.from_dense(*args, **kwargs, pool=Pool(page_size=_page_size))


def paged() -> bool:
    """Whether the running test is about pages."""
    return _page_size > 0


@pytest.fixture(params=[0, 8, 64], ids=["contiguous", "pages of 8", "pages of 64"])
def both_kinds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use as `pytestmark = pytest.mark.usefixtures("both_kinds")`."""
    monkeypatch.setattr("segment_kinds._page_size", request.param)


def check_pages(segments: PagedSegments) -> None:
    """No page lost, none with more owners than tables say, bytes as counted."""
    table, pool = segments.table, segments.pool
    use = pool.use()  # books what finalizers gave back
    segments.runs  # noqa: B018  made anew where something changed
    assert torch.equal(segments.runs.table_host, table.host)
    assert bool((table.count >= table.need(segments.lengths.view(-1))).all())
    owners, every = table.space.owners, list(pool._members)
    members = [member for member in every if member.table.space is table.space]
    named = torch.cat([member.table.host[member.table.host >= 0].long() for member in members])
    assert torch.equal(torch.bincount(named, minlength=len(owners)), owners.clamp_min(0).long())
    assert table.space.used == int((owners > 0).sum())
    assert table.space.free == int((owners == 0).sum())
    spaces = list(pool._spaces.values())
    assert use.pages == sum(space.used for space in spaces)
    assert use.stored == sum(member.total for member in every)
    sides = [member.held_nbytes - member._rows_nbytes - member.table.side_nbytes for member in every]
    assert use.side == sum(sides)
    held = sum(int((space.owners >= 0).sum()) * space.page_nbytes for space in spaces)
    assert use.held == use.side + held
