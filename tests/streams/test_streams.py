"""Streams: exactness, fixed memory, questions that change nothing, and what is refused."""

from __future__ import annotations

import warnings
from typing import Any

import families
import matrix
import pytest
import streamed
import tiny_folder
import torch
from families.rows import Clip, Row
from transformers import GenerationConfig

import foveakv
from foveakv import errors

pytestmark = pytest.mark.usefixtures("no_gradients")

FAMILIES = ["qwen2_5_vl", "qwen3_vl", "glm4v", "llava", "gemma3", "internvl", "llava_onevision"]
METHODS = ["infinipotv", "newest_frames", "uniform_frames", "streaming", "snapkv"]


@pytest.mark.parametrize("name", [*METHODS, "hybridkv"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_a_masked_full_cache(family: str, name: str) -> None:
    """Every pass over blocks, a question that stays, its answer, and more blocks."""
    made = streamed.opened(family, matrix.method(name, budget=40), trace=True)

    def use(opened: Any) -> None:
        for number in range(3):
            opened.feed_inputs(streamed.block(family, number, frames=2))
        opened.ask("what?", keep=True, max_new_tokens=3)
        opened.feed_inputs(streamed.block(family, 3))
        opened.ask("and now?", keep=True, max_new_tokens=3)

    streamed.check_against_reference(made, use)
    assert (made.report.host_bytes > 0) == (name == "hybridkv")
    if name != "streaming":
        assert made.report.slots < made.report.tokens * 2 * len(made.cache.compressed)  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:the context grows")
@pytest.mark.parametrize("name", METHODS)
def test_fixed_memory(name: str) -> None:
    """What is stored, and the most that was, after ten blocks and after three hundred."""
    made = streamed.opened("llava", name, 60, dtype=torch.float32)
    blocks = [streamed.block("llava", number, dtype=torch.float32) for number in range(10)]
    seen = {}
    for number in range(300 if name in ("infinipotv", "newest_frames") else 100):
        made.feed_inputs(blocks[number % 10])
        if number in (9, 20):
            seen[number] = made.report
    last = made.report
    assert last.bytes == seen[9].bytes
    assert last.slots == seen[9].slots == 60 * families.KV_HEADS * families.LAYERS
    assert last.highest_bytes <= 1.1 * seen[20].highest_bytes  # heads that store other tokens are read side by side
    assert last.tokens == last.frames * blocks[0]["input_ids"].shape[1] == last.blocks * 22
    assert last.frames - 1 in last.kept_frames or name == "uniform_frames"


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
@pytest.mark.parametrize("name", ["infinipotv", "streaming"])
def test_questions_leave_the_stream_as_it_is(family: str, name: str) -> None:
    asked, silent = (streamed.opened(family, name, 40) for _ in range(2))
    for number in range(4):
        for each in (asked, silent):
            each.feed_inputs(streamed.block(family, number))
        first = asked.ask("what is this?", max_new_tokens=5)
        assert asked.ask("what is this?", max_new_tokens=5) == first
    assert asked.report.to_dict() == silent.report.to_dict() | {"highest_bytes": asked.report.highest_bytes}
    for layer in asked.cache.compressed:  # type: ignore[union-attr]
        kept = silent.cache.kept(layer.layer_idx)  # type: ignore[union-attr]
        assert torch.equal(asked.cache.kept(layer.layer_idx), kept)  # type: ignore[union-attr]
    assert "generate" not in vars(asked.model), "the model is plain between calls"


def test_a_question_that_stays_answers_alike() -> None:
    once, kept = (streamed.opened("llava", "infinipotv", 40) for _ in range(2))
    for each in (once, kept):
        each.feed_inputs(streamed.block("llava", 0))
    assert once.ask("what?", max_new_tokens=4) == kept.ask("what?", max_new_tokens=4, keep=True)
    assert kept.report.tokens > once.report.tokens
    assert kept.report.highest_position == kept.report.tokens - 1


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_positions_of_answers_follow_the_frames(family: str) -> None:
    """With all kept, a stream says what the plain model says to all of it at once."""
    model, made = matrix.model(family, torch.float64), streamed.opened(family, "full")
    blocks = [streamed.block(family, number) for number in range(4)]
    with streamed.passes(model) as inputs, streamed.recorded(model) as got:
        for each in blocks:
            made.feed_inputs(each)
        made.ask("what is it?", max_new_tokens=4)
    ids = torch.cat([each["input_ids"] for each in inputs], 1)
    joined = {n: torch.cat([each[n] for each in blocks]) for n in ("pixel_values", "image_grid_thw")}
    whole = model(input_ids=ids, **joined, **families.token_types(family, ids)).logits
    steps = torch.cat([step[:, -1] for step in got])
    ends = torch.tensor([each["input_ids"].shape[1] for each in inputs]).cumsum(0) - 1
    assert (steps - whole[0, ends]).abs().max() < 1e-6


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_beyond_the_trained_positions(family: str) -> None:
    """One warning; a clock that jumps goes beyond them with few tokens."""
    model, processor = families.build(family, max_position_embeddings=60), streamed.no_images()
    made = foveakv.stream(model, processor, "newest_frames", budget=30)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for number in range(6):
            if family == "llava":
                made.feed_inputs(streamed.block(family, number, dtype=torch.float32))
            else:
                step = families.encode(family, [Row((Clip(2, number),))])
                ids = torch.full((1, 4), families.VIDEO)  # without text, the video goes on
                pixels = {key: value for key, value in step.items() if "video" in key}
                made.feed_inputs({"input_ids": ids, **families.token_types(family, ids), **pixels}, [20.0 * number])
    assert made.report.positions == 60
    wanted = "this model has 60 positions"
    if family != "llava":
        wanted = "was made for 60"
    assert sum(wanted in str(each.message) for each in found) == 1


def test_frames_of_a_processor() -> None:
    """Images with a chat template: blocks, captions, time stamps, and questions between turns."""
    model, processor = matrix.model("llava"), tiny_folder.processor(chat=True)
    made = foveakv.stream(model, processor, budget=50, block=2, timestamps=True)
    with streamed.passes(model) as inputs:
        made.feed([tiny_folder.picture(i) for i in range(3)], [0.5, 1.0, 2.0], captions=["one ", "", "three "])
        made.ask("which?", keep=True, max_new_tokens=2)
        made.feed([tiny_folder.picture(3)])
    text = [processor.tokenizer.decode(each["input_ids"][0]).replace("<image>" * 16, "#") for each in inputs]
    assert text[:2] == ["<s>user: <0.5 seconds>one #<1.0 seconds>#", "<2.0 seconds>three #"]
    assert text[2] == "which?\n" + "assistant: "
    assert text[-1].endswith("\n<s>user: <3.0 seconds>#")
    assert made.report.frames == 4
    assert made.report.kept_frames[-1] == 3
    assert "4 frames" in str(made.report)


def test_what_is_refused() -> None:
    model, processor = matrix.model("llava"), tiny_folder.processor()
    make = foveakv.stream
    with pytest.raises(errors.BudgetError, match="no length"):
        make(model, processor, "infinipotv")
    with pytest.raises(errors.BudgetError, match="no length"):
        make(model, processor, "infinipotv", budget="10%")
    with pytest.raises(errors.MethodError, match="takes no budget"):
        make(model, processor, "full", budget=100)
    with pytest.raises(errors.MethodError, match="stores further blocks whole"):
        make(model, processor, "quest", budget=100)
    with pytest.raises(errors.UnsupportedModeError, match="compact"):
        make(model, processor, budget=100, positions="compact")
    with pytest.raises(errors.UnsupportedModelError, match='frames="images"'):
        make(model, processor, budget=100, frames="video")
    with pytest.raises(errors.MethodError, match="block"):
        make(model, processor, budget=100, block=0)
    with pytest.raises(errors.InputError, match="takes no images"):
        make(matrix.model("llama"), tiny_folder.tokenizer(), budget=100)
    made = make(model, processor, budget=100)
    assert made.report.frames == 0
    with pytest.raises(errors.InputError, match="read nothing"):
        made.ask("what?")
    made.feed(tiny_folder.picture(), [3.0])
    for times in ([2.0], [3.0], [float("nan")], [4.0, 5.0]):
        with pytest.raises(errors.InputError, match="times"):
            made.feed(tiny_folder.picture(), times)
    with pytest.raises(errors.InputError, match="captions"):
        made.feed(tiny_folder.picture(), captions=["a", "b"])
    with pytest.raises(errors.InputError, match="empty"):
        made.ask(" ")
    assert made.report.frames == 1


def test_after_a_failure() -> None:
    """Inputs that do not fit change nothing; a pass that fails ends the stream."""
    made = streamed.opened("llava", "infinipotv", 40)
    made.feed_inputs(streamed.block("llava", 0))
    before = made.report
    with pytest.raises(errors.InputError, match="one sequence"):
        made.feed_inputs({"input_ids": torch.ones(2, 3, dtype=torch.long)})
    assert made.report == before
    made.feed_inputs(streamed.block("llava", 1))
    before = made.report
    broken = streamed.block("llava", 2)
    with pytest.raises(ValueError, match="features"):
        made.feed_inputs(broken | {"pixel_values": broken["pixel_values"].repeat(2, 1, 1, 1)})
    with pytest.raises(errors.CacheInUseError, match="open a new stream"):
        made.ask("what?")
    with pytest.raises(errors.CacheInUseError, match="open a new stream"):
        made.feed_inputs(streamed.block("llava", 3))
    assert "generate" not in vars(made.model)
    after = made.report
    assert (after.failed, before.failed, after.bytes, after.kept_frames) == (True, False, 0, ())
    for name in ("frames", "tokens", "blocks", "highest_position", "positions"):
        assert getattr(after, name) == getattr(before, name) > 0, name
    assert str(after).startswith("failed after 2 frames")


def test_refused_questions_change_nothing() -> None:
    """With keep=True too: whatever raises before a token is stored leaves the stream as it was."""
    asked, silent = (streamed.opened("qwen2_5_vl", "infinipotv", 40) for _ in range(2))
    for each in (asked, silent):
        each.feed_inputs(streamed.block("qwen2_5_vl", 0))
    with pytest.raises(errors.InputError, match="num_beams"):
        asked.ask("what?", keep=True, num_beams=2)
    with pytest.raises(errors.CacheInUseError, match="sequences"):
        asked.ask("what?", keep=True, generation_config=GenerationConfig(num_beams=2))
    with pytest.raises(ValueError, match="not_an_option"):
        asked.ask("what?", keep=True, not_an_option=1)
    for each in (asked, silent):
        each.feed_inputs(streamed.block("qwen2_5_vl", 1))
    assert asked.report == silent.report
    assert asked.ask("what?", max_new_tokens=4) == silent.ask("what?", max_new_tokens=4)


def test_a_first_block_that_fails_can_be_read_again() -> None:
    made, plain = (streamed.opened("llava", "infinipotv", 40) for _ in range(2))
    right = streamed.block("llava", 0)
    with pytest.raises(ValueError, match="features"):
        made.feed_inputs(right | {"pixel_values": right["pixel_values"].repeat(2, 1, 1, 1)})
    assert made.report == foveakv.StreamReport(0, 0, 0, 0, (), 0, 0, 0, -1, made.report.positions)
    for each in (made, plain):
        each.feed_inputs(right)
    assert made.report == plain.report


def test_an_answer_ends_before_the_next_block() -> None:
    """Blocks of one's own too come after the end of a kept answer, and a block that fails leaves it to the next."""
    model, processor = matrix.model("llava"), tiny_folder.processor(chat=True)
    made = foveakv.stream(model, processor, budget=50)
    made.feed([tiny_folder.picture(0)])
    made.ask("which?", keep=True, max_new_tokens=2)
    pending = list(made._maker.pending)
    assert len(pending) > 1
    block = streamed.block("llava", 1, dtype=torch.float32)
    with pytest.raises(errors.InputError, match="one sequence"):
        made.feed_inputs({"input_ids": torch.ones(2, 3, dtype=torch.long)})
    with pytest.raises(errors.InputError, match="not found"):
        made.feed(["no.png"])
    with streamed.passes(model) as inputs:
        made.feed_inputs(block)
        made.feed_inputs(block)
    assert inputs[0]["input_ids"][0].tolist() == [*pending, *block["input_ids"][0].tolist()]
    assert inputs[1]["input_ids"][0].tolist() == block["input_ids"][0].tolist()
    assert made.report.highest_position == made.report.tokens - 1
    assert made.report.frames == 3
