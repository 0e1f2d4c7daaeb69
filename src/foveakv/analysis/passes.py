"""Runs of single prompts with a method, shared by all analyses."""

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
"""Maps labels to the inputs of `generate` for one sequence, e.g. from `foveakv.build_inputs`."""

Progress = Callable[[str], None]
"""Called with the label of a prompt before its run."""


def check(prompts: Prompts) -> None:
    """Raise `InputError` unless there is at least one prompt and all are single sequences."""
    if not prompts:
        raise InputError("no prompt to analyse; give at least one")
    for label, inputs in prompts.items():
        ids = inputs.get("input_ids")
        if not isinstance(ids, Tensor) or ids.ndim != 2 or len(ids) != 1:
            raise InputError(f"{label}: an analysis takes single prompts, with input_ids of shape [1, tokens]")


def run(
    model: Any,
    inputs: Mapping[str, Any],
    method: Method,
    new_tokens: int = 1,
    *,
    to_the_end: bool = False,
    **options: Any,
) -> tuple[CompressedCache, list[int]]:
    """Generate greedily with a method.

    Args:
        model: a model that `foveakv.compress` supports.
        inputs: inputs of `generate` for one sequence.
        method: the method.
        new_tokens: the most tokens to generate; 1 runs the prefill only.
        to_the_end: generate all new tokens, also after the end of the answer.
        options: options of `foveakv.compress`.

    Returns:
        The cache after generation, and the generated token ids.
    """
    limits = {"min_new_tokens": new_tokens} if to_the_end else {}
    with compress(model, method, **options) as session, torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, num_beams=1, **limits)
    return session.cache, ids[0, inputs["input_ids"].shape[1] :].tolist()
