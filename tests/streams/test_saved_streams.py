"""Streams that are saved and resumed: they go on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matrix
import pytest
import streamed
import tiny_folder
import torch
from masked_reference import recorded

import foveakv
from foveakv import errors

pytestmark = pytest.mark.usefixtures("no_gradients")


def goes_on(made: Any, use: Any) -> tuple[list[torch.Tensor], Any]:
    with recorded(made.model) as got:
        said = use(made)
    return got, said


def counted(made: Any) -> dict[str, Any]:
    """The report without bytes: a file has no spare slots."""
    return {key: value for key, value in made.report.to_dict().items() if "bytes" not in key}


@pytest.mark.parametrize("name", ["infinipotv", "streaming", "hybridkv"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava", "gemma3"])
def test_a_resumed_stream_goes_on_exactly(family: str, name: str, tmp_path: Path) -> None:
    made = streamed.opened(family, matrix.method(name, budget=40), saveable=True, timestamps=True, block=3)
    for number in range(3):
        made.feed_inputs(streamed.block(family, number))
    made.ask("what?", keep=True, max_new_tokens=3)
    made.save(tmp_path / "stream")
    loaded = foveakv.load_stream(tmp_path / "stream", made.model, streamed.no_images())
    assert counted(loaded) == counted(made)

    def use(each: Any) -> list[str]:
        said = []
        for number in range(3, 6):
            each.feed_inputs(streamed.block(family, number))
            said.append(each.ask("and now?", keep=number == 4, max_new_tokens=4))
        return said

    logits, said = goes_on(made, use)
    again, said_again = goes_on(loaded, use)
    assert said == said_again
    assert len(logits) == len(again) > 6
    assert all(torch.equal(a, b) for a, b in zip(logits, again, strict=True))
    assert counted(loaded) == counted(made)


def test_frames_of_a_processor_go_on(tmp_path: Path) -> None:
    """The opening is not written again; the clock, the block and the time stamps are those of the saved stream."""
    model, processor = matrix.model("llava"), tiny_folder.processor(chat=True)
    made = foveakv.stream(model, processor, budget=50, block=2, timestamps=True, saveable=True)
    made.feed([tiny_folder.picture(i) for i in range(2)], [0.5, 4.0])
    made.ask("which?", keep=True, max_new_tokens=2)
    made.save(tmp_path / "stream")
    passes = []
    for each in (made, foveakv.load_stream(tmp_path / "stream", model, processor)):
        with streamed.passes(model) as inputs:
            each.feed([tiny_folder.picture(i) for i in range(3)])
            with pytest.raises(errors.InputError, match="ascend"):
                each.feed(tiny_folder.picture(), [6.0])
        passes.append([step["input_ids"].tolist() for step in inputs])
    assert passes[0] == passes[1]
    assert len(passes[0]) == 2


def test_what_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "stream"
    with pytest.raises(errors.InputError, match="read nothing"):
        streamed.opened("llava", "infinipotv", 40, saveable=True).save(path)
    unsaveable = streamed.opened("llava", "infinipotv", 40)
    unsaveable.feed_inputs(streamed.block("llava", 0))
    with pytest.raises(errors.UnsupportedModeError, match="saveable"):
        unsaveable.save(path)
    made = streamed.opened("llava", "infinipotv", 40, saveable=True)
    made.feed_inputs(streamed.block("llava", 0))
    made.cache.save(path)  # type: ignore[union-attr]
    with pytest.raises(errors.StoreError, match="not a saved stream"):
        foveakv.load_stream(path, made.model, streamed.no_images())
    path.write_bytes(b"nothing")
    with pytest.raises(errors.StoreError, match="cannot read"):
        foveakv.load_stream(path, made.model, streamed.no_images())
    made.save(path)
    with pytest.raises(errors.InputError, match="does not fit"):
        foveakv.load_stream(path, matrix.model("qwen2_vl", torch.float64), streamed.no_images())
