"""The two sides of the vLLM plugin, with a cache in plain tensors in place of vLLM's."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from foveakv.core.budget import Geometry
from foveakv.core.prompt import IMAGE, PromptMap
from foveakv.engines.vllm.plan import Begin, Chunk, Freed, Plan
from foveakv.engines.vllm.prompt_map import prompt_map
from foveakv.engines.vllm.scheduler_side import SchedulerSide
from foveakv.engines.vllm.settings import Choice, parse
from foveakv.engines.vllm.worker_side import WorkerSide, compressed_row
from foveakv.errors import InputError
from foveakv.methods import Decision, Method

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
    assert freed == Freed("a", 2, 12, (5, 6))
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


# ---- the scheduler's side


def feature(offset: int, length: int, modality: str = "image", is_embed: Any = None) -> Any:
    return SimpleNamespace(
        modality=modality, mm_position=SimpleNamespace(offset=offset, length=length, is_embed=is_embed)
    )


def request(req_id: str = "a", features: Any = None, extra: Any = None) -> Any:
    return SimpleNamespace(
        request_id=req_id, num_prompt_tokens=PROMPT, num_computed_tokens=0,
        max_tokens=16, mm_features=[feature(3, 14)] if features is None else features,
        sampling_params=SimpleNamespace(extra_args=extra),
    )  # fmt: skip


def scheduler(**options: Any) -> SchedulerSide:
    settings = parse({"method": "random", "options": {"budget": 12, **options}})
    return SchedulerSide(settings, Choice.create, SIZES)


def plan(side: SchedulerSide, scheduled: dict[str, int], **more: Any) -> Plan:
    return side.plan(scheduled, lambda _: [2, 3, 4], more.get("finished", ()), more.get("preempted", ()))


def test_maps_have_the_kinds_and_numbers_of_the_images() -> None:
    rows = torch.tensor([True, True, False, True])
    found = prompt_map([feature(12, 3), feature(4, 4, is_embed=rows), feature(9, 2, "video")], 16)
    assert found.kinds[0].tolist() == [0, 0, 0, 0, 1, 1, 0, 1, 0, 2, 2, 0, 1, 1, 1, 0]
    assert found.index[0].tolist() == [-1, -1, -1, -1, 0, 0, -1, 0, -1, 0, 0, -1, 1, 1, 1, -1]
    with pytest.raises(InputError, match="vision_chunk"):
        prompt_map([feature(0, 2, "vision_chunk")], 4)
    with pytest.raises(InputError, match="exceeds"):
        prompt_map([feature(3, 2)], 4)


def test_requests_are_planned_until_their_prompt_is_complete() -> None:
    side, one = scheduler(), request()
    side.add(one)
    first = plan(side, {"a": 10, "unknown": 3})
    assert [each.req_id for each in first.begin] == ["a"]
    assert [(c.start, c.stop, c.completes) for c in first.chunks] == [(0, 10, False)]
    one.num_computed_tokens = 10
    second = plan(side, {"a": 12})
    assert second.begin == []
    assert [(c.start, c.stop, c.completes) for c in second.chunks] == [(10, 22, True)]
    one.num_computed_tokens = 22
    assert plan(side, {"a": 1}).chunks == []
    assert list(side.done([Freed("a", 1, 12, (4, 5))])) == [("a", (4, 5))]
    assert list(side.done([Freed("a", 1, 12, (), 1)])) == []
    assert list(side.done([Freed("a", 1, 12, (6,), 3)])) == [("a", (6,))]
    assert side.end("a") == {
        "foveakv": {
            "method": "random",
            "prompt_tokens": 22,
            "stored_prompt_tokens": 12,
            "evicted_while_decoding": 3,
            "freed_blocks": 3,
        }
    }
    assert side.end("a") is None


def test_blocks_of_an_earlier_start_are_not_freed() -> None:
    side, one = scheduler(), request()
    side.add(one)
    plan(side, {"a": PROMPT})
    one.num_computed_tokens = 0  # preempted before the step was evaluated
    assert list(side.done([Freed("a", 1, 12, (4, 5))])) == []
    plan(side, {"a": PROMPT}, preempted=("a",))
    one.num_computed_tokens = PROMPT
    assert list(side.done([Freed("a", 1, 12, (4, 5))])) == []
    assert list(side.done([Freed("a", 2, 12, (4, 5))])) == [("a", (4, 5))]


def test_text_and_requests_that_chose_off_are_left_alone() -> None:
    side = scheduler()
    side.add(request("text", features=[]))
    side.add(request("audio", features=[feature(2, 4, "audio")]))
    side.add(request("off", extra={"foveakv": "off"}))
    assert not any(side.refuses(each) for each in ("text", "audio", "off"))
    assert plan(side, {"text": 22, "audio": 22, "off": 22}) == Plan()


def test_requests_with_invalid_choices_are_refused_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    side = scheduler()
    side.add(request("typo", extra={"foveakv": {"method": "randm"}}))
    side.add(request("head", extra={"foveakv": {"method": "snapkv"}}))
    side.add(request("bytes", extra={"foveakv": {"method": "random", "options": {"budget": "1B"}}}))
    side.add(request("deep", extra={"foveakv": "[" * 100_000}))
    side.add(request("key", extra={"foveakv": {"method": "random", "options": {1: 2}}}))
    for each in ("typo", "head", "bytes", "deep", "key"):
        assert side.refuses(each)
        assert side.end(each) is None
        assert not side.refuses(each)
    assert "did you mean 'random'" in caplog.text
    assert "one block table" in caplog.text


@pytest.mark.parametrize("error", [TypeError, RecursionError, ZeroDivisionError])
def test_whatever_fails_refuses_the_request_only(error: type[Exception], caplog: pytest.LogCaptureFixture) -> None:
    def create(choice: Choice) -> Method:
        raise error("on purpose")

    side = SchedulerSide(parse({"method": "random"}), create, SIZES)
    side.add(request())
    assert side.refuses("a")
    assert "on purpose" in caplog.text
