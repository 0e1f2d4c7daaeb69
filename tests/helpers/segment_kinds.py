"""Run tests of `Segments` with both kinds of memory: contiguous runs, and pages of a pool."""

from __future__ import annotations

from typing import Any

import pytest

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
