"""LLaVA and its relatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

from families.registry import CLIP, SIGLIP, flat, image_tokens, language, noise, register, square_pixels
from families.rows import BREAK, END, IMAGE, VIDEO, Inputs, Picture

_PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 128,
    "patch_size": 16,
}


@register("llava", "LlavaForConditionalGeneration", pixels=square_pixels(56), tokens=image_tokens(16))
def _llava() -> Any:
    text = language(model_type="llama")
    return hf.LlavaConfig(text_config=text, vision_config=dict(CLIP), image_token_index=IMAGE, image_seq_length=16)


def _frame_pixels(sizes: list[tuple[int, int]]) -> Callable[[list[list[Picture]]], Inputs]:
    """Images of different sizes in one frame that fits the largest, and their sizes."""

    def pixels(rows: list[list[Picture]]) -> Inputs:
        pictures = flat(rows)
        shapes = [sizes[picture.size] for picture in pictures]
        frame = torch.zeros(len(pictures), 3, max(h for h, _ in shapes), max(w for _, w in shapes))
        for i, (picture, (height, width)) in enumerate(zip(pictures, shapes, strict=True)):
            frame[i, :, :height, :width] = noise(picture.seed, 3, height, width)
        return {"pixel_values": frame, "image_sizes": torch.tensor(shapes)}

    return pixels


def _rows_of(sizes: list[tuple[int, int]], cell: int) -> Callable[[Picture, int], list[int]]:
    """Image tokens row by row, a break id after every row and an end id after the last."""

    def tokens(picture: Picture, count: int) -> list[int]:
        height, width = (side // cell for side in sizes[picture.size])
        return [*([*[IMAGE] * width, BREAK] * height)[:-1], END]

    return tokens


_PIXTRAL_SIZES = [(64, 64), (48, 64), (64, 32)]
_MISTRAL_SIZES = [(128, 128), (64, 128), (128, 96)]


@register(
    "llava_pixtral",
    "LlavaForConditionalGeneration",
    pixels=_frame_pixels(_PIXTRAL_SIZES),
    tokens=_rows_of(_PIXTRAL_SIZES, 16),
    sizes=3,
)
def _llava_pixtral() -> Any:
    return hf.LlavaConfig(
        text_config=language(model_type="mistral", head_dim=16, sliding_window=None),
        vision_config=dict(_PIXTRAL),
        image_token_index=IMAGE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )


@register(
    "mistral3",
    "Mistral3ForConditionalGeneration",
    pixels=_frame_pixels(_MISTRAL_SIZES),
    tokens=_rows_of(_MISTRAL_SIZES, 32),
    sizes=3,
)
def _mistral3() -> Any:
    return hf.Mistral3Config(
        text_config=language(model_type="mistral", head_dim=16, sliding_window=None),
        vision_config=dict(_PIXTRAL),
        image_token_index=IMAGE,
        spatial_merge_size=2,
    )


def _tile_pixels(sizes: list[tuple[int, int]], tile: int) -> Callable[[list[list[Picture]]], Inputs]:
    """The whole image in one tile, then the tiles of the image; padded to the most tiles of the batch."""

    def pixels(rows: list[list[Picture]]) -> Inputs:
        pictures = flat(rows)
        shapes = [sizes[picture.size] for picture in pictures]
        counts = [1 + (height // tile) * (width // tile) for height, width in shapes]
        tiles = torch.zeros(len(pictures), max(counts), 3, tile, tile)
        for i, (picture, count) in enumerate(zip(pictures, counts, strict=True)):
            tiles[i, :count] = noise(picture.seed, count, 3, tile, tile)
        return {"pixel_values": tiles, "image_sizes": torch.tensor(shapes)}

    return pixels


_NEXT_SIZES = [(56, 56), (28, 56)]
_PINPOINTS = [[28, 56], [56, 28], [56, 56]]


def _next_tokens(picture: Picture, count: int) -> list[int]:
    rows, columns = (side // 14 for side in _NEXT_SIZES[picture.size])
    return [IMAGE] * (4 + rows * columns + rows)  # base tile, tiles, one newline a row


@register(
    "llava_next",
    "LlavaNextForConditionalGeneration",
    pixels=_tile_pixels(_NEXT_SIZES, 28),
    tokens=_next_tokens,
    sizes=2,
)
def _llava_next() -> Any:
    return hf.LlavaNextConfig(
        text_config=language(model_type="llama"),
        vision_config={**CLIP, "image_size": 28},
        image_token_index=IMAGE,
        image_grid_pinpoints=_PINPOINTS,
        image_seq_length=4,
    )


def _onevision_pixels(rows: list[list[Picture]]) -> Inputs:
    counts = torch.tensor([len(row) for row in rows if row])
    return _tile_pixels(_NEXT_SIZES, 28)(rows) | {"batch_num_images": counts}


def _onevision_tokens(picture: Picture, count: int) -> list[int]:
    return _next_tokens(picture, count) if count == 1 else [IMAGE] * (4 + 1)  # several images: base tile and a newline


@register(
    "llava_onevision",
    "LlavaOnevisionForConditionalGeneration",
    pixels=_onevision_pixels,
    tokens=_onevision_tokens,
    sizes=2,
)
def _llava_onevision() -> Any:
    return hf.LlavaOnevisionConfig(
        text_config=language(model_type="qwen2"),
        vision_config={**SIGLIP, "image_size": 28},
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        image_grid_pinpoints=_PINPOINTS,
    )
