"""Offloaded chunks of further blocks: the store grows, and steps read from all blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import families
import matrix
import pytest
import talks
import torch
from torch import Tensor

from foveakv.core.columns import from_end
from foveakv.methods.base import Method
from foveakv.methods.views import Decision, Offload, PrefillView, PromptEndView, State, When

pytestmark = pytest.mark.usefixtures("no_gradients")


@dataclass
class Remembered(State):
    """Nothing but that there is a state."""


@dataclass
class Pages(Method):
    """Offload the complete chunks of every other head and read some; other heads keep their newest tokens."""

    chunks: int = 2
    place: Any = "host"
    summary: Any = "mean"
    digest_dtype: Any = "model"
    late: bool = False
    name: ClassVar[str] = "pages"

    @property
    def decides(self) -> tuple[When, ...]:
        return "prefill", "after_prefill", "read"

    def begin(self, request: Any) -> State:
        return Remembered()

    def _decision(self, stored: Tensor) -> Decision:
        batch, heads = stored.shape[:2]
        dynamic = (torch.arange(heads) % 2 == 1).expand(batch, heads)
        incomplete = stored.sum(-1, keepdim=True) % 4
        newest = from_end(stored)
        keep = torch.where(dynamic[..., None], newest <= incomplete, newest <= 9) & stored
        offload = Offload(dynamic, 4, self.place, None, self.summary, self.digest_dtype)
        return Decision(keep=keep, offload=offload, chunks=torch.where(dynamic, self.chunks, 0))

    def prefill(self, view: PrefillView) -> Decision | None:
        stored = view.candidates.expand(view.keys.shape[:3])
        return None if self.late and view.stored is None else self._decision(stored)

    def after_prefill(self, view: PromptEndView) -> list[Decision] | None:
        if not self.late or view.request.block_start:
            return None
        heads = view.request.geometry.kv_heads
        real = view.request.prompt.real
        return [self._decision(real[:, None].expand(-1, heads, -1)) for _ in view.request.layers]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("read", [1, 3, 100])
@pytest.mark.parametrize("place", ["host", "device", "disk"])
def test_turns(place: str, read: int, late: bool) -> None:
    model = matrix.model("llava", torch.float64)

    def say(session: Any) -> None:
        talks.converse("llava", model, (True, False, True))

    talk = talks.compressed(model, Pages(read, place, late=late), say)
    talks.check(model, talk, say)
    assert [block.decided for block in talk.cache.blocks] == ["context"] * 4
    if read < 100:
        store = talk.cache.compressed[0].store
        assert store.extra_slots + int(store.chosen_slots.sum()) > 100


@pytest.mark.parametrize("kind", ["model", "bf16", "int8", "int4"])
@pytest.mark.parametrize("summary", ["mean", "bounds"])
def test_digests_of_a_store_that_has_grown(summary: str, kind: str) -> None:
    """They score as those of a store that got everything at once, within what rounding allows."""
    from foveakv.memory.chunk_growth import extend, withdraw
    from foveakv.memory.chunks import ChunkStore
    from foveakv.memory.segments import Segments

    torch.manual_seed(0)
    batch, heads, columns, dim = 2, 2, 96, 8
    keys, values = torch.randn(batch, heads, columns, dim) + 3 * torch.randn(dim), torch.randn(batch, heads, columns, 5)
    real, positions = torch.ones(batch, columns, dtype=torch.bool), torch.arange(columns).expand(batch, columns)
    all_heads = torch.ones(batch, heads, dtype=torch.bool)
    options: Any = {"chunk": 4, "summary": summary, "digest_dtype": kind}

    def part(start: int, end: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        at = slice(start, end)
        return keys[:, :, at], values[:, :, at], real[:, at], positions[:, at]

    def reserved(store: ChunkStore) -> ChunkStore:
        nothing = torch.zeros(batch, heads, 0, dtype=torch.bool)
        segments = Segments.from_dense(keys[:, :, :0], values[:, :, :0], nothing, positions[:, :0])
        store.reserve(segments, torch.full((batch, heads), 3), in_place=True)
        return store

    whole = reserved(ChunkStore(*part(0, 96), all_heads, **options))
    grown = reserved(ChunkStore(*part(0, 40), all_heads, **options))
    for start, end in ((40, 44), (44, 84), (84, 96)):
        empty = Segments.from_dense(*part(0, 0)[:2], torch.zeros(batch, heads, 0, dtype=torch.bool), positions[:, :0])
        assert torch.equal(withdraw(grown, empty), torch.full((batch, heads), 3))
        k, v, mask, place = part(start, end)
        assert extend(grown, k, v, mask[:, None].expand(-1, heads, -1), place, all_heads) == 4 * (end - start)
        grown.reserve(empty, torch.full((batch, heads), 3), in_place=True)
    query = torch.randn(batch, heads * 2, 1, dim)
    a, b = whole.relevance(query, 0.35), grown.relevance(query, 0.35)
    assert (a.exp() - b.exp()).abs().max() < {"model": 1e-5, "bf16": 0.03, "int8": 0.05, "int4": 0.4}[kind]
    same = torch.rand(4, 24)
    whole.pick(same), grown.pick(same)
    assert torch.equal(whole.chosen_positions(), grown.chosen_positions())
    for found, want in zip(pages_read(grown), pages_read(whole), strict=True):
        assert torch.equal(found, want)


def pages_read(store: Any) -> tuple[Tensor, Tensor]:
    pages = store.pages()
    return pages.keys[pages.table], pages.values[pages.table]


def test_beams_and_copies_grow_apart() -> None:
    """Beams share chunks until a further block; a copy's further block leaves the other cache as it is."""
    import copy

    import foveakv

    model = matrix.model("llava", torch.float64)
    inputs = families.prompt("llava", dtype=torch.float64)
    with foveakv.compress(model, Pages(2)) as session:
        output = model.generate(**inputs, **matrix.GREEDY)
        cache = session.cache
        ids = torch.cat([output.sequences, torch.tensor([families.words(30, 1)])], 1)
        given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **matrix.GREEDY}
        argument = matrix.cache_argument("llava")
        copies = [copy.deepcopy(cache) for _ in range(2)]
        wanted = model.generate(**given, **{argument: cache}).sequences
        for copied in copies:
            assert torch.equal(model.generate(**given, **{argument: copied}).sequences, wanted)
        again = cache.compressed[0].store
        assert again.extra_slots == copies[0].compressed[0].store.extra_slots
