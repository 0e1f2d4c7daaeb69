"""Columns of the whole context and columns of one layer's view, which in a further block are the stored ones only.

N columns of the context (`view.request.prompt`), C columns of the view. For a first prompt without token pruning both
are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foveakv.core.prompt import PAD, PromptMap
from foveakv.methods.views import PrefillView


def at_view(columns: Tensor, view: PrefillView) -> Tensor:
    """Gather values [B, N] of the context at the columns of a view: [B, C]."""
    return columns.gather(1, view.positions.clamp_min(0))


def in_context(values: Tensor, view: PrefillView) -> Tensor:
    """Return values [B, C] of a view's columns as values [B, N] of the context; 0 where the layer stores nothing."""
    if view.stored is None:
        return values
    columns = view.request.prompt.columns
    out = values.new_zeros(len(values), columns + 1)
    return out.scatter_(1, torch.where(_present(view), view.positions, columns), values)[:, :columns]


def stored_prompt(view: PrefillView) -> PromptMap:
    """Return the map of the context, in which tokens that no head of the layer stores are padding."""
    if view.stored is None:
        return view.prompt
    whole = view.request.prompt
    present = in_context(_present(view), view)
    return PromptMap(whole.kinds.masked_fill(~present, PAD), whole.index)


def grown(columns: Tensor, request_columns: int, value: bool) -> Tensor:
    """Append columns that hold `value` to a mask bool [B, M], up to `request_columns`."""
    return torch.nn.functional.pad(columns, (0, request_columns - columns.shape[1]), value=value)


def before_text(prompt: PromptMap, start: int) -> Tensor:
    """Mark the visual columns that a text column of the newest block comes after: bool [B, N]; start: of the block.

    Only these can be ranked by the block's text: an image that a chunk boundary separates from its question waits.
    """
    columns = torch.arange(prompt.columns, device=prompt.kinds.device)
    last = torch.where(prompt.text & (columns >= start), columns, -1).amax(1, keepdim=True)
    return prompt.visual & (columns < last)


def still_open(open_before: Tensor, prompt: PromptMap) -> Tensor:
    """Return the visual columns that wait for text: those of before, bool [B, M], and new ones: bool [B, N]."""
    fresh = torch.arange(prompt.columns, device=prompt.kinds.device) >= open_before.shape[1]
    return grown(open_before, prompt.columns, False) | (prompt.visual & fresh)


def _present(view: PrefillView) -> Tensor:
    return view.candidates.any(1)
