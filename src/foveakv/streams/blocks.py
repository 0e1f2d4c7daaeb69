"""Inputs of blocks: groups of frames as images, or as steps of a video where the model has a time axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from foveakv.engines.transformers.positions import CLOCKS
from foveakv.errors import InputError, UnsupportedModelError
from foveakv.models.images import read_image
from foveakv.models.inputs import process
from foveakv.streams.template import ChatParts

FrameForm = Literal["images", "video"]
STAMP = "<{:.1f} seconds>"
"""A time stamp as text, as Qwen3-VL writes it."""


@dataclass
class BlockInputs:
    """A block for `session.feed`.

    inputs: of the model, without masks and positions. times: seconds of every step of a video, None for images. units:
    for each frame of the block, the image or step of a video that it is in, counted from 0; None: every image or run of
    video tokens is a frame.
    """

    inputs: dict[str, Any]
    times: Sequence[float] | None
    units: Sequence[int] | None


class BlockMaker:
    """Makes the inputs of one stream's blocks and questions.

    Making changes nothing; `was_read` and `answered` say what became of it.

    Attributes:
        steps: frames in one step of a video; 1 for images.
        pending: token ids that come before the next block or question.

    Raises:
        UnsupportedModelError: `form` is "video", and this model's videos cannot be made from images.
    """

    def __init__(self, model: Any, processor: Any, form: FrameForm, stamps: bool) -> None:
        self.model = model
        self.processor = processor
        self.form = form
        self.stamps = stamps
        self.tokenizer = getattr(processor, "tokenizer", processor)
        if getattr(processor, "image_processor", None) is None:
            raise InputError(
                f"{type(processor).__name__} takes no images, so this model cannot read a stream of frames"
            )
        ends = getattr(model.generation_config, "eos_token_id", None)
        ends = self.tokenizer.eos_token_id if ends is None else ends
        self.ends: list[int] = [] if ends is None else list(ends) if isinstance(ends, (list, tuple)) else [int(ends)]
        self.parts = ChatParts.of(processor)
        self.steps = 1
        self.pending: list[int] = []
        self._began = self._open = False
        if form == "video":
            kind = CLOCKS.get(getattr(model.config, "model_type", ""))
            if kind is None or model.config.model_type == "glm4v":
                raise UnsupportedModelError(
                    f'frames="video" works with Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5; use frames="images" with '
                    f"{type(model).__name__}"
                )
            self.steps = int(getattr(processor.image_processor, "temporal_patch_size", 2))
            self._each_apart = kind == "text"

    def frames(self, images: Sequence[Any], times: Sequence[float], captions: Sequence[str]) -> BlockInputs:
        """Make the inputs of a block of frames; times in seconds, one per frame; captions: texts before frames."""
        read = [image if hasattr(image, "shape") else read_image(image) for image in images]
        if self.form == "video":
            return self._steps(read, times, captions)
        text = "" if self._began else self.parts.opening
        for time, caption in zip(times, captions, strict=True):
            text += (STAMP.format(time) if self.stamps else "") + caption + self.parts.image
        inputs = process(self.processor, text, read, self.model, begins=not self._began)
        inputs.pop("attention_mask", None)
        return BlockInputs(inputs, None, list(range(len(read))))

    def question(self, text: str) -> Tensor:
        """The token ids of a question up to where its answer begins, what is pending included: int64 [1, n]."""
        ids = self._closed() + self._ids(text + self.parts.closing)
        return torch.tensor([[*self.pending, *ids]], device=self.model.device)

    def answered(self, answer: list[int]) -> None:
        """The question and this answer stay in the context, all but the last token, which comes before what follows."""
        self._open = False
        last = answer[-1:]
        if self.ends and not (last and last[0] in self.ends):
            last = [*last, self.ends[0]]
        following = self._ids(self.parts.following)
        ended = last[-1:] == following[:1] and bool(self.ends)  # the template writes the end of the answer, too
        self.pending = [*last, *following[1 if ended else 0 :]]

    def after_pending(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs of a block, with the pending tokens before them."""
        if not self.pending:
            return inputs
        before = torch.tensor([self.pending], device=inputs["input_ids"].device)
        made = {**inputs, "input_ids": torch.cat([before, inputs["input_ids"]], 1)}
        for name in ("mm_token_type_ids", "token_type_ids", "attention_mask"):
            if inputs.get(name) is not None:
                new = torch.full_like(before, int(name == "attention_mask"), dtype=inputs[name].dtype)
                made[name] = torch.cat([new, inputs[name]], 1)
        return made

    def was_read(self, inputs: dict[str, Any]) -> None:
        """This block is in the context now, and what was pending before it."""
        self._began = True
        self._open = self.form == "video" and int(inputs["input_ids"][0, -1]) == self.model.config.video_token_id
        self.pending = []

    def _steps(self, images: list[Any], times: Sequence[float], captions: Sequence[str]) -> BlockInputs:
        """A block of a video: every `steps` frames are one step; the last frame is repeated to fill it."""
        if any(captions):
            raise InputError('frames of a video have no captions; use frames="images", or leave them out')
        count, size = len(images), self.steps
        fill = -count % size
        made = self.processor.image_processor(images=[*images, *images[-1:] * fill], return_tensors="pt")
        grids = made["image_grid_thw"]
        if bool((grids != grids[0]).any()):
            raise InputError("frames of a video must have one size; scale them first")
        steps, config = (count + fill) // size, self.model.config
        grid = torch.tensor([[steps, *grids[0, 1:].tolist()]])
        tokens = int(grid[0, 1] * grid[0, 2]) // config.vision_config.spatial_merge_size**2
        all_times = [*times, *[times[-1]] * fill]
        # Qwen3-VL stamps a step with the mean time of its first and last frame.
        means = [(all_times[i] + all_times[i + size - 1]) / 2 for i in range(0, len(all_times), size)]
        ids = [] if self._began else self._first_ids(self.parts.opening)
        start, end, video = config.vision_start_token_id, config.vision_end_token_id, config.video_token_id
        if self._each_apart:
            for mean in means:
                ids += [*self._ids(STAMP.format(mean)), start, *[video] * tokens, end]
        else:
            ids += [*([] if self._open else [start]), *[video] * (tokens * steps)]
        device = self.model.device
        input_ids = torch.tensor([ids], device=device)
        pixels = _paired(made["pixel_values"], count + fill, size).to(device, self.model.dtype)
        inputs = {
            "input_ids": input_ids,
            "mm_token_type_ids": 2 * (input_ids == video).long(),
            "pixel_values_videos": pixels,
            "video_grid_thw": grid.to(device),
        }
        units = [frame // size for frame in range(count)]
        return BlockInputs(inputs, means, units)

    def _closed(self) -> list[int]:
        """The token that ends a video, if one is open."""
        return [self.model.config.vision_end_token_id] if self._open else []

    def _first_ids(self, text: str) -> list[int]:
        bos = getattr(self.tokenizer, "bos_token", None)
        special = not (bos and text.startswith(bos))
        return list(self.tokenizer(text, add_special_tokens=special)["input_ids"])

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def _paired(pixels: Tensor, frames: int, size: int) -> Tensor:
    """Patches of images, each repeated `size` times in its patches, as patches of steps with `size` frames each.

    pixels: [frames * patches, channels * size * height * width], in that order, of the Qwen families' image processors.
    """
    patches = pixels.shape[0] // frames
    by_frame = pixels.view(frames // size, size, patches, 3, size, -1)
    return torch.stack([by_frame[:, i, :, :, i] for i in range(size)], 3).reshape(frames // size * patches, -1)
