"""Streams over tiny models: blocks for every family, and the same passes with a plain cache and a mask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import families
import matrix
import tiny_folder
import torch
import witness
from families.rows import Picture, Row
from masked_reference import largest_difference, masked, recorded

from foveakv.engines.transformers import compat
from foveakv.streams import FrameStream, stream


def no_images() -> Any:
    """A processor that only has a tokenizer, for streams whose frames come as inputs."""
    return SimpleNamespace(image_processor=object(), tokenizer=tiny_folder.tokenizer())


def opened(
    family: str, method: Any, budget: int | None = None, dtype: torch.dtype = torch.float64, **given: Any
) -> FrameStream:
    """A stream over the family's tiny model; frames come as inputs."""
    return stream(matrix.model(family, dtype), no_images(), method, budget=budget, **given)


def block(
    family: str, number: int, frames: int = 1, words: int = 3, dtype: torch.dtype = torch.float64
) -> dict[str, Any]:
    """Inputs of a block: words, then an image, `frames` times."""
    count = 2 if family == "llava_onevision" and frames == 1 else frames  # a single image is encoded in another way
    parts: list[Any] = [part for i in range(count) for part in (words, Picture(0, 20 * number + i))]
    inputs = families.encode(family, [Row((*parts, 2), number)], dtype)
    inputs.pop("attention_mask")
    return inputs


@contextmanager
def passes(model: Any) -> Iterator[list[dict[str, Any]]]:
    """Collects the inputs of every forward pass, without caches and masks."""
    found: list[dict[str, Any]] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        names = ("cache", "past_key_values", "attention_mask")
        found.append({key: value for key, value in kwargs.items() if key not in names and value is not None})

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield found
    finally:
        handle.remove()


def check_against_reference(made: FrameStream, use: Any, tolerance: float = 1e-6) -> None:
    """Run `use(stream)`, which asks with keep=True only, and every pass again with a plain cache under the trace."""
    model: Any = made.model
    with passes(model) as inputs, recorded(model) as got, witness.witnessed() as seen:
        use(made)
        cache: Any = made.cache
        stored, trace = seen.of(cache), list(cache.trace)
    witness.check(trace, stored)
    plain: Any = None
    argument = compat.cache_argument(model)
    with torch.no_grad(), masked(model, trace, stored=stored) as replay, recorded(model) as want:
        for each in inputs:
            past = {} if plain is None else {argument: plain}
            plain = matrix.cache_of(model(**{**each, "use_cache": True}, **past))
    assert len(got) == len(trace) > 1
    assert largest_difference(got, want) < tolerance
    assert replay.furthest < 2 * tolerance
