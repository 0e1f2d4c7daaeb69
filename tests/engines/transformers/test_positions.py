"""Positions made block by block equal the model's own for the whole context, for every family."""

from __future__ import annotations

from typing import Any

import families
import matrix
import pytest
import torch
from families import END, IMAGE, START, VIDEO, VIDEO_END, VIDEO_START

from foveakv.engines.transformers.positions import CLOCKS, Positions
from foveakv.errors import InputError, UnsupportedModelError

MROPE = sorted(CLOCKS)
GRIDS = [(8, 8), (4, 12), (12, 4)]


def block(parts: list[Any]) -> dict[str, Any]:
    """Inputs of a block: an int is that many words, ("image", h, w) an image, ("video", t, h, w) steps of a video, and
    a string one of the special tokens."""
    ids: list[int] = []
    types: list[int] = []
    grids: dict[str, list[list[int]]] = {"image": [], "video": []}
    for part in parts:
        if isinstance(part, int):
            ids += families.words(part, len(ids))
            types += [0] * part
        elif isinstance(part, str):
            ids.append({"start": START, "end": END, "open": VIDEO_START, "close": VIDEO_END}[part])
            types.append(0)
        else:
            kind, *grid = part
            grid = [1, *grid] if kind == "image" else grid
            grids[kind].append(grid)
            count = grid[0] * grid[1] * grid[2] // 4
            ids += [IMAGE if kind == "image" else VIDEO] * count
            types += [1 if kind == "image" else 2] * count
    made: dict[str, Any] = {"input_ids": torch.tensor([ids]), "mm_token_type_ids": torch.tensor([types])}
    for kind, rows in grids.items():
        if rows:
            made[f"{kind}_grid_thw"] = torch.tensor(rows)
    return made


def joined(blocks: list[dict[str, Any]], clip: list[int] | None = None) -> dict[str, Any]:
    """All blocks as one prompt; clip: the grid of the video that goes through all of them."""
    names = {name for each in blocks for name in each}
    made = {n: torch.cat([each[n] for each in blocks if n in each], 0 if "grid" in n else 1) for n in names}
    if clip is not None:
        made["video_grid_thw"] = torch.tensor([clip])
    return made


def whole(family: str, inputs: dict[str, Any], **more: Any) -> torch.Tensor:
    positions, _ = matrix.model(family).model.get_rope_index(**inputs, **more)
    return positions


@pytest.mark.parametrize("family", MROPE)
def test_frames_as_images(family: str) -> None:
    blocks = [block([3, "start"])]
    for step in range(7):
        blocks += [
            block([("image", *GRIDS[step % 3]), "end", 2, "start", ("image", *GRIDS[0]), "end"]),
            block([1, "start"]),
        ]
    positions = Positions(matrix.model(family))
    made = torch.cat([positions.block(each) for each in blocks], -1)
    want = whole(family, joined(blocks))
    assert torch.equal(made, want)
    assert positions.highest == int(want.max())
    assert torch.equal(positions.text(3), positions.next - 3 + torch.arange(3).expand(3, 1, 3))


@pytest.mark.parametrize("period", [1.0, 0.5, 1 / 3, 0.08, 2.5])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_one_video_in_blocks(family: str, period: float) -> None:
    """A clip of 40 steps with a regular clock, in blocks of 1 to 4 steps; then text, and a second clip."""
    sizes = [1, 3, 4, 2] * 4
    grid = (4, 12)
    blocks = [block([3, "start"]), *[block([("video", size, *grid)]) for size in sizes], block(["end", 4])]
    steps = [i * period + 17.25 for i in range(sum(sizes))]
    positions, made, place = Positions(matrix.model(family)), [], 0
    for each in blocks:
        size = int(each["video_grid_thw"][0, 0]) if "video_grid_thw" in each else 0
        made.append(positions.block(each, steps[place : place + size] if size else None))
        place += size
    more = {"second_per_grid_ts": torch.tensor([period])} if family == "qwen2_5_vl" else {}
    want = whole(family, joined(blocks, [sum(sizes), *grid]), **more)
    assert torch.equal(torch.cat(made, -1), want)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_without_a_clock(family: str) -> None:
    blocks = [
        block([3, "start", ("video", 2, 4, 4)]),
        block([("video", 3, 4, 4)]),
        block([("video", 1, 4, 4), "end", 2]),
    ]
    positions = Positions(matrix.model(family))
    made = torch.cat([positions.block(each) for each in blocks], -1)
    assert torch.equal(made, whole(family, joined(blocks, [6, 4, 4])))


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "glm4v"])
def test_video_with_time_stamps_as_text(family: str) -> None:
    """A run of tokens for each step, with its time as text before it."""
    glm = family == "glm4v"
    blocks = [block([3, *(["open"] if glm else [])])]
    blocks += [block([4, "start", ("video", 1, 4, 12), "end"]) for _ in range(6)]
    blocks.append(block([*(["close"] if glm else []), 3]))
    positions = Positions(matrix.model(family))
    made = torch.cat([positions.block(each) for each in blocks], -1)
    assert torch.equal(made, whole(family, joined(blocks, [6, 4, 12])))


NUMBERED = [name for name in families.VISUAL if name not in MROPE]


@pytest.mark.parametrize("family", [*NUMBERED, *families.TEXT])
def test_models_that_number_tokens(family: str) -> None:
    positions = Positions(matrix.model(family))
    inputs = families.prompt(family)
    made = [positions.block(inputs), positions.text(3), positions.block(inputs)]
    total = 2 * inputs["input_ids"].shape[1] + 3
    assert torch.equal(torch.cat(made, -1), torch.arange(total)[None])
    assert (positions.next, positions.highest) == (total, total - 1)


def test_a_pause_leaves_a_gap_on_the_time_axis() -> None:
    """Half a minute without frames: the model sees it where it counts seconds or steps."""
    for family, gap in (("qwen2_vl", 60), ("qwen2_5_vl", 30 * 4)):  # of half a second; tokens_per_second is 4
        positions = Positions(matrix.model(family))
        before = positions.block(block(["start", ("video", 2, 4, 4)]), [0.0, 0.5])
        after = positions.block(block([("video", 1, 4, 4)]), [30.5])
        assert int(after[0].min() - before[0].max()) == gap
        assert torch.equal(after[1:], before[1:, :, -4:])


def test_wrong_inputs() -> None:
    positions = Positions(matrix.model("qwen2_vl"))
    with pytest.raises(InputError, match="no grid fits"):
        positions.block({"input_ids": torch.tensor([[VIDEO] * 3]), "mm_token_type_ids": torch.tensor([[2] * 3])})
    with pytest.raises(InputError, match="a time for each"):
        Positions(matrix.model("qwen2_vl")).block(block([("video", 2, 4, 4)]), [1.0])
    with pytest.raises(InputError, match="more times"):
        Positions(matrix.model("qwen2_vl")).block(block([("video", 1, 4, 4)]), [1.0, 2.0])


def test_unknown_families_are_refused() -> None:
    model = families.build("qwen2_vl")
    model.config.model_type = "future_vl"
    with pytest.raises(UnsupportedModelError, match="not known for blocks"):
        Positions(model)
