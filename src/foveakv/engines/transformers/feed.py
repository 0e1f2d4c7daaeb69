"""`session.feed`: read a block of a context without generating."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from foveakv.engines.transformers.attachment import Attachment
from foveakv.engines.transformers.cache import CompressedCache
from foveakv.engines.transformers.calls import Call, SessionState
from foveakv.engines.transformers.forward import prompt_map
from foveakv.errors import CacheInUseError, InputError, UnsupportedModeError


def feed(attached: Attachment, session: SessionState, inputs: dict[str, Any]) -> Any:
    """Read a block; see `Session.feed`."""
    model: Any = attached.model()
    cache = session.caches[0] if session.caches else None
    call = Call(session, feeding=True)
    inputs = dict(inputs)
    if "logits_to_keep" in inspect.signature(type(model).forward).parameters:
        inputs.setdefault("logits_to_keep", 1)
    if cache is not None:
        if not cache.prefilled:
            raise CacheInUseError("a prompt is being read in chunks and not complete yet; read the rest of it first")
        call.caches.append(cache)
        inputs[attached.cache_name] = cache
        inputs["attention_mask"] = _whole_mask(cache, model, inputs)
        _check_positions(attached, model, inputs)
    with torch.no_grad(), attached.entered(call):
        output = model(**inputs, use_cache=True)
    if inputs.get("position_ids") is not None:
        _set_offsets(session.caches[0], inputs["position_ids"])
    return output


def _whole_mask(cache: CompressedCache, model: Any, inputs: dict[str, Any]) -> Tensor | None:
    """The 2-D mask of the whole context, where the block or an earlier one has padding; None: there is none."""
    mask, context = inputs.get("attention_mask"), cache.context
    if context is None or (isinstance(mask, Tensor) and (mask.ndim != 2 or mask.shape[1] > cache.seen)):
        return mask
    block = prompt_map(model, inputs)
    if block.batch != context.batch:
        return mask  # the pass is refused
    if isinstance(mask, Tensor) and mask.shape != block.kinds.shape:
        raise InputError(
            f"attention_mask {list(mask.shape)} does not fit a block of {list(block.kinds.shape)} tokens; give the "
            "mask of the block, or that of the whole context"
        )
    real = context.append(cache.seen - context.columns).concat(block).real
    return None if bool(real.all()) else real.long()


def _check_positions(attached: Attachment, model: Any, inputs: dict[str, Any]) -> None:
    """Raise where a model with offsets between tokens and positions cannot place the images of a further block."""
    if attached.has_offsets and inputs.get("position_ids") is None and bool(prompt_map(model, inputs).visual.any()):
        raise UnsupportedModeError(
            f"{type(model).__name__} numbers the tokens of images on three axes, and transformers places them in a "
            "first prompt only; pass position_ids for a block with images"
        )


def _set_offsets(cache: CompressedCache, positions: Tensor) -> None:
    """Let what follows a block continue after its highest position; positions [3 or 4, B, q] or [B, q]."""
    if positions.ndim != 3 or cache.context is None:
        return
    following = positions[-3:].amax(0).amax(-1, keepdim=True) + 1  # [B, 1]
    offset = following - cache.context.lengths[:, None].to(following.device)
    cache.model_state = [offset for _ in cache.model_state]
