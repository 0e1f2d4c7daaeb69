"""The vLLM plugin in the workers, with a cache in plain tensors in place of vLLM's."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foveakv.core.budget import Geometry
from foveakv.core.prompt import IMAGE, PromptMap
from foveakv.engines.vllm.plan import Begin, Chunk, Done, Freed, Plan
from foveakv.engines.vllm.settings import Choice
from foveakv.engines.vllm.stored import Compressed
from foveakv.engines.vllm.worker_side import WorkerSide, compressed_row
from foveakv.errors import MethodError
from foveakv.methods import Decision, Method
from foveakv.methods.views import Observes

SIZE, LAYERS, HEADS, DIM, PROMPT = 4, 3, 2, 8, 22
SIZES = Geometry(1, (0,), LAYERS, HEADS, DIM, DIM, 4)
RANDOM = Choice("random", {"budget": 12})


class PlainStore:
    """Keys and values of all layers, [layers, slots, H, D]."""

    size = SIZE

    def __init__(self, blocks: int = 40) -> None:
        self.index = {f"layers.{idx}": idx for idx in range(LAYERS)}
        self.keys, self.values = torch.randn(2, LAYERS, blocks * SIZE, HEADS, DIM)

    def read(self, idx: int, blocks: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        slots = (blocks[:, None] * SIZE + torch.arange(SIZE)).flatten()[:tokens]
        return self.keys[idx, slots], self.values[idx, slots]

    def move(self, idx: int, source: Tensor, target: Tensor) -> None:
        for each in (self.keys[idx], self.values[idx]):
            each[target] = each[source]


class OneRank:
    def gather_heads(self, local: Tensor) -> Tensor:
        return local


def prompt() -> PromptMap:
    kinds = torch.zeros(1, PROMPT, dtype=torch.int8)
    kinds[0, 3:17] = IMAGE
    return PromptMap(kinds)


def worker(create: Any = Choice.create) -> WorkerSide:
    side = WorkerSide(create, SIZES, 0.5, OneRank())
    side.store = PlainStore()
    return side


def begin(choice: Choice = RANDOM) -> Begin:
    return Begin("a", choice, prompt().kinds, prompt().index)


def test_kept_tokens_move_to_the_first_slots_of_every_layer() -> None:
    side = worker()
    store: Any = side.store
    blocks = (7, 3, 9, 20, 1, 5)
    before = [store.read(idx, torch.tensor(blocks), PROMPT) for idx in range(LAYERS)]
    side.start_step(Plan(begin=[begin()], chunks=[Chunk("a", 0, PROMPT, PROMPT, blocks, 1)]))
    assert side.chunk_at(7) is not None
    (freed,) = side.end_step()
    assert (freed.kept, freed.entries) == (12, (4, 5))
    (outcome,) = side.recent
    assert set(outcome.kept) >= {0, 1, 2, 17, 18, 19, 20, 21}
    for idx in range(LAYERS):
        keys, values = store.read(idx, torch.tensor(blocks), 12)
        assert torch.equal(keys, before[idx][0][outcome.kept])
        assert torch.equal(values, before[idx][1][outcome.kept])
    known = side.compressed_at(7)
    assert known is not None
    # vLLM adds entries as if nothing had been evicted; the next tokens follow the stored ones.
    row = compressed_row(known, torch.tensor([*blocks, 30, 0, 0]), PROMPT + 3, 3, SIZE)
    assert row.length == 15
    assert row.table.tolist()[:5] == [7, 3, 9, 20, 30]
    assert row.slots.tolist() == [80, 81, 82]


def test_chunks_are_joined_and_decided_at_the_last_one() -> None:
    seen: dict[int, Tensor] = {}

    class Observer(Method):
        name = "observer"
        granularity = "token"  # type: ignore[assignment]

        def needs_queries(self, compressed_idx: int) -> bool:
            return compressed_idx == 1

        def prefill(self, view: Any) -> Decision:
            seen[view.compressed_idx] = view.query
            keep = torch.arange(view.prompt.columns) % 2 == 0
            return Decision(keep=keep[None, None])

    side = worker(lambda choice: Observer())
    query = torch.randn(PROMPT, HEADS * 2, DIM)
    side.start_step(Plan(begin=[begin()], chunks=[Chunk("a", 0, 9, PROMPT, (2, 3, 4), 1)]))
    chunk = side.chunk_at(2)
    assert chunk is not None
    assert [side.wants(chunk, idx) for idx in range(LAYERS)] == [False, True, False]
    side.take_queries(chunk, 1, query[:9])
    assert side.end_step() == []
    side.start_step(Plan(chunks=[Chunk("a", 9, PROMPT, PROMPT, (2, 3, 4, 5, 6, 7), 1)]))
    chunk = side.chunk_at(2)
    assert chunk is not None
    side.take_queries(chunk, 1, query[9:])
    (freed,) = side.end_step()
    assert freed.kept == 11
    assert torch.equal(seen[1][0].transpose(0, 1), query)
    assert seen[0].shape[2] == 0


def test_what_was_decided_survives_a_preemption() -> None:
    side = worker()
    side.start_step(Plan(begin=[begin()], chunks=[Chunk("a", 0, PROMPT, PROMPT, (2, 3, 4, 5, 6, 7), 1)]))
    side.end_step()
    kept = side.recent[-1].kept
    side.start_step(Plan(preempted=("a",)))
    assert side.compressed_at(2) is None
    again = Chunk("a", 0, PROMPT + 5, PROMPT, (9, 8, 7, 6, 5, 4, 3), 2)
    side.start_step(Plan(begin=[begin()], chunks=[again]))
    step = side.chunk_step(again, 7)
    assert step is not None
    assert (step.start, step.stop, step.row) == (PROMPT, PROMPT + 5, 7 + PROMPT)
    (segment,) = side.segments_of(step, compact=True)
    assert (segment.start, segment.stop, segment.length) == (PROMPT, PROMPT + 5, 17)
    slots = [9 * SIZE + i for i in range(SIZE)] + [8 * SIZE + i for i in range(SIZE)]
    assert set(segment.target.tolist()) < {*slots, *range(5 * SIZE, 8 * SIZE)}
    (freed,) = side.end_step()
    assert side.compressed_at(9) is not None
    assert side.recent[-1].kept == kept
    assert replace(freed, checksum=0) == Freed("a", 2, 12, (5, 6))
    side.start_step(Plan(finished=("a",)))
    assert side.compressed_at(9) is None


class _PerLayer(Method):
    name = "per_layer"
    granularity = "token"  # type: ignore[assignment]

    def prefill(self, view: Any) -> Decision:
        return Decision(keep=(torch.arange(view.prompt.columns) >= view.compressed_idx)[None, None])


class _Merging(Method):
    name = "merging"
    granularity = "token"  # type: ignore[assignment]

    def prefill(self, view: Any) -> Decision:
        return Decision(keys=view.keys)


@pytest.mark.parametrize("method", [_PerLayer, _Merging])
def test_a_method_that_fails_ends_its_request_only(method: type[Method]) -> None:
    side = worker(lambda choice: method())
    side.start_step(Plan(begin=[begin()], chunks=[Chunk("a", 0, PROMPT, PROMPT, (2, 3, 4, 5, 6, 7), 1)]))
    assert side.end_step() == []
    assert side.compressed_at(2) is None
    assert side.failing_blocks == set()
    side.start_step(Plan())
    assert side.failing_blocks == {2}
    side.start_step(Plan())
    assert side.failing_blocks == set()


def test_a_request_that_has_ended_does_not_fail_afterwards() -> None:
    side = worker(lambda choice: _Merging())
    side.start_step(Plan(begin=[begin()], chunks=[Chunk("a", 0, PROMPT, PROMPT, (2, 3, 4, 5, 6, 7), 1)]))
    side.end_step()
    side.start_step(Plan(finished=("a",)))
    assert side.failing_blocks == set()


class _Late(Method):
    """Fails in its second decode step."""

    name = "late"
    granularity = "token"  # type: ignore[assignment]
    calls = 0

    @property
    def observes(self) -> Observes:
        return Observes(steps=True)

    def decode(self, view: Any) -> None:
        self.calls += 1
        if self.calls > LAYERS:
            raise ZeroDivisionError


def decode(side: WorkerSide, blocks: tuple[int, ...], start: int, stop: int) -> None:
    """The step of one request with the tokens start ... stop - 1."""
    known = side.compressed_at(blocks[0])
    assert known is not None
    step = side.decode_step(known, torch.tensor(blocks), start, stop, 0)
    assert step is not None
    for idx in range(LAYERS):
        side.take_step_queries(step, idx, torch.randn(stop - start, HEADS * 2, DIM))
    side.end_step()


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_method_that_fails_while_decoding_ends_its_request_after_a_preemption_too(chunks: int) -> None:
    method = _Late()
    side = worker(lambda choice: method)
    blocks = (2, 3, 4, 5, 6, 7)
    side.start_step(Plan(begin=[begin()], chunks=[Chunk("a", 0, PROMPT, PROMPT, blocks, 1)]))
    side.end_step()
    for length in (PROMPT, PROMPT + 1):
        side.start_step(Plan())
        assert side.failed == ()
        decode(side, blocks, length, length + 1)
    assert side.failed == ("a",)
    side.start_step(Plan(preempted=("a",)))  # before the failure is reported
    assert side.failing_blocks == set()
    stop = PROMPT + 2 if chunks == 1 else PROMPT
    again = Chunk("a", 0, stop, PROMPT, (12, 3, 4, 5, 6, 7), 2)
    side.start_step(Plan(begin=[begin()], chunks=[again]))
    assert side.chunk_step(again, 0) is not None
    side.end_step()
    side.start_step(Plan())
    assert side.failing_blocks == {12}
    decode(side, again.blocks, PROMPT + 1, PROMPT + 2)  # if it still runs
    assert method.calls == LAYERS + 1
    side.start_step(Plan())
    assert side.failing_blocks == {12}
    side.start_step(Plan(finished=("a",)))
    assert side.failing_blocks == set()


# ---- tensor-parallel ranks


class Halves:
    """Two ranks that take turns: the second one's layers are appended to the first one's."""

    def __init__(self, store: PlainStore) -> None:
        self.store = store

    def gather_heads(self, local: Tensor) -> Tensor:
        """Return the whole tensor that the rank's half was cut from."""
        for whole in (*self.store.keys, *self.store.values):
            for half in whole.chunk(2, 1):
                if local.shape[0] and torch.equal(half[: local.shape[0]], local):
                    return whole[: local.shape[0]]
        raise AssertionError("not a part of the cache")


@pytest.mark.parametrize("read", ["keys", "values"])
def test_ranks_decide_alike_by_keys_and_values(read: str) -> None:
    """A method that reads no queries sees the heads of all ranks."""

    class Norms(Method):
        name = "norms"
        granularity = "token"  # type: ignore[assignment]

        def prefill(self, view: Any) -> Decision | None:
            assert view.keys.shape[1] == view.values.shape[1] == view.query.shape[1] == HEADS
            if view.compressed_idx == 0:
                norms = getattr(view, read).norm(dim=-1).sum(1)
                view.state.append((norms > norms.median())[:, None])
            return Decision(keep=view.state[0])

        def begin(self, view: Any) -> list[Tensor]:
            return []

    whole, blocks = PlainStore(), tuple(range(6))
    kept, done = [], []
    for rank in range(2):
        side = WorkerSide(lambda choice: Norms(), SIZES, 0.5, Halves(whole))
        store = PlainStore()
        store.keys, store.values = (each.chunk(2, 2)[rank].clone() for each in (whole.keys, whole.values))
        side.store = store  # type: ignore[assignment]
        side.start_step(Plan(begin=[begin()], chunks=[Chunk("a", 0, PROMPT, PROMPT, blocks, 1)]))
        done.append(Done(side.end_step(), side.failed))
        kept.append(side.recent[-1].kept)
    assert kept[0] == kept[1]
    done[0].check_same(done[1])


def test_ranks_that_store_different_tokens_are_an_error() -> None:
    def done(*kept: int, failed: tuple[str, ...] = ()) -> Done:
        known = Compressed("a", torch.tensor(kept), PROMPT)
        return Done([Freed("a", 1, len(kept), (), 0, known.checksum)], failed)

    done(1, 2, 5).check_same(done(1, 2, 5))
    for other in (done(1, 2, 6), done(2, 1, 5), done(1, 2), done(1, 2, 5, failed=("b",)), Done()):
        for pair in ((done(1, 2, 5), other), (other, done(1, 2, 5))):
            with pytest.raises(MethodError, match="two tensor-parallel ranks"):
                pair[0].check_same(pair[1])
