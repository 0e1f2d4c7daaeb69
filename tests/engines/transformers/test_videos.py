"""Videos, and videos beside images, in left-padded batches, on every family that has them."""

from __future__ import annotations

from typing import Any

import families
import matrix
import pytest
import torch
from families import END, START, VIDEO, Clip, Picture, Row
from families.mrope import clip_inputs
from families.registry import noise
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_gradients")

METHODS = ["snapkv", "hae", "hybridkv", "h2o"]
FLAT = [name for name, family in families.FAMILIES.items() if family.video]  # one block of tokens for a video
FRAMES = ["qwen3_vl", "qwen3_5", "glm4v"]  # a block of tokens for each pair of frames, with text between them
FAMILIES = [*FLAT, *FRAMES, "llava_onevision"]
ROWS = [
    Row((4, Clip(4, 1), 9)),
    Row((3, Picture(0, 2), 5, Clip(2, 3), 12), 1),
    Row((2, Clip(6, 4), 3, Clip(2, 5), 4), 2),
]
PATCH = {"qwen3_vl": 16, "qwen3_5": 16, "glm4v": 14}


def clip_tokens(family: str, clip: Clip) -> list[int]:
    if family == "llava_onevision":
        return [VIDEO] * (clip.frames * 1 + 1)  # 2 x 2 patches are pooled to one token of a frame; a newline
    if family == "glm4v":  # a video's frames are marked as images between its own start and end
        frame = [START, *[families.IMAGE] * 4, END]
        return [families.VIDEO_START, *frame * (clip.frames // 2), families.VIDEO_END]
    frame = [START, *[VIDEO] * 4, END]
    return [token for number in range(clip.frames // 2) for token in [40 + number, *frame]]


def encode(family: str, rows: list[Row], dtype: torch.dtype) -> dict[str, Any]:
    """Inputs of `generate` for rows with videos."""
    if family in FLAT:
        return families.encode(family, rows, dtype)
    spec, ids = families.FAMILIES[family], []
    for row in rows:
        tokens = [families.BOS]
        for number, part in enumerate(row.parts):
            if isinstance(part, Picture):
                tokens += spec.tokens(part, len(row.pictures))
            elif isinstance(part, Clip):
                tokens += clip_tokens(family, part)
            else:
                tokens += families.words(part, 7919 * (row.seed + 1) + number)
        ids.append(tokens)
    width = max(map(len, ids))
    inputs: dict[str, Tensor] = {
        "input_ids": torch.tensor([[families.PAD] * (width - len(row)) + row for row in ids]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids]),
    }
    inputs |= families.token_types(family, inputs["input_ids"])
    clips = [clip for row in rows for clip in row.clips]
    if family == "glm4v" and "mm_token_type_ids" in inputs:
        start, end = (inputs["input_ids"] == token for token in (families.VIDEO_START, families.VIDEO_END))
        inside = (start.cumsum(1) - end.cumsum(1)) > 0
        kinds = inputs["mm_token_type_ids"]
        inputs["mm_token_type_ids"] = torch.where(inside & (kinds == 1), 2, kinds)
    if any(row.pictures for row in rows):
        assert spec.pixels is not None
        inputs |= spec.pixels([row.pictures for row in rows])
    if family == "llava_onevision":
        most = max(clip.frames for clip in clips)
        frames = torch.zeros(len(clips), most, 3, 28, 28)
        for i, clip in enumerate(clips):
            frames[i, : clip.frames] = noise(500 + clip.seed, clip.frames, 3, 28, 28)
        inputs["pixel_values_videos"] = frames
    else:
        inputs |= clip_inputs(clips, PATCH[family])
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}


def rows_of(family: str) -> list[Row]:
    """LLaVA-OneVision takes videos of one length in a batch, GLM-4V images or videos but not both."""
    if family == "glm4v":
        return [Row(tuple(part for part in row.parts if not isinstance(part, Picture)), row.seed) for row in ROWS]
    if family != "llava_onevision":
        return ROWS
    return [Row((4, Clip(6, 1), 9)), Row((3, Clip(6, 3), 5, Picture(0, 2), 12), 1), Row((2, Clip(6, 4), 3), 2)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_of_the_plain_model_equals_the_row_alone(family: str) -> None:
    """The inputs are right: each row's video is its own, and the model sees it."""
    model, rows = matrix.model(family, torch.float64), rows_of(family)
    inputs = encode(family, rows, torch.float64)
    together = model(**inputs).logits
    blind = {key: value * 0 if key == "pixel_values_videos" else value for key, value in inputs.items()}
    assert (model(**blind).logits[:, -1] - together[:, -1]).abs().amax(1).min() > 1e-3
    for b, row in enumerate(rows):
        alone = model(**encode(family, [row], torch.float64)).logits
        assert (together[b, -1] - alone[0, -1]).abs().max() < max(5e-6, families.exactness(family))  # pooled in fp32


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_videos_in_a_batch(family: str, name: str) -> None:
    model, inputs = matrix.model(family, torch.float64), encode(family, rows_of(family), torch.float64)
    run = matrix.compressed(model, matrix.method(name), inputs)
    assert run.session.report.evicted + run.session.report.retrieved > 0
    matrix.check_against_reference(model, run, inputs, families.exactness(family))
    matrix.check_storage(run)
    visual = run.cache.full_prompt.visual.sum(1).tolist()
    ids = inputs["input_ids"]
    assert visual == ((ids == VIDEO) | (ids == families.IMAGE)).sum(1).tolist()
