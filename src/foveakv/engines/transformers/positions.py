"""Position ids of a context that is read block by block: those that the model gives to all of it at once.

Most models number tokens from 0. Models with M-RoPE number visual tokens on three axes (time, height, width), and
transformers places them for a first prompt only. Here a counter takes the place of the model's `rope_deltas`: what has
been evicted leaves a gap, and nothing that is stored moves.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from foveakv.errors import InputError, UnsupportedModelError

Clock = Literal["index", "seconds", "text"]

CLOCKS: dict[str, Clock] = {
    "qwen2_vl": "index",
    "qwen2_5_vl": "seconds",
    "qwen3_vl": "text",
    "qwen3_5": "text",
    "glm4v": "text",
}
"""What the time axis of a video counts, for the models whose positions are known here: steps of the video ("index"),
their time ("seconds", times `tokens_per_second` of the model), or nothing, because time stamps are text ("text")."""


@dataclass
class Clip:
    """A video that is being read. start: position of its first token. first: time of its first step in seconds.
    period: seconds between steps; None until there are two. steps: steps read so far. end: position after it."""

    start: int
    first: float
    period: float | None
    steps: int
    end: int


class Positions:
    """Counts the positions of one sequence.

    Attributes:
        next: position of the next text token.
        highest: the highest position so far on any axis, -1 before the first token.
        clock: see `CLOCKS`; None for models that number tokens.

    Raises:
        UnsupportedModelError: the model numbers visual tokens in a way that is not known here.
    """

    def __init__(self, model: Any) -> None:
        self.next = 0
        self.highest = -1
        self.clock: Clock | None = None
        self._clip: Clip | None = None
        inner = getattr(model, "model", model)
        if not hasattr(inner, "get_rope_index"):
            return
        kind = getattr(model.config, "model_type", "")
        if kind not in CLOCKS:
            raise UnsupportedModelError(
                f"{type(model).__name__} numbers the tokens of images on several axes, in a way that is not known for "
                f"blocks; supported: {', '.join(CLOCKS)}, and models that number tokens one by one"
            )
        self.clock = CLOCKS[kind]
        vision = model.config.vision_config
        self._merge = int(vision.spatial_merge_size)
        self._rate = float(getattr(vision, "tokens_per_second", 1.0))

    def block(self, inputs: dict[str, Any], times: Sequence[float] | None = None) -> Tensor:
        """Return the position ids of the next block, and count on.

        Args:
            inputs: the processor's outputs for the block alone: `input_ids` [1, n] without padding, and for models with
                M-RoPE `mm_token_type_ids` [1, n] (0 text, 1 image, 2 video), `image_grid_thw` and `video_grid_thw`
                [visual runs, 3]. Video tokens at the start of a block continue the video at the end of the one before.
            times: seconds of every step of the block's videos (a step is two frames in most models), ascending over the
                context. None: steps follow each other at one step per second.

        Returns:
            int64 [1, n], or [3, 1, n] with M-RoPE, on the device of the ids.

        Raises:
            InputError: there is no grid for a visual run, or another number of times than steps.
        """
        ids = inputs["input_ids"]
        types = inputs.get("mm_token_type_ids")
        if self.clock is None or types is None:
            return self.text(ids.shape[1]).to(ids.device)
        clock = None if times is None or self._apart else iter(times)
        grids = {1: _grids(inputs.get("image_grid_thw"), False), 2: _grids(inputs.get("video_grid_thw"), self._apart)}
        found = []
        for kind, run in itertools.groupby(types[0].tolist()):
            length = len(list(run))
            if kind == 0:
                self._clip = None
                found.append(self._count(length))
                continue
            grid = next(grids[kind], None)
            if grid is None or grid[0] * grid[1] * grid[2] != length * self._merge**2:
                raise InputError(f"no grid fits a visual run of {length} tokens; pass what the processor returned")
            found.append(self._video(grid, clock) if kind == 2 and not self._apart else self._image(grid))
        if clock is not None and next(clock, None) is not None:
            raise InputError("there are more times than steps of videos in this block")
        made = torch.cat(found, 1)
        self.highest = max(self.highest, int(made.max()))
        return made[:, None].to(ids.device)

    def text(self, count: int) -> Tensor:
        """Return the position ids of `count` text tokens, and count on: int64 [1, count], or [3, 1, count]."""
        self._clip = None
        made = self._count(count)
        self.highest = max(self.highest, self.next - 1)
        return made[:1] if self.clock is None else made[:, None]

    @property
    def _apart(self) -> bool:
        """Whether the steps of a video are runs of their own, with text between them."""
        return self.clock == "text"

    def _count(self, count: int) -> Tensor:
        made = torch.arange(self.next, self.next + count).expand(3, -1)
        self.next += count
        return made

    def _image(self, grid: tuple[int, int, int]) -> Tensor:
        """Positions [3, tokens] of an image, or of a step of a video."""
        self._clip = None
        made = self._grid(torch.zeros(grid[0], dtype=torch.int64) + torch.arange(grid[0]), self.next, grid)
        self.next += max(grid[1:]) // self._merge
        return made

    def _video(self, grid: tuple[int, int, int], clock: Any) -> Tensor:
        """Positions [3, tokens] of the next steps of a video."""
        times = None if clock is None else list(itertools.islice(clock, grid[0]))
        if times is not None and len(times) < grid[0]:
            raise InputError(f"a block with {grid[0]} more steps of a video needs a time for each")
        clip = self._clip
        if clip is None:
            first = 0.0 if times is None else times[0]
            clip = Clip(self.next, first, None, 0, self.next + max(grid[1:]) // self._merge)
            self._clip = clip
        made = self._grid(self._steps(clip, grid[0], times), clip.start, grid)
        clip.steps += grid[0]
        self.next = clip.end
        return made

    def _steps(self, clip: Clip, count: int, times: list[float] | None) -> Tensor:
        """Places on the time axis of the next `count` steps, from the start of the clip: int64 [count]."""
        index = torch.arange(clip.steps, clip.steps + count)
        if times is None:
            return (index * self._rate).long() if self.clock == "seconds" else index
        if clip.period is None and clip.steps + count > 1:
            second = 1 - clip.steps
            clip.period = max(times[second] - clip.first, 1e-6) if second >= 0 else 1.0
        period = clip.period or 1.0
        passed = torch.tensor([time - clip.first for time in times], dtype=torch.float64) / period
        whole = passed.round()
        if self.clock == "index":
            return whole.long()  # one place for each period, also where frames are missing
        # On a regular clock, the model's own single-precision product; else the time itself.
        regular = (whole.long() * (self._rate * period)).long()
        exact = (passed * (self._rate * period) + 1e-6).long()
        return torch.where((passed - whole).abs() < 1e-3, regular, exact)

    def _grid(self, steps: Tensor, start: int, grid: tuple[int, int, int]) -> Tensor:
        rows, columns = torch.arange(grid[1] // self._merge), torch.arange(grid[2] // self._merge)
        axes = torch.meshgrid(steps, rows, columns, indexing="ij")
        return torch.stack(axes).reshape(3, -1) + start


def _grids(grids: Tensor | None, apart: bool) -> Any:
    """An iterator over grids (steps, height, width); apart: one of each step."""
    if grids is None:
        return iter(())
    rows = [(int(t), int(h), int(w)) for t, h, w in grids.tolist()]
    return iter([(1, h, w) for t, h, w in rows for _ in range(t)] if apart else rows)
