"""Running one prompt with a method that watches, for all analyses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from foveakv.engines.transformers.api import compress
from foveakv.engines.transformers.cache import CompressedCache
from foveakv.errors import InputError
from foveakv.methods import Method

Prompts = Mapping[str, Mapping[str, Any]]
"""Label -> the inputs of `generate` for one sequence, e.g. from `foveakv.build_inputs`."""

Progress = Callable[[str], None]


def check(prompts: Prompts) -> None:
    """Raises `InputError` unless every entry is one prompt of one sequence."""
    if not prompts:
        raise InputError("there is no prompt to analyse; give at least one")
    for label, inputs in prompts.items():
        ids = inputs.get("input_ids")
        if not isinstance(ids, Tensor) or ids.ndim != 2 or len(ids) != 1:
            raise InputError(f"{label}: an analysis takes single prompts, input_ids of shape [1, tokens]")


def run(
    model: Any,
    inputs: Mapping[str, Any],
    method: Method,
    new_tokens: int = 1,
    *,
    to_the_end: bool = False,
    **options: Any,
) -> tuple[CompressedCache, list[int]]:
    """Generates greedily with a method; returns the cache as it was left and the generated ids.

    new_tokens: the longest answer; 1 reads the prompt only. to_the_end: generate all of them, past an end of the
    answer. options: for `foveakv.compress`.
    """
    limits = {"min_new_tokens": new_tokens} if to_the_end else {}
    with compress(model, method, **options) as session, torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, num_beams=1, **limits)
    return session.cache, ids[0, inputs["input_ids"].shape[1] :].tolist()
