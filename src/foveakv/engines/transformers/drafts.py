"""Draft tokens that an assistant adds to the prompt's forward pass.

transformers reads the prompt and the first drafted tokens in one pass. Drafted tokens must attend to the compressed
prompt, as decoded tokens do, so the pass is split: the prompt is read and compressed first, then the drafts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Arguments with one entry per new token, by the dimension of the tokens.
_PER_TOKEN = {"input_ids": 1, "inputs_embeds": 1, "position_ids": -1, "cache_position": 0}
# Arguments that describe the prompt's tokens only; they may or may not have entries for the drafts.
_OF_PROMPT = ("mm_token_type_ids", "token_type_ids")


def split(kwargs: dict[str, Any], drafted: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the named arguments of a pass into those of its prompt and those of the last `drafted` tokens.

    Images and all else that the prompt alone has go to the first pass. The second one has the whole 2-D mask.
    """
    tokens = next(kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None)
    columns = tokens.shape[1] - drafted
    prompt = dict(kwargs)
    drafts: dict[str, Any] = {
        name: value for name, value in kwargs.items() if isinstance(value, (int, float, str, type(None)))
    }
    for name, dim in _PER_TOKEN.items():
        if isinstance(kwargs.get(name), Tensor):
            prompt[name] = kwargs[name].narrow(dim, 0, columns)
            drafts[name] = kwargs[name].narrow(dim, columns, drafted)
    for name in _OF_PROMPT:
        if isinstance(kwargs.get(name), Tensor):
            prompt[name] = kwargs[name][:, :columns]
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor):
        drafts["attention_mask"] = mask if mask.ndim == 2 else mask[..., -drafted:, :]
        prompt["attention_mask"] = mask[:, :-drafted] if mask.ndim == 2 else mask[..., :-drafted, :-drafted]
    kept = kwargs.get("logits_to_keep", 0)
    if isinstance(kept, int) and kept > 0:
        prompt["logits_to_keep"], drafts["logits_to_keep"] = max(1, kept - drafted), min(kept, drafted)
    elif "logits_to_keep" in kwargs:
        prompt["logits_to_keep"] = drafts["logits_to_keep"] = 0
    return prompt, drafts


def joined(prompt: Any, drafts: Any, kept: Any) -> Any:
    """Join the outputs of the two passes into that of one; kept: the `logits_to_keep` of the whole pass."""
    for name in ("logits", "last_hidden_state"):
        if prompt.get(name) is not None:
            prompt[name] = torch.cat([prompt[name], drafts[name]], dim=1)
    if prompt.get("hidden_states") is not None:
        pairs = zip(prompt["hidden_states"], drafts["hidden_states"], strict=True)
        prompt["hidden_states"] = tuple(torch.cat(pair, dim=1) for pair in pairs)
    if isinstance(kept, Tensor):
        prompt["logits"] = prompt["logits"][:, kept]
    elif kept:
        prompt["logits"] = prompt["logits"][:, -kept:]
    return prompt
