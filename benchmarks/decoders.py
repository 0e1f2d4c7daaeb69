"""Models for the benchmarks: slices of Qwen2.5-VL with random weights, long prompts for the embedded model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.common import seeded

IMAGE_TOKEN, START, END = 990, 991, 992


@dataclass(frozen=True)
class Geometry:
    """Sizes of a text decoder."""

    hidden: int
    intermediate: int
    query_heads: int
    kv_heads: int


GEOMETRIES = {
    "qwen2.5-vl-7b": Geometry(3584, 18944, 28, 4),
    "qwen2.5-vl-3b": Geometry(2048, 11008, 16, 2),
    "tiny": Geometry(64, 128, 4, 2),  # for quick runs
}


def qwen(geometry: str, layers: int, dtype: torch.dtype = torch.float32) -> Any:
    """A Qwen2.5-VL with that decoder cut to `layers`, a tiny vision tower, a small vocabulary and random weights."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    if geometry not in GEOMETRIES:
        raise SystemExit(f"no geometry {geometry!r}; choose one of {', '.join(GEOMETRIES)}")
    sizes = GEOMETRIES[geometry]
    half = sizes.hidden // sizes.query_heads // 2
    text = {
        "vocab_size": 1000,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": sizes.query_heads,
        "num_key_value_heads": sizes.kv_heads,
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [half // 4, half * 3 // 8, half * 3 // 8],
        },
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": sizes.hidden,
        "patch_size": 14,
        "fullatt_block_indexes": [],
        "window_size": 112,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE_TOKEN,
        video_token_id=993,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    with torch.device("meta"):
        made = Qwen2_5_VLForConditionalGeneration(config)
    # Filled in place: seconds instead of minutes for half a billion parameters.
    made = made.to(dtype).to_empty(device="cpu")
    generator = seeded(0)
    for name, parameter in made.named_parameters():
        if parameter.ndim == 1:
            parameter.data.fill_(0.0 if "bias" in name else 1.0)
        else:
            parameter.data.uniform_(-0.03, 0.03, generator=generator)
    for module in made.modules():
        _rebuild_rotary(module)
    return made.eval()


def _rebuild_rotary(module: torch.nn.Module) -> None:
    """Rotary frequencies are buffers computed in the constructor, so they are lost on the meta device."""
    if "inv_freq" not in dict(module.named_buffers(recurse=False)):
        return
    fresh = type(module)(module.config if hasattr(module, "config") else len(module.get_buffer("inv_freq")) * 2)
    for name, buffer in fresh.named_buffers(recurse=False):
        setattr(module, name, buffer)


def qwen_inputs(tokens: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A prompt of exactly `tokens` tokens, about 3/4 of them one image."""
    side = int((tokens * 0.75) ** 0.5) // 4 * 4
    visual = side * side
    text = tokens - visual - 2
    ids = [10 + i % 900 for i in range(text // 8)] + [START] + [IMAGE_TOKEN] * visual + [END]
    ids += [10 + i % 900 for i in range(text - text // 8)]
    input_ids = torch.tensor([ids])
    return {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "mm_token_type_ids": (input_ids == IMAGE_TOKEN).int(),
        "pixel_values": torch.randn(4 * visual, 3 * 2 * 14 * 14, generator=seeded(0)).to(dtype),
        "image_grid_thw": torch.tensor([[1, 2 * side, 2 * side]]),
    }


def card_inputs(processor: Any, model: Any, tokens: int) -> dict[str, Any]:
    """A prompt for the embedded model with as many cards as fit `tokens` tokens, and the question about one of them.

    The sample cards repeat after 48, under new names.
    """
    from PIL import Image

    from foveakv.models.embedded.samples import FOLDER
    from foveakv.models.inputs import build_inputs

    kinds = json.loads((FOLDER / "samples.json").read_text(encoding="utf8"))
    cards = [card for group in zip(*kinds.values(), strict=False) for card in group]
    images = [Image.open(FOLDER / card["file"]).convert("RGB") for card in cards]

    def build(count: int) -> dict[str, Any]:
        names = [f"{cards[i % len(cards)]['name']}{i // len(cards) or ''}" for i in range(count)]
        text = "".join(f"{name}'s card: <image>\n" for name in names) + f"{names[count // 3]}'s card: "
        return build_inputs(processor, text, [images[i % len(cards)] for i in range(count)], model=model)

    small, large = (build(count)["input_ids"].shape[1] for count in (1, 13))
    per_card = (large - small) / 12
    count = max(1, int((tokens - small) / per_card) + 1)
    inputs = build(count)
    while inputs["input_ids"].shape[1] > tokens and count > 1:
        count -= 1
        inputs = build(count)
    return inputs


def visual_tokens(model: Any, inputs: dict[str, Any]) -> int:
    """Number of visual tokens in a prompt."""
    image = getattr(model.config, "image_token_id", None)
    if image is None:
        image = model.config.image_token_index
    return int((inputs["input_ids"] == image).sum())
