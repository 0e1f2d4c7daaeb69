"""InternVL, Idefics 3, SmolVLM, Gemma 3 and Phi 4."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

from families.registry import SIGLIP, TOWER, flat, image_tokens, language, noise, register, square_pixels
from families.rows import AUDIO, END, IMAGE, LAYERS, PAD, START, Inputs, Picture


@register(
    "internvl",
    "InternVLForConditionalGeneration",
    pixels=square_pixels(112),
    tokens=image_tokens(16, [START], [END]),
)
def _internvl() -> Any:
    return hf.InternVLConfig(
        text_config=language(model_type="qwen2"),
        vision_config={**TOWER, "image_size": [112, 112], "patch_size": [14, 14]},
        image_token_id=IMAGE,
        image_seq_length=16,
    )


def _idefics_pixels(rows: list[list[Picture]]) -> Inputs:
    most = max(len(row) for row in rows)
    pixels = torch.zeros(len(rows), most, 3, 128, 128)  # an all-zero image counts as padding
    mask = torch.zeros(len(rows), most, 128, 128, dtype=torch.long)
    for b, row in enumerate(rows):
        for i, picture in enumerate(row):
            pixels[b, i] = noise(picture.seed, 3, 128, 128)
            mask[b, i] = 1
    return {"pixel_values": pixels, "pixel_attention_mask": mask}


def _idefics(config_class: str) -> Any:
    return getattr(hf, config_class)(
        text_config=language(model_type="llama"),
        vision_config={**TOWER, "image_size": 128, "patch_size": 16},
        image_token_id=IMAGE,
        scale_factor=2,
        pad_token_id=PAD,
    )


_IDEFICS = {"pixels": _idefics_pixels, "tokens": image_tokens(16, [START], [START])}


@register("idefics3", "Idefics3ForConditionalGeneration", **_IDEFICS)
def _idefics3() -> Any:
    return _idefics("Idefics3Config")


@register("smolvlm", "SmolVLMForConditionalGeneration", **_IDEFICS)
def _smolvlm() -> Any:
    return _idefics("SmolVLMConfig")


@register(
    "gemma3",
    "Gemma3ForConditionalGeneration",
    pixels=square_pixels(56),
    tokens=image_tokens(16, [START], [END]),
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
        vision_config=dict(SIGLIP),
        image_token_index=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
        mm_tokens_per_image=16,
    )


def _phi4_pixels(rows: list[list[Picture]]) -> Inputs:
    pictures = flat(rows)
    return {
        "image_pixel_values": torch.stack([noise(p.seed, 2, 3, 56, 56) for p in pictures]),
        "image_sizes": torch.tensor([[56, 56]] * len(pictures)),
        "image_attention_mask": torch.ones(len(pictures), 2, 4, 4),
    }


# a two by two grid with a column separator for the one crop, a separator, and the same for the whole image
@register("phi4_multimodal", "Phi4MultimodalForCausalLM", pixels=_phi4_pixels, tokens=image_tokens(6 + 1 + 6))
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
        **TOWER,
        "image_size": 56,
        "patch_size": 14,
        "crop_size": 56,
        "image_token_id": IMAGE,
        "feature_layer": -2,
    }
    return hf.Phi4MultimodalConfig(
        **language(original_max_position_embeddings=4096), vision_config=vision, audio_config=audio
    )
