"""The vLLM plugin in the scheduler: which requests are compressed or refused, and what the workers are told."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foveakv.core.budget import Geometry
from foveakv.engines.vllm.plan import Freed, Plan
from foveakv.engines.vllm.prompt_map import prompt_map
from foveakv.engines.vllm.scheduler_side import SchedulerSide
from foveakv.engines.vllm.settings import Choice, parse
from foveakv.errors import InputError
from foveakv.methods import Method

PROMPT = 22
SIZES = Geometry(1, (0,), 3, 2, 8, 8, 4)


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
