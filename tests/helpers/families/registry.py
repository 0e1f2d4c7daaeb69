"""The table of families, and parts that the configurations and images of several families share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from families.rows import BOS, EOS, HEADS, HIDDEN, IMAGE, KV_HEADS, LAYERS, PAD, VOCABULARY, Inputs, Picture


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


def register(name: str, model_class: str, **options: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Adds a family to `FAMILIES`: decorates a function that returns its tiny configuration."""

    def add(config: Callable[[], Any]) -> Callable[[], Any]:
        FAMILIES[name] = Family(name, model_class, config, **options)
        return config

    return add


def language(**changes: Any) -> dict[str, Any]:
    """The language model's part of a configuration, with changes."""
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


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 + seed))


def flat(rows: list[list[Picture]]) -> list[Picture]:
    return [picture for row in rows for picture in row]


def image_tokens(
    total: int, before: Sequence[int] = (), after: Sequence[int] = ()
) -> Callable[[Picture, int], list[int]]:
    """Every image is `total` image tokens between the ids `before` and `after`."""
    return lambda picture, count: [*before, *[IMAGE] * total, *after]


def square_pixels(side: int) -> Callable[[list[list[Picture]]], Inputs]:
    """Every image has `side` x `side` pixels."""
    return lambda rows: {"pixel_values": torch.stack([noise(p.seed, 3, side, side) for p in flat(rows)])}


CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
    "projection_dim": 32,
}
SIGLIP = {**CLIP, "model_type": "siglip_vision_model"}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
