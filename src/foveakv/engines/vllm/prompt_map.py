"""The map of a prompt from vLLM's multimodal features."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from foveakv.core.prompt import AUDIO, IMAGE, VIDEO, PromptMap
from foveakv.errors import InputError

_KINDS = {"image": IMAGE, "video": VIDEO, "audio": AUDIO}


def prompt_map(features: Iterable[Any], tokens: int) -> PromptMap:
    """Return the map of a prompt, [1, tokens].

    Args:
        features: `Request.mm_features`; placeholders of a range that are no embeddings (row breaks, markers) are text.
        tokens: number of prompt tokens.

    Raises:
        InputError: a modality is unknown, or a range exceeds the prompt.
    """
    kinds = torch.zeros(1, tokens, dtype=torch.int8)
    index = torch.full((1, tokens), -1, dtype=torch.int32)
    numbers: dict[int, int] = {}
    for feature in sorted(features, key=lambda each: each.mm_position.offset):
        kind = _KINDS.get(feature.modality)
        if kind is None:
            raise InputError(f"prompts with {feature.modality!r} inputs are not supported; send them with method 'off'")
        place = feature.mm_position
        columns = torch.arange(place.offset, place.offset + place.length)
        if place.offset + place.length > tokens:
            raise InputError(f"an input of modality {feature.modality!r} exceeds the prompt of {tokens} tokens")
        if place.is_embed is not None:
            columns = columns[torch.as_tensor(place.is_embed).bool()]
        kinds[0, columns] = kind
        if kind != AUDIO:
            index[0, columns] = numbers.get(kind, 0)
        numbers[kind] = numbers.get(kind, 0) + 1
    return PromptMap(kinds, index)
