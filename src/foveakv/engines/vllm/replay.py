"""Recompute decoded tokens of a preempted request: each must see the tokens that were stored when it was decoded first.

vLLM reads the prompt and the decoded tokens again as one prompt, and every token would see all earlier ones. So, in
every layer, the decoded tokens are attended to again in segments: between two segments, what had been evicted by then
is removed from the stored tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foveakv.engines.vllm.block_layout import slots_of
from foveakv.engines.vllm.stored import Step


@dataclass(frozen=True)
class Segment:
    """Tokens that are attended to together, possibly none.

    start, stop: tokens of the context. length: number of stored tokens that the last one sees, itself included. source,
    target: int64 [n], slots to move before.
    """

    start: int
    stop: int
    length: int
    source: Tensor
    target: Tensor


def segments(step: Step, size: int, *, compact: bool) -> list[Segment]:
    """Return the segments of a step; size: slots per block.

    compact: whether the step completes the prompt, all of which is stored at its beginning. The kept tokens must then
    move to the first slots.
    """
    known, events = step.known, step.known.missing(step.stop)
    if compact:
        length = known.kept.shape[0]
        target = torch.arange(length)
        moved = known.kept != target
        moves = known.kept[moved], target[moved]
    elif events:
        length = step.start - step.offset
        moves = torch.arange(0), torch.arange(0)
    else:
        return []
    found, start = [], step.start
    bounds = [(each.tokens, each.stored, each.source, each.target) for each in events]
    if not bounds or bounds[-1][0] < step.stop:
        bounds.append((step.stop, -1, torch.arange(0), torch.arange(0)))
    for stop, left, source, target in bounds:
        written = torch.arange(start, stop) - step.offset
        places = torch.arange(length, length + stop - start)
        down = written != places
        moves = torch.cat([moves[0], written[down]]), torch.cat([moves[1], places[down]])
        length += stop - start
        found.append(_segment(step, size, start, stop, length, moves))
        start, moves = stop, (source, target)
        length = length if left < 0 else left
    if moves[0].shape[0]:
        found.append(_segment(step, size, start, start, length, moves))
    return found


def _segment(step: Step, size: int, start: int, stop: int, length: int, moves: tuple[Tensor, Tensor]) -> Segment:
    source, target = (slots_of(step.blocks, each, size) for each in moves)
    return Segment(start, stop, length, source, target)
