"""Contexts of several blocks: conversations over one cache, and the same with the plain model under a recorded mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import families
import matrix
import torch
import witness
from masked_reference import Stored, Trace, largest_difference, masked, recorded

import foveakv

FAMILIES = ["qwen2_5_vl", "llava", "gemma3", "llama", "qwen3_vl", "internvl"]
TURNS = {"images": (True, True), "text-image": (False, True), "one image": (True,)}


Say = Callable[[Any], Any]
"""Runs the model on a context; gets the session, or None where the model is plain."""


@dataclass
class Talk:
    """What a compressed conversation gave, and what its attention was handed."""

    logits: list[torch.Tensor]
    session: Any
    trace: Trace
    stored: Sequence[dict[int, Stored]]
    cache: Any
    stayed: torch.Tensor | None = None  # of the first prompt in the residual stream, where tokens were pruned from it


def compressed(model: Any, method: Any, say: Say, **options: Any) -> Talk:
    """Run `say(session)` inside `compress`, with a trace."""
    torch.manual_seed(0)
    with (
        foveakv.compress(model, method, trace=True, **options) as session,
        recorded(model) as logits,
        witness.witnessed() as seen,
    ):
        say(session)
        cache = session.cache
        return Talk(logits, session, list(session.trace), seen.of(cache), cache, seen.streams.get(id(cache)))


def check(model: Any, talk: Talk, say: Say, tolerance: float = 1e-6, rows: str = "all") -> None:
    """The plain model says the same in every pass when it attends to what the compressed run attended to.

    rows: "last" compares the last row of every pass only, where others are of padding.
    """
    witness.check(talk.trace, talk.stored)
    merges = talk.cache.method.merges
    torch.manual_seed(0)
    after = talk.cache.method.prunes_after or 0
    options = {"left": talk.stayed, "left_after": after, "stored": None if merges else talk.stored}
    with masked(model, talk.trace, **options) as replay, recorded(model) as want:
        say(None)
    got = talk.logits
    if merges:  # the plain model has no merged numbers: only what was read before the first merge is comparable
        got, want = got[:1], want[:1]
    if rows == "last":
        got, want = [step[:, -1:] for step in got], [step[:, -1:] for step in want]
    difference = largest_difference(got, want)
    assert difference < tolerance, f"{talk.cache.method} differs from the masked reference by {difference:.3g}"
    if not merges:
        assert replay.furthest < 2 * tolerance, f"keys or values differ from the plain cache by {replay.furthest:.3g}"


def converse(
    family: str,
    model: Any,
    images: Sequence[bool],
    *,
    batch: int = 2,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> list[Any]:
    """Turns over one cache, each with or without new images; returns what `generate` gave for each."""
    rows = [families.row(family, images=2 - b % 2, seed=b) for b in range(batch)]
    turn = families.first_turn(family, rows, dtype)
    outputs: list[Any] = []
    past: dict[str, Any] = {}
    for step, image in enumerate([*images, None]):
        output = model.generate(**turn.inputs, **{**matrix.GREEDY, "max_new_tokens": 3, **options}, **past)
        outputs.append(output)
        past = {matrix.cache_argument(family): matrix.cache_of(output)}
        if image is not None:
            image = image and family not in families.TEXT
            turn = families.next_turn(family, model, turn, output.sequences, image=image, seed=step)
    return outputs
