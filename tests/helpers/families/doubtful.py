"""Doubtful families: no promise that they can be compressed, but they must then be refused with a reason."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

from families.registry import SIGLIP, TOWER, flat, image_tokens, language, noise, register, square_pixels
from families.rows import AUDIO, END, HIDDEN, IMAGE, LAYERS, START, VIDEO, VOCABULARY, Inputs, Picture


@register(
    "paligemma",
    "PaliGemmaForConditionalGeneration",
    pixels=square_pixels(56),
    tokens=image_tokens(16),
    types="token_type_ids",
    doubtful=True,
)
def _paligemma() -> Any:
    text = language(model_type="gemma", head_dim=16)
    return hf.PaliGemmaConfig(
        text_config=text,
        vision_config=dict(SIGLIP),
        image_token_index=IMAGE,
        projection_dim=HIDDEN,
        hidden_size=HIDDEN,
        vocab_size=VOCABULARY,
    )


def _gemma4_pixels(rows: list[list[Picture]]) -> Inputs:
    pictures = flat(rows)
    y, x = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
    positions = torch.stack([x.reshape(-1), y.reshape(-1)], -1)
    return {
        "pixel_values": torch.stack([noise(p.seed, 64, 3 * 16 * 16).sigmoid() for p in pictures]),
        "image_position_ids": positions.repeat(len(pictures), 1, 1),
    }


@register(
    "gemma4",
    "Gemma4ForConditionalGeneration",
    pixels=_gemma4_pixels,
    tokens=image_tokens(16, [START], [END]),
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
        **TOWER,
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
            pixels[b, i, 0] = noise(picture.seed, 3, 56, 56)
    return {
        "pixel_values": pixels,
        "aspect_ratio_ids": torch.ones(len(rows), most, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(len(rows), most, 1, dtype=torch.long),
    }


@register(
    "mllama",
    "MllamaForConditionalGeneration",
    pixels=_mllama_pixels,
    tokens=image_tokens(1),
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


@register(
    "llama4",
    "Llama4ForConditionalGeneration",
    pixels=square_pixels(112),
    tokens=image_tokens(16, [START], [END]),
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
