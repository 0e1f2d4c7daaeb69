"""M-RoPE families: patches in one flat sequence, the grid of every image beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

from families.registry import flat, language, noise, register
from families.rows import END, HIDDEN, IMAGE, LAYERS, START, VIDEO, VIDEO_END, VIDEO_START, Clip, Inputs, Picture

GRIDS = [(8, 8), (4, 12), (12, 4), (4, 4)]  # height and width in patches; two by two patches are one token


def _grid_tokens(picture: Picture, count: int) -> list[int]:
    height, width = GRIDS[picture.size]
    return [START, *[IMAGE] * (height * width // 4), END]


def _grid_pixels(patch: int) -> Callable[[list[list[Picture]]], Inputs]:
    def pixels(rows: list[list[Picture]]) -> Inputs:
        pictures = flat(rows)
        grids = [GRIDS[picture.size] for picture in pictures]
        patches = [noise(p.seed, h * w, 3 * 2 * patch * patch) for p, (h, w) in zip(pictures, grids, strict=True)]
        return {
            "pixel_values": torch.cat(patches),
            "image_grid_thw": torch.tensor([[1, h, w] for h, w in grids]),
        }

    return pixels


def clip_inputs(clips: list[Clip], patch: int = 14) -> Inputs:
    grids = [(clip.frames // 2, 4, 4) for clip in clips]
    return {
        "pixel_values_videos": torch.cat(
            [noise(500 + c.seed, t * h * w, 3 * 2 * patch * patch) for c, (t, h, w) in zip(clips, grids, strict=True)]
        ),
        "video_grid_thw": torch.tensor(grids),
    }


_QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_GRID = {"tokens": _grid_tokens, "sizes": len(GRIDS), "types": "mm_token_type_ids"}


@register("qwen2_vl", "Qwen2VLForConditionalGeneration", pixels=_grid_pixels(14), video=True, **_GRID)
def _qwen2_vl() -> Any:
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": HIDDEN, "num_heads": 4, "mlp_ratio": 2, "patch_size": 14}
    return hf.Qwen2VLConfig(text_config=language(rope_parameters=dict(_MROPE)), vision_config=vision, **_QWEN_IDS)


@register("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", pixels=_grid_pixels(14), video=True, **_GRID)
def _qwen2_5_vl() -> Any:
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "out_hidden_size": HIDDEN,
        "patch_size": 14,
        "fullatt_block_indexes": [1],
        "window_size": 56,
    }
    return hf.Qwen2_5_VLConfig(text_config=language(rope_parameters=dict(_MROPE)), vision_config=vision, **_QWEN_IDS)


_QWEN3_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "out_hidden_size": HIDDEN,
    "patch_size": 16,
    "num_position_embeddings": 64,
}


@register("qwen3_vl", "Qwen3VLForConditionalGeneration", pixels=_grid_pixels(16), **_GRID)
def _qwen3_vl() -> Any:
    text = language(head_dim=16, rope_parameters={**_MROPE, "mrope_interleaved": True})
    vision = {**_QWEN3_VISION, "deepstack_visual_indexes": [0]}
    return hf.Qwen3VLConfig(text_config=text, vision_config=vision, **_QWEN_IDS)


@register("qwen3_5", "Qwen3_5ForConditionalGeneration", pixels=_grid_pixels(16), **_GRID)
def _qwen3_5() -> Any:
    text = language(
        head_dim=16,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        rope_parameters={**_MROPE, "partial_rotary_factor": 1.0},
        layer_types=["linear_attention", "full_attention"] * (LAYERS // 2),
    )
    return hf.Qwen3_5Config(text_config=text, vision_config=dict(_QWEN3_VISION), **_QWEN_IDS)


@register("glm4v", "Glm4vForConditionalGeneration", pixels=_grid_pixels(14), **_GRID)
def _glm4v() -> Any:
    text = language(rope_parameters={**_MROPE, "partial_rotary_factor": 1.0})
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "out_hidden_size": HIDDEN,
        "patch_size": 14,
        "image_size": 112,
    }
    return hf.Glm4vConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        image_start_token_id=START,
        image_end_token_id=END,
        video_start_token_id=VIDEO_START,
        video_end_token_id=VIDEO_END,
    )
