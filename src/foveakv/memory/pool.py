"""A pool of pages that the caches of many requests take their slots from.

A page holds T slots of one KV head. Pages of one kind (device, dtype, widths of keys and values) form a `PageSpace`;
a pool has one for every kind that its caches use. What one cache frees is at once free for all others.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from foveakv.core.budget import parse_budget
from foveakv.errors import MethodError, PoolFullError, UnsupportedModeError
from foveakv.memory.page_space import WAYS_OUT, PageSpace, in_words

PAGE_SIZE = 64  # slots; see docs/pool.md for measurements
SIZES = (8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class PoolUse:
    """What a pool holds now.

    limit: its size in bytes, None without one. held: bytes taken from the system: pages, free ones included, and side
    data. side: bytes of positions, side fields and tables of its caches. pages: pages in use. used: their bytes.
    stored: slots that caches store; a slot that caches share counts once for each. runs: runs of all caches.
    unused_slots: slots of pages in use that store nothing, each run counted on its own.
    """

    limit: int | None
    held: int
    side: int
    pages: int
    used: int
    stored: int
    runs: int
    unused_slots: int


class Pool:
    """Memory that compressed caches share: `foveakv.compress(model, method, pool=foveakv.Pool("2GiB"))`.

    A pool belongs to one thread at a time, except that caches may be garbage-collected in any thread.
    """

    def __init__(self, size: int | str | None = None, *, page_size: int = PAGE_SIZE) -> None:
        """Make an empty pool.

        Args:
            size: the most memory it may hold, in bytes or as text ("2GiB"): keys and values, positions and side fields.
                None: no limit; the pool grows and shrinks with use.
            page_size: slots of one KV head in a page, a power of two from 8 to 256.

        Memory is taken from the system when it is needed and goes back when it is free, in slabs of up to 64 pages; one
        empty slab is kept while others are in use.

        Raises:
            MethodError: an invalid size.
        """
        self.limit = _bytes(size)
        if page_size not in SIZES:
            raise MethodError(f"Pool: page_size must be one of {', '.join(map(str, SIZES))}, got {page_size!r}")
        self.page_size = page_size
        self.lock = threading.Lock()  # never taken by a finalizer that would wait
        self._spaces: dict[tuple[Any, ...], PageSpace] = {}
        self._side = 0
        self._returned: deque[tuple[PageSpace, Tensor, int]] = deque()  # by finalizers, not yet booked
        self._members: weakref.WeakSet[Any] = weakref.WeakSet()

    def __repr__(self) -> str:
        limit = "no limit" if self.limit is None else in_words(self.limit)
        return f"Pool({limit}, {in_words(self.use().held)} held, pages of {self.page_size} slots)"

    def __deepcopy__(self, memo: dict[int, Any]) -> Pool:
        return self  # copies of caches share it

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedModeError("a pool cannot be pickled: it is memory of this process; make one in each process")

    def space(self, device: torch.device, dtype: torch.dtype, key_width: int, value_width: int) -> PageSpace:
        """The pages of rows keys [N, key_width] and values [N, value_width]."""
        kind = str(device), dtype, key_width, value_width
        with self.lock:
            if kind not in self._spaces:
                self._spaces[kind] = PageSpace(self, device, dtype, key_width, value_width)
            return self._spaces[kind]

    def use(self) -> PoolUse:
        """What the pool holds now."""
        with self.lock:
            self.collect()
            spaces, members = list(self._spaces.values()), list(self._members)
            pages = sum(space.used for space in spaces)
            stored = sum(member.total for member in members)
            used = sum(space.used * space.page_nbytes for space in spaces)
            return PoolUse(
                self.limit, self.held, self._side, pages, used, stored,
                sum(member.batch * member.heads for member in members),
                sum(member.pages for member in members) * self.page_size - stored,
            )  # fmt: skip

    # ---- for spaces and owners of pages; the lock is held

    @property
    def held(self) -> int:
        """Bytes taken from the system."""
        return self._side + sum(space.held_nbytes for space in self._spaces.values())

    def left(self) -> int | None:
        """Bytes that may still be taken; None without a limit."""
        return None if self.limit is None else self.limit - self.held

    def make_room(self, nbytes: int, but: PageSpace | None = None) -> bool:
        """Whether nbytes may be taken, after free slabs of other spaces went back if necessary."""
        if self.limit is None or self.held + nbytes <= self.limit:
            return True
        for space in self._spaces.values():
            if space is not but:
                space.shrink(spare=0)
        return self.held + nbytes <= self.limit

    def collect(self) -> None:
        """Book what finalizers gave back."""
        while self._returned:
            self._book(self._returned.popleft())

    def _book(self, returned: tuple[PageSpace, Tensor, int]) -> None:
        space, pages, side = returned
        self._side -= side
        space.book_release(pages)

    # ---- for owners of pages

    def change_side(self, by: int) -> None:
        """Take `by` bytes for side data, or give them back. PoolFullError: there is not enough left."""
        with self.lock:
            self.collect()
            if by > 0 and not self.make_room(by):
                raise PoolFullError(
                    f"{self.full()}: {in_words(by)} more for positions and side fields are needed, and "
                    f"{in_words(max(0, self.left() or 0))} would fit; {WAYS_OUT}"
                )
            self._side += by

    def give_back(self, space: PageSpace, pages: Tensor, side: int) -> None:
        """From a finalizer: at any time, in any thread, even while this thread holds the lock.

        Where memory moves, a write to it may be in progress: then it shrinks at the next call by the pool's thread.
        """
        if space.moves or not self.lock.acquire(blocking=False):
            self._returned.append((space, pages, side))
            return
        try:
            self._book((space, pages, side))
        finally:
            self.lock.release()

    def join(self, member: Any) -> None:
        """Count a member's slots in `use`, as long as it exists."""
        self._members.add(member)

    def full(self) -> str:
        """The beginning of messages."""
        size = in_words(self.limit or 0)
        return f"the pool of {size} is full"


def _bytes(size: Any) -> int | None:
    if size is None:
        return None
    if isinstance(size, str):
        budget = parse_budget(size)
        size = int(budget.value) if budget.kind == "bytes" else None
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise MethodError('Pool: size must be bytes, as a number or as text such as "2GiB"; or None for no limit')
    return size
