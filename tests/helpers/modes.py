"""Which families and methods every generation mode is tested with, and loops over `model(...)` by hand."""

from __future__ import annotations

import itertools
from typing import Any

import families
import matrix
import pytest
import torch

FAMILIES = ["qwen2_5_vl", "llava", "gemma3", "llama"]
METHODS = ["hae", "hybridkv", "snapkv", "h2o"]
GROWING = ["hae", "h2o"]  # evict while decoding as well
FAMILY_AND_METHOD = pytest.mark.parametrize(("family", "name"), list(itertools.product(FAMILIES, METHODS)))


def inputs_of(family: str, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    return families.batch(family, dtype=dtype).inputs


def unmasked(inputs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in inputs.items() if key != "attention_mask"}


CHUNKS = [[11], [12, 13, 14, 15], [16], [17, 18], [19]]


def by_hand(family: str, model: Any, cache: Any, inputs: dict[str, Any], chunks: list[list[int]]) -> Any:
    """A generator over the logits of a loop without position ids: the prompt, then each chunk of tokens."""
    argument = matrix.cache_argument(family)
    output = model(**inputs, **({argument: cache} if cache is not None else {}), use_cache=True)
    yield output.logits
    cache = matrix.cache_of(output)
    for chunk in chunks:
        output = model(input_ids=torch.tensor([chunk]), **{argument: cache})
        cache = matrix.cache_of(output)
        yield output.logits
