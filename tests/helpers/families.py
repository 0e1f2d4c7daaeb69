"""Tiny random-weight models of every family, and prompts for them.

`build("qwen2_5_vl")` gives a four-layer model in a few hundredths of a second, `prompt("qwen2_5_vl", images=2)` the
inputs that `generate` takes, `batch(...)` left-padded rows with different images together with the same rows alone, and
`first_turn` and `next_turn` the inputs of a conversation. Nothing is downloaded.

A row is described by its parts: an int is that many text tokens, a `Picture` is one image, a `Clip` is one video.
Tokens and pixels are drawn from the row's and the picture's own seed, so a row is the same alone and inside a batch.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers.generation import utils as generation

Inputs = dict[str, Tensor]

VOCABULARY = 300
PAD, BOS, EOS = 0, 1, 2
TEXT_IDS = range(10, 280)  # ordinary words; everything outside stands for something and is never generated
IMAGE, VIDEO, START, END, BREAK, AUDIO, VIDEO_START, VIDEO_END = 290, 291, 292, 293, 294, 295, 296, 297
LAYERS, HIDDEN, HEADS, KV_HEADS = 4, 64, 4, 2

IMAGES_IN_CHUNKS = "mm_encoder_outputs" in generation.MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL
images_in_chunks = pytest.mark.skipif(
    not IMAGES_IN_CHUNKS, reason="this transformers loses the images of a prefill in chunks; we refuse it"
)


# ------------------------------------------------------------------------------------------------------------ rows


@dataclass(frozen=True)
class Picture:
    """One image: `size` is an index into the family's sizes, `seed` draws the pixels."""

    size: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Clip:
    """One video of `frames` frames, for the families whose spec has `video=True`."""

    frames: int = 4
    seed: int = 0


@dataclass(frozen=True)
class Row:
    parts: tuple[int | Picture | Clip, ...]
    seed: int = 0

    @property
    def pictures(self) -> list[Picture]:
        return [part for part in self.parts if isinstance(part, Picture)]

    @property
    def clips(self) -> list[Clip]:
        return [part for part in self.parts if isinstance(part, Clip)]


@dataclass(frozen=True)
class Batch:
    """`inputs` is the left-padded batch; `singles[i]` is row i alone; `pads[i]` how many pad tokens row i got."""

    inputs: Inputs
    singles: list[Inputs]
    pads: list[int]
    rows: list[Row]


# ------------------------------------------------------------------------------------------------- family registry


@dataclass(frozen=True)
class Family:
    """How to make a family's models and prompts.

    `pixels` makes the pixel inputs of a batch of rows, `tokens` the ids of one image in a row of so many images; there
    are `sizes` sizes of image. `types` names the token type input (1 at images, 2 at videos). `doubtful`: the plain
    model, or its cache, has something that compression may not be able to honour. `mixed_counts`: rows of a batch may
    hold different numbers of images.
    """

    name: str
    model_class: str
    config: Callable[[], Any]
    pixels: Callable[[list[list[Picture]]], Inputs] | None = None
    tokens: Callable[[Picture, int], list[int]] = lambda picture, count: []
    sizes: int = 1
    types: str | None = None
    video: bool = False
    doubtful: bool = False
    mixed_counts: bool = True


FAMILIES: dict[str, Family] = {}


def _family(name: str, model_class: str, **options: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def register(config: Callable[[], Any]) -> Callable[[], Any]:
        FAMILIES[name] = Family(name, model_class, config, **options)
        return config

    return register


def language(**changes: Any) -> dict[str, Any]:
    base = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 4096,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "tie_word_embeddings": False,
    }
    return base | changes


def _noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 + seed))


def _flat(rows: list[list[Picture]]) -> list[Picture]:
    return [picture for row in rows for picture in row]


def _count(total: int, before: Sequence[int] = (), after: Sequence[int] = ()) -> Callable[[Picture, int], list[int]]:
    """Every image is `total` image tokens between the ids `before` and `after`."""
    return lambda picture, count: [*before, *[IMAGE] * total, *after]


# --- M-RoPE families: patches in one flat sequence, the grid of every image beside them

GRIDS = [(8, 8), (4, 12), (12, 4), (4, 4)]  # height and width in patches; two by two patches are one token


def _grid_tokens(picture: Picture, count: int) -> list[int]:
    height, width = GRIDS[picture.size]
    return [START, *[IMAGE] * (height * width // 4), END]


def _grid_pixels(patch: int) -> Callable[[list[list[Picture]]], Inputs]:
    def pixels(rows: list[list[Picture]]) -> Inputs:
        pictures = _flat(rows)
        grids = [GRIDS[picture.size] for picture in pictures]
        patches = [_noise(p.seed, h * w, 3 * 2 * patch * patch) for p, (h, w) in zip(pictures, grids, strict=True)]
        return {
            "pixel_values": torch.cat(patches),
            "image_grid_thw": torch.tensor([[1, h, w] for h, w in grids]),
        }

    return pixels


def clip_inputs(clips: list[Clip], patch: int = 14) -> Inputs:
    grids = [(clip.frames // 2, 4, 4) for clip in clips]
    return {
        "pixel_values_videos": torch.cat(
            [_noise(500 + c.seed, t * h * w, 3 * 2 * patch * patch) for c, (t, h, w) in zip(clips, grids, strict=True)]
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


@_family("qwen2_vl", "Qwen2VLForConditionalGeneration", pixels=_grid_pixels(14), video=True, **_GRID)
def _qwen2_vl() -> Any:
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": HIDDEN, "num_heads": 4, "mlp_ratio": 2, "patch_size": 14}
    return hf.Qwen2VLConfig(text_config=language(rope_parameters=dict(_MROPE)), vision_config=vision, **_QWEN_IDS)


@_family("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", pixels=_grid_pixels(14), video=True, **_GRID)
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


@_family("qwen3_vl", "Qwen3VLForConditionalGeneration", pixels=_grid_pixels(16), **_GRID)
def _qwen3_vl() -> Any:
    text = language(head_dim=16, rope_parameters={**_MROPE, "mrope_interleaved": True})
    vision = {**_QWEN3_VISION, "deepstack_visual_indexes": [0]}
    return hf.Qwen3VLConfig(text_config=text, vision_config=vision, **_QWEN_IDS)


@_family("qwen3_5", "Qwen3_5ForConditionalGeneration", pixels=_grid_pixels(16), **_GRID)
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


@_family("glm4v", "Glm4vForConditionalGeneration", pixels=_grid_pixels(14), **_GRID)
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


# --- LLaVA and its relatives

_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
    "projection_dim": 32,
}
_SIGLIP = {**_CLIP, "model_type": "siglip_vision_model"}
_PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 128,
    "patch_size": 16,
}


def _square_pixels(side: int) -> Callable[[list[list[Picture]]], Inputs]:
    return lambda rows: {"pixel_values": torch.stack([_noise(p.seed, 3, side, side) for p in _flat(rows)])}


@_family("llava", "LlavaForConditionalGeneration", pixels=_square_pixels(56), tokens=_count(16))
def _llava() -> Any:
    text = language(model_type="llama")
    return hf.LlavaConfig(text_config=text, vision_config=dict(_CLIP), image_token_index=IMAGE, image_seq_length=16)


def _frame_pixels(sizes: list[tuple[int, int]]) -> Callable[[list[list[Picture]]], Inputs]:
    """Images of different sizes in one frame that fits the largest, and their sizes."""

    def pixels(rows: list[list[Picture]]) -> Inputs:
        pictures = _flat(rows)
        shapes = [sizes[picture.size] for picture in pictures]
        frame = torch.zeros(len(pictures), 3, max(h for h, _ in shapes), max(w for _, w in shapes))
        for i, (picture, (height, width)) in enumerate(zip(pictures, shapes, strict=True)):
            frame[i, :, :height, :width] = _noise(picture.seed, 3, height, width)
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


@_family(
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


@_family(
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
        pictures = _flat(rows)
        shapes = [sizes[picture.size] for picture in pictures]
        counts = [1 + (height // tile) * (width // tile) for height, width in shapes]
        tiles = torch.zeros(len(pictures), max(counts), 3, tile, tile)
        for i, (picture, count) in enumerate(zip(pictures, counts, strict=True)):
            tiles[i, :count] = _noise(picture.seed, count, 3, tile, tile)
        return {"pixel_values": tiles, "image_sizes": torch.tensor(shapes)}

    return pixels


_NEXT_SIZES = [(56, 56), (28, 56)]
_PINPOINTS = [[28, 56], [56, 28], [56, 56]]


def _next_tokens(picture: Picture, count: int) -> list[int]:
    rows, columns = (side // 14 for side in _NEXT_SIZES[picture.size])
    return [IMAGE] * (4 + rows * columns + rows)  # base tile, tiles, one newline a row


@_family(
    "llava_next",
    "LlavaNextForConditionalGeneration",
    pixels=_tile_pixels(_NEXT_SIZES, 28),
    tokens=_next_tokens,
    sizes=2,
)
def _llava_next() -> Any:
    return hf.LlavaNextConfig(
        text_config=language(model_type="llama"),
        vision_config={**_CLIP, "image_size": 28},
        image_token_index=IMAGE,
        image_grid_pinpoints=_PINPOINTS,
        image_seq_length=4,
    )


def _onevision_pixels(rows: list[list[Picture]]) -> Inputs:
    counts = torch.tensor([len(row) for row in rows if row])
    return _tile_pixels(_NEXT_SIZES, 28)(rows) | {"batch_num_images": counts}


def _onevision_tokens(picture: Picture, count: int) -> list[int]:
    return _next_tokens(picture, count) if count == 1 else [IMAGE] * (4 + 1)  # several images: base tile and a newline


@_family(
    "llava_onevision",
    "LlavaOnevisionForConditionalGeneration",
    pixels=_onevision_pixels,
    tokens=_onevision_tokens,
    sizes=2,
)
def _llava_onevision() -> Any:
    return hf.LlavaOnevisionConfig(
        text_config=language(model_type="qwen2"),
        vision_config={**_SIGLIP, "image_size": 28},
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        image_grid_pinpoints=_PINPOINTS,
    )


# --- others

_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@_family(
    "internvl",
    "InternVLForConditionalGeneration",
    pixels=_square_pixels(112),
    tokens=_count(16, [START], [END]),
)
def _internvl() -> Any:
    return hf.InternVLConfig(
        text_config=language(model_type="qwen2"),
        vision_config={**_TOWER, "image_size": [112, 112], "patch_size": [14, 14]},
        image_token_id=IMAGE,
        image_seq_length=16,
    )


def _idefics_pixels(rows: list[list[Picture]]) -> Inputs:
    most = max(len(row) for row in rows)
    pixels = torch.zeros(len(rows), most, 3, 128, 128)  # an all-zero image counts as padding
    mask = torch.zeros(len(rows), most, 128, 128, dtype=torch.long)
    for b, row in enumerate(rows):
        for i, picture in enumerate(row):
            pixels[b, i] = _noise(picture.seed, 3, 128, 128)
            mask[b, i] = 1
    return {"pixel_values": pixels, "pixel_attention_mask": mask}


def _idefics(config_class: str) -> Any:
    return getattr(hf, config_class)(
        text_config=language(model_type="llama"),
        vision_config={**_TOWER, "image_size": 128, "patch_size": 16},
        image_token_id=IMAGE,
        scale_factor=2,
        pad_token_id=PAD,
    )


_IDEFICS = {"pixels": _idefics_pixels, "tokens": _count(16, [START], [START])}


@_family("idefics3", "Idefics3ForConditionalGeneration", **_IDEFICS)
def _idefics3() -> Any:
    return _idefics("Idefics3Config")


@_family("smolvlm", "SmolVLMForConditionalGeneration", **_IDEFICS)
def _smolvlm() -> Any:
    return _idefics("SmolVLMConfig")


@_family(
    "gemma3",
    "Gemma3ForConditionalGeneration",
    pixels=_square_pixels(56),
    tokens=_count(16, [START], [END]),
    types="token_type_ids",
)
def _gemma3() -> Any:
    return hf.Gemma3Config(
        text_config=language(
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=24,
            layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
        ),
        vision_config=dict(_SIGLIP),
        image_token_index=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
        mm_tokens_per_image=16,
    )


def _phi4_pixels(rows: list[list[Picture]]) -> Inputs:
    pictures = _flat(rows)
    return {
        "image_pixel_values": torch.stack([_noise(p.seed, 2, 3, 56, 56) for p in pictures]),
        "image_sizes": torch.tensor([[56, 56]] * len(pictures)),
        "image_attention_mask": torch.ones(len(pictures), 2, 4, 4),
    }


# a two by two grid with a column separator for the one crop, a separator, and the same for the whole image
@_family("phi4_multimodal", "Phi4MultimodalForCausalLM", pixels=_phi4_pixels, tokens=_count(6 + 1 + 6))
def _phi4_multimodal() -> Any:
    audio = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_blocks": 2,
        "num_attention_heads": 4,
        "ext_pw_out_channel": 32,
        "depthwise_separable_out_channel": 32,
        "nemo_conv_channels": 16,
        "audio_token_id": AUDIO,
        "input_size": 80,
    }
    vision = {
        **_TOWER,
        "image_size": 56,
        "patch_size": 14,
        "crop_size": 56,
        "image_token_id": IMAGE,
        "feature_layer": -2,
    }
    return hf.Phi4MultimodalConfig(
        **language(original_max_position_embeddings=4096), vision_config=vision, audio_config=audio
    )


# --- doubtful ones: no promise that they can be compressed, but they must then be refused with a reason


@_family(
    "paligemma",
    "PaliGemmaForConditionalGeneration",
    pixels=_square_pixels(56),
    tokens=_count(16),
    types="token_type_ids",
    doubtful=True,
)
def _paligemma() -> Any:
    text = language(model_type="gemma", head_dim=16)
    return hf.PaliGemmaConfig(
        text_config=text,
        vision_config=dict(_SIGLIP),
        image_token_index=IMAGE,
        projection_dim=HIDDEN,
        hidden_size=HIDDEN,
        vocab_size=VOCABULARY,
    )


def _gemma4_pixels(rows: list[list[Picture]]) -> Inputs:
    pictures = _flat(rows)
    y, x = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
    positions = torch.stack([x.reshape(-1), y.reshape(-1)], -1)
    return {
        "pixel_values": torch.stack([_noise(p.seed, 64, 3 * 16 * 16).sigmoid() for p in pictures]),
        "image_position_ids": positions.repeat(len(pictures), 1, 1),
    }


@_family(
    "gemma4",
    "Gemma4ForConditionalGeneration",
    pixels=_gemma4_pixels,
    tokens=_count(16, [START], [END]),
    types="mm_token_type_ids",
    doubtful=True,
)
def _gemma4() -> Any:
    text = language(
        head_dim=16,
        global_head_dim=16,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
        num_kv_shared_layers=2,
    )
    vision = {
        **_TOWER,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "patch_size": 16,
        "pooling_kernel_size": 2,
        "position_embedding_size": 64,
    }
    return hf.Gemma4Config(
        text_config=text,
        vision_config=vision,
        audio_config=None,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        audio_token_id=AUDIO,
        boi_token_id=START,
        eoi_token_id=END,
    )


def _mllama_pixels(rows: list[list[Picture]]) -> Inputs:
    most = max(len(row) for row in rows)
    pixels = torch.zeros(len(rows), most, 1, 3, 56, 56)
    for b, row in enumerate(rows):
        for i, picture in enumerate(row):
            pixels[b, i, 0] = _noise(picture.seed, 3, 56, 56)
    return {
        "pixel_values": pixels,
        "aspect_ratio_ids": torch.ones(len(rows), most, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(len(rows), most, 1, dtype=torch.long),
    }


@_family(
    "mllama",
    "MllamaForConditionalGeneration",
    pixels=_mllama_pixels,
    tokens=_count(1),
    doubtful=True,
    mixed_counts=False,
)
def _mllama() -> Any:
    text = language(cross_attention_layers=[1, 3], rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_global_layers": 1,
        "attention_heads": 4,
        "image_size": 56,
        "patch_size": 14,
        "max_num_tiles": 1,
        "vision_output_dim": 64,
        "intermediate_layers_indices": [0],
        "supported_aspect_ratios": [[1, 1]],
    }
    return hf.MllamaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE)


@_family(
    "llama4",
    "Llama4ForConditionalGeneration",
    pixels=_square_pixels(112),
    tokens=_count(16, [START], [END]),
    doubtful=True,
)
def _llama4() -> Any:
    text = language(
        head_dim=16,
        intermediate_size_mlp=96,
        num_local_experts=2,
        attention_chunk_size=32,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    vision = {
        "hidden_size": 32,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 112,
        "patch_size": 14,
        "projector_input_dim": 128,
        "projector_output_dim": 128,
        "vision_output_dim": 128,
        "pixel_shuffle_ratio": 0.5,
    }
    return hf.Llama4Config(
        text_config=text, vision_config=vision, image_token_index=IMAGE, boi_token_index=START, eoi_token_index=END
    )


# --- text only


@_family("llama", "LlamaForCausalLM")
def _llama() -> Any:
    return hf.LlamaConfig(**language())


@_family("qwen2", "Qwen2ForCausalLM")
def _qwen2() -> Any:
    return hf.Qwen2Config(**language())


@_family("qwen3", "Qwen3ForCausalLM")
def _qwen3() -> Any:
    return hf.Qwen3Config(**language(head_dim=16))


VISUAL = [name for name, family in FAMILIES.items() if family.pixels is not None and not family.doubtful]
DOUBTFUL = [name for name, family in FAMILIES.items() if family.doubtful]
TEXT = [name for name, family in FAMILIES.items() if family.pixels is None]
PLAIN = VISUAL + TEXT  # every family without reservations


def exactness(name: str) -> float:
    """How close two computations of the same logits come in fp64: linear attention sums in fp32, chunk by chunk."""
    return 5e-5 if name == "qwen3_5" else 1e-6


# ---------------------------------------------------------------------------------------------------------- models


def build(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **text_changes: Any) -> Any:
    """A model in evaluation mode with fresh random weights; the same seed gives the same weights.

    `text_changes` are set on the language model's config, for instance `num_hidden_layers=2`.
    """
    family = FAMILIES[name]
    config = family.config()
    text = config.get_text_config(decoder=True)
    for key, value in text_changes.items():
        if not hasattr(text, key):
            raise AttributeError(f"{name}'s language model config has no {key!r}")
        setattr(text, key, value)
    config.tie_word_embeddings = False  # a tied head makes such a small model repeat its last token
    with _quiet(), torch.device("cpu"), _generator(seed):
        model = getattr(hf, family.model_class)(config)
        _strong_weights(model)
    model.generation_config.suppress_tokens = [i for i in range(VOCABULARY) if i not in TEXT_IDS]
    model.generation_config.pad_token_id = PAD
    model.generation_config.eos_token_id = None
    return model.eval().to(dtype)


def _strong_weights(model: torch.nn.Module) -> None:
    """Draw weights under which attention matters: far from uniform, and felt in the logits.

    The default of 0.02 at a width of 64 gives almost uniform attention, and tests of eviction would pass by accident.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2 or not parameter.is_floating_point():
                continue
            if "embed" in name or "newline" in name or "position" in name:
                parameter.normal_(0.0, 0.7)
            else:
                fan_in = parameter[0].numel() if parameter.dim() != 3 else parameter.shape[-2]
                gain = 1.6 if name.endswith(("q_proj.weight", "k_proj.weight", "qkv_proj.weight")) else 1.0
                parameter.normal_(0.0, gain / max(fan_in, 1) ** 0.5)
                if name.endswith("k_proj.weight") and len(parameter) == KV_HEADS * HIDDEN // HEADS:
                    parameter[: len(parameter) // KV_HEADS] *= 0.4  # one KV head looks around more than the other


class _generator:
    """Seed torch for a block and put its state back."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __enter__(self) -> None:
        self.state = torch.get_rng_state()
        torch.manual_seed(self.seed)

    def __exit__(self, *unused: object) -> None:
        torch.set_rng_state(self.state)


class _quiet:
    """Silence transformers' notices about tiny configs for a block."""

    def __enter__(self) -> None:
        self.logger = logging.getLogger("transformers")
        self.level = self.logger.level
        self.logger.setLevel(logging.CRITICAL)

    def __exit__(self, *unused: object) -> None:
        self.logger.setLevel(self.level)


@functools.cache
def accepts(name: str, argument: str) -> bool:
    """Whether the forward of this family's model has this argument (versions of transformers differ)."""
    return argument in inspect.signature(getattr(hf, FAMILIES[name].model_class).forward).parameters


# --------------------------------------------------------------------------------------------------------- prompts


def words(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(TEXT_IDS.start, TEXT_IDS.stop, (count,), generator=generator).tolist()


def _ids(family: Family, row: Row) -> list[int]:
    ids = [BOS]
    for i, part in enumerate(row.parts):
        if isinstance(part, Picture):
            ids += family.tokens(part, len(row.pictures))
        elif isinstance(part, Clip):
            ids += [START, *[VIDEO] * (part.frames // 2 * 4), END]
        else:
            ids += words(part, 7919 * (row.seed + 1) + i)
    return ids


def token_types(name: str, ids: Tensor) -> Inputs:
    """The token type input of this family (empty where it takes none): 1 at image tokens, 2 at video tokens."""
    kind = FAMILIES[name].types
    if kind is None or not accepts(name, kind):
        return {}
    if name == "paligemma":
        return {kind: torch.zeros_like(ids)}
    return {kind: (ids == IMAGE).long() + 2 * (ids == VIDEO).long()}


def encode(name: str, rows: Sequence[Row], dtype: torch.dtype = torch.float32) -> Inputs:
    """Inputs of `generate` for these rows, left-padded to the longest."""
    family = FAMILIES[name]
    ids = [_ids(family, row) for row in rows]
    width = max(map(len, ids))
    input_ids = torch.tensor([[PAD] * (width - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
    inputs: Inputs = {"input_ids": input_ids, "attention_mask": mask} | token_types(name, input_ids)
    if any(row.pictures for row in rows):
        assert family.pixels is not None, f"{name} takes no images"
        inputs |= family.pixels([row.pictures for row in rows])
    if any(row.clips for row in rows):
        assert family.video, f"{name} takes no videos here"
        inputs |= clip_inputs([clip for row in rows for clip in row.clips])
    if name == "mllama" and "pixel_values" in inputs:
        images = inputs["pixel_values"].shape[1]
        inputs["cross_attention_mask"] = torch.ones(len(rows), width, images, 1, dtype=torch.long)
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}


def row(name: str, images: int = 2, text: int = 9, seed: int = 0) -> Row:
    """A row with `images` images of different sizes (none: only text) and about `text` tokens around each."""
    family = FAMILIES[name]
    if family.pixels is None:
        return Row((text * 5,), seed)
    parts: list[int | Picture | Clip] = [max(text - 4, 2)]
    for i in range(images):
        parts += [Picture((i + seed) % family.sizes, 10 * seed + i), text]
    return Row(tuple(parts), seed)


def prompt(
    name: str, images: int = 2, *, dtype: torch.dtype = torch.float32, seed: int = 0, text: int = 9, video: bool = False
) -> Inputs:
    """One prompt of 40 to 90 tokens."""
    single = row(name, images, text, seed)
    if video:
        single = Row((*single.parts, Clip(seed=seed), text), seed)
    return encode(name, [single], dtype)


def batch(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Batch:
    """Three rows of different lengths: images differ in number and size where the family allows it."""
    family = FAMILIES[name]
    if family.pixels is None:
        rows = [Row((n,), seed + i) for i, n in enumerate((47, 21, 34))]
    elif family.mixed_counts:
        big, small = 0, family.sizes - 1
        rows = [
            Row((5, Picture(big, 1), 8, Picture(small, 2), 9), seed),
            Row((3, Picture(small, 3), 12), seed + 1),
            Row((4, Picture(big, 4), 6), seed + 2),
        ]
    else:
        rows = [Row((n, Picture(0, i), 2 * n), seed + i) for i, n in enumerate((11, 3, 8))]
    inputs = encode(name, rows, dtype)
    pads = (inputs["attention_mask"] == 0).sum(1).tolist()
    return Batch(inputs, [encode(name, [r], dtype) for r in rows], pads, rows)


# ----------------------------------------------------------------------------------------------------------- turns


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation.

    `inputs` go to `generate` together with the cache of the turn before: all ids so far, and the pixels of the new
    images only. `fresh` is the whole conversation as one prompt, for `generate` without a cache. `pictures[b]` are the
    images of row b so far.
    """

    inputs: Inputs
    fresh: Inputs
    pictures: list[list[Picture]]
    new_images: bool = False  # in this turn or an earlier one, the first apart


def first_turn(name: str, rows: Sequence[Row], dtype: torch.dtype = torch.float32) -> Turn:
    inputs = encode(name, rows, dtype)
    return Turn(inputs, inputs, [r.pictures for r in rows])


def next_turn(name: str, model: Any, before: Turn, sequences: Tensor, *, image: bool = False, seed: int = 0) -> Turn:
    """The turn after `before`, whose `generate` returned `sequences`: new words, with `image` a new image per row too.

    The M-RoPE families need the positions spelled out once there is a new image: from the ids and the new image's grid
    alone transformers cannot place it behind earlier images, and it does not notice how far it moves what follows.
    """
    family = FAMILIES[name]
    size = len(sequences)
    fresh_pictures = [list(pictures) for pictures in before.pictures]
    new_pictures: list[list[Picture]] = [[] for _ in range(size)]
    new_ids = [words(6, 31 * seed + b) for b in range(size)]
    if image:
        # LLaVA-OneVision encodes a single image of a row in another way than one of several
        count = 2 if name == "llava_onevision" else 1
        for b in range(size):
            for i in range(count):
                picture = Picture(0, 300 + 10 * seed + 2 * b + i)
                new_pictures[b].append(picture)
                new_ids[b] += family.tokens(picture, count) + words(4, 37 * seed + 5 * b + i)
            fresh_pictures[b] += new_pictures[b]
    ids = torch.cat([sequences, torch.tensor(new_ids)], 1)
    added = ids.shape[1] - before.inputs["input_ids"].shape[1]
    mask = torch.nn.functional.pad(before.inputs["attention_mask"], (0, added), value=1)
    common: Inputs = {"input_ids": ids, "attention_mask": mask} | token_types(name, ids)
    dtype = next(model.parameters()).dtype

    def pixels(pictures: list[list[Picture]]) -> Inputs:
        if family.pixels is None or not any(pictures):
            return {}
        made = family.pixels(pictures)
        return {key: value.to(dtype) if value.is_floating_point() else value for key, value in made.items()}

    fresh = common | pixels(fresh_pictures)
    inputs = common | pixels(new_pictures)
    new_images = image or before.new_images
    if new_images and "image_grid_thw" in fresh:
        inputs["position_ids"] = _mrope_positions(model, fresh)
    return Turn(inputs, fresh, fresh_pictures, new_images)


def _mrope_positions(model: Any, inputs: Inputs) -> Tensor:
    """[4, B, C] text positions and the three M-RoPE positions, as `generate` makes them for a first turn."""
    mask = inputs["attention_mask"]
    positions, _ = model.model.get_rope_index(
        inputs["input_ids"],
        image_grid_thw=inputs["image_grid_thw"],
        attention_mask=mask,
        mm_token_type_ids=(inputs["input_ids"] == IMAGE).int(),
    )
    text = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
    return torch.cat([text[None], positions])
