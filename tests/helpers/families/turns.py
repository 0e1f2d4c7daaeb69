"""Inputs for the turns of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from families.prompts import encode, token_types, words
from families.registry import FAMILIES
from families.rows import IMAGE, Inputs, Picture, Row


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
