"""A forward pass with a `JoinedCache`."""

from __future__ import annotations

from typing import Any

from foveakv.engines.transformers.attachment import Original
from foveakv.engines.transformers.calls import Call
from foveakv.engines.transformers.joined import JoinedCache
from foveakv.errors import CacheInUseError, UnsupportedModeError

_REFUSED = ("attention_mask", "pixel_values", "pixel_values_videos", "labels")


def run_joined(original: Original, joined: JoinedCache, kwargs: dict[str, Any]) -> Any:
    """One decode step of all members; kwargs: the arguments of the model's forward, by name, without the cache.

    Raises:
        CacheInUseError: the members belong to another model, or their sequences are not those of the inputs.
        UnsupportedModeError: the inputs are not one new token for each sequence.
        MembersFailedError: see `JoinedCache`.
    """
    model: Any = original.model
    attached = original.attachment
    owner = None if joined.owner is None else joined.owner()
    if owner is None or owner is not model:
        raise CacheInUseError("the members of this JoinedCache were made for another model")
    tokens = kwargs.get("input_ids") if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")
    if tokens is None or tokens.shape[1] != 1:
        raise UnsupportedModeError("a JoinedCache takes one new token for each sequence: input_ids [sequences, 1]")
    if tokens.shape[0] != joined.batch:
        raise CacheInUseError(f"the members have {joined.batch} sequences, but the inputs have {tokens.shape[0]}")
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise UnsupportedModeError(f"a joined decode step takes no {name}; pass token ids only")
    for name in ("output_attentions", "output_hidden_states"):
        if kwargs.get(name):
            raise UnsupportedModeError(f"a joined decode step does not support {name}=True; remove it")
    if kwargs.get("use_cache") is False:
        raise UnsupportedModeError("a joined decode step stores the new tokens; remove use_cache=False")
    kwargs[attached.cache_name] = joined
    if kwargs.get("position_ids") is None:
        kwargs["position_ids"] = joined.position_ids(tokens.device)
    call = Call(None)
    with attached.entered(call), joined.step(model.dtype.itemsize):
        output = original(**kwargs)
    for number, (member, rows) in enumerate(zip(joined.members, joined.rows, strict=True)):
        if member.contents is not None and number not in joined.errors:
            ids = tokens if tokens.ndim == 2 else tokens.new_full(tokens.shape[:2], -1)
            member.contents.note(ids[rows], {})
    joined.raise_errors(output)
    return output
