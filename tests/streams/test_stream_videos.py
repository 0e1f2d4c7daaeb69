"""Frames as steps of a video, and video files."""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import families
import matrix
import numpy as np
import pytest
import streamed
import tiny_folder
import torch
from PIL import Image

import foveakv
from foveakv import errors
from foveakv.streams.video import read_video

pytestmark = pytest.mark.usefixtures("no_gradients")


def processor(family: str) -> Any:
    """Images of 28 x 28 pixels are 2 x 2 patches, which are one token; 56 x 56 are four."""
    try:
        from transformers import Qwen2VLImageProcessorPil as ImageProcessor
    except ImportError:
        from transformers import Qwen2VLImageProcessor as ImageProcessor
    patch = 16 if family.startswith("qwen3") else 14
    sizes = {"shortest_edge": 4 * patch * patch, "longest_edge": 64 * patch * patch}
    images = ImageProcessor(patch_size=patch, size=sizes)
    return SimpleNamespace(image_processor=images, tokenizer=tiny_folder.tokenizer(), image_token="<image>")


def pictures(family: str, count: int) -> list[Image.Image]:
    side = 64 if family.startswith("qwen3") else 56
    return [tiny_folder.picture(i, (side, side)) for i in range(count)]


def test_two_frames_are_one_step() -> None:
    """The patches of a step hold both frames, as a video processor puts them."""
    made = foveakv.stream(matrix.model("qwen2_vl"), processor("qwen2_vl"), budget=100, frames="video")
    frames = pictures("qwen2_vl", 3)
    block = made._maker.frames(frames, [0.0, 1.0, 2.0], [""] * 3)
    alone = [made._maker.processor.image_processor(images=[f], return_tensors="pt")["pixel_values"] for f in frames]
    shape = (-1, 3, 2, 14 * 14)
    for number, (first, second) in enumerate([(0, 1), (2, 2)]):
        got = block.inputs["pixel_values_videos"].view(2, *alone[0].shape)[number].view(shape)
        assert torch.equal(got[:, :, 0], alone[first].view(shape)[:, :, 0])
        assert torch.equal(got[:, :, 1], alone[second].view(shape)[:, :, 1])
    assert block.inputs["video_grid_thw"].tolist() == [[2, 4, 4]]
    assert block.units == [0, 0, 1]
    assert block.times == [0.5, 2.0]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_video_in_blocks_is_the_video_at_once(family: str) -> None:
    """With all kept, every pass says what the plain model says to the whole clip with its own positions."""
    model = matrix.model(family, torch.float64)
    made = foveakv.stream(model, processor(family), "full", frames="video", block=4)
    with streamed.passes(model) as inputs, streamed.recorded(model) as got:
        made.feed(pictures(family, 10), [10 + 0.5 * i for i in range(10)])
        made.ask("what?", max_new_tokens=3)
    ids = torch.cat([each["input_ids"] for each in inputs], 1)
    pixels = torch.cat([each["pixel_values_videos"] for each in inputs if "pixel_values_videos" in each])
    whole = {
        "input_ids": ids,
        "pixel_values_videos": pixels,
        "video_grid_thw": torch.tensor([[5, 4, 4]]),
        "mm_token_type_ids": 2 * (ids == families.VIDEO).long(),
    }
    if family == "qwen2_5_vl":
        whole["second_per_grid_ts"] = torch.tensor([1.0])
    want = model(**whole).logits
    ends = torch.tensor([each["input_ids"].shape[1] for each in inputs]).cumsum(0) - 1
    assert (torch.cat([step[:, -1] for step in got]) - want[0, ends]).abs().max() < 1e-6
    if family == "qwen3_vl":
        text = made._maker.tokenizer.decode(inputs[0]["input_ids"][0])
        assert "<10.2 seconds>" in text
        assert "<11.2 seconds>" in text


@pytest.mark.parametrize("name", ["infinipotv", "uniform_frames"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_equal_to_a_masked_full_cache(family: str, name: str) -> None:
    model = matrix.model(family, torch.float64)
    made = foveakv.stream(model, processor(family), name, budget=24, frames="video", block=4, trace=True)

    def use(opened: Any) -> None:
        opened.feed(pictures(family, 12))
        opened.ask("what?", keep=True, max_new_tokens=3)
        opened.feed(pictures(family, 4))

    streamed.check_against_reference(made, use)
    assert made.method.frame_tokens == 4
    assert made.report.frames == 16
    assert set(made.report.kept_frames) <= set(range(16))
    assert made.report.slots == 24 * families.KV_HEADS * families.LAYERS


def test_what_a_video_is_refused() -> None:
    made = foveakv.stream(matrix.model("qwen2_vl"), processor("qwen2_vl"), budget=24, frames="video")
    with pytest.raises(errors.InputError, match="captions"):
        made.feed(pictures("qwen2_vl", 2), captions=["a", "b"])
    with pytest.raises(errors.InputError, match="one size"):
        made.feed([tiny_folder.picture(0, (56, 56)), tiny_folder.picture(1, (56, 84))])
    with pytest.raises(errors.MethodError, match="multiple of 2"):
        foveakv.stream(matrix.model("qwen2_vl"), processor("qwen2_vl"), budget=24, frames="video", block=3)


@pytest.fixture
def videos(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A stand-in for PyAV that decodes 30 frames at 10 frames per second; `bad.mp4` cannot be opened."""

    class Container:
        def __enter__(self) -> Container:
            return self

        def __exit__(self, *unused: object) -> None:
            pass

        def decode(self, video: int) -> Any:
            for number in range(30):
                image = Image.fromarray(np.full((8, 8, 3), number, np.uint8))
                yield SimpleNamespace(time=5 + number / 10, rate=Fraction(10), to_image=lambda image=image: image)

    def opened(path: str) -> Container:
        if "bad" in path:
            raise ValueError("invalid data")
        return Container()

    av = ModuleType("av")
    av.open = opened  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "av", av)
    for name in ("clip.mp4", "bad.mp4"):
        (tmp_path / name).touch()
    return tmp_path


def test_frames_of_a_file(videos: Path) -> None:
    for fps, numbers in ((1.0, [0, 10, 20]), (4, [0, 3, 5, 8, 10, 13, 15, 18, 20, 23, 25, 28]), (60, list(range(30)))):
        found = list(read_video(videos / "clip.mp4", fps))
        assert [image.getpixel((0, 0))[0] for image, _ in found] == numbers  # type: ignore[index]
        assert [round(time * 10) for _, time in found] == numbers
    made = foveakv.stream(matrix.model("llava"), tiny_folder.processor(), budget=50, block=2)
    made.feed_video(videos / "clip.mp4", fps=2, start=100.0)
    assert (made.report.frames, made.report.blocks) == (6, 3)
    with pytest.raises(errors.InputError, match="ascend"):
        made.feed_video(videos / "clip.mp4")


def test_files_that_cannot_be_read(videos: Path) -> None:
    with pytest.raises(errors.InputError, match="cannot be read as a video"):
        list(read_video(videos / "bad.mp4"))
    with pytest.raises(errors.InputError, match="not found"):
        list(read_video(videos / "none.mp4"))
    with pytest.raises(errors.InputError, match="fps"):
        list(read_video(videos / "clip.mp4", 0))


def test_without_pyav(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(errors.MissingDependencyError, match=r"foveakv\[video\]"):
        list(read_video("clip.mp4"))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_a_saved_stream_goes_on_within_its_video(family: str, tmp_path: Path) -> None:
    model, made = matrix.model(family, torch.float64), []
    options: dict[str, Any] = {"budget": 30, "frames": "video", "block": 2, "saveable": True}
    made.append(foveakv.stream(model, processor(family), **options))
    made[0].feed(pictures(family, 4), [10 + 0.5 * i for i in range(4)])
    made[0].save(tmp_path / "stream")
    made.append(foveakv.load_stream(tmp_path / "stream", model, processor(family)))
    seen = []
    for each in made:
        with streamed.passes(model) as inputs, streamed.recorded(model) as got:
            each.feed(pictures(family, 3), [12.0, 12.5, 14.0])
            each.ask("what?", max_new_tokens=3)
        seen.append((inputs, got))
    (one, first), (other, second) = seen
    assert all(torch.equal(a["position_ids"], b["position_ids"]) for a, b in zip(one, other, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
