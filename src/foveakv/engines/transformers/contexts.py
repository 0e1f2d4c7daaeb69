"""What a cache knows of its context: which pass reads a block, what every token is, and what the method is told.

A context is a sequence of blocks. The first one is the prompt; a further one is a later turn, a chunk of a prompt, or
what `session.feed` reads. Decode steps and drafts of assisted decoding are not blocks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from foveakv.core.prompt import PromptMap
from foveakv.engines.transformers.blocks import Block, BlockReport, Kind, Mode, Reads
from foveakv.engines.transformers.sizes import geometry_of
from foveakv.errors import MethodError, NoVisualTokensError, UnsupportedModeError
from foveakv.methods.views import PromptView


def begin(
    cache: Any, prompt: PromptMap, itemsize: int, new: int, total: int | None, block: Reads | None, mask: Any
) -> None:
    """Begin a pass over `new` tokens of a prompt or of a further block; see `CompressedCache.begin_forward`."""
    if cache.prefilled:
        if block is not None:
            cache.block = begin_block(cache, block, prompt, itemsize, mask)
        return
    total = total if block is None else block.total
    apart = block is not None and (block.kind == "feed" or (total is not None and new < total))
    cache.last_chunk = block is not None or total is None or cache.seen + new >= total
    begin_prompt(cache, prompt, itemsize, total, ends=not apart)


def begin_prompt(cache: Any, prompt: PromptMap, itemsize: int, total: int | None, ends: bool) -> None:
    """Take what is read of the first prompt; once it is complete, let the method begin.

    total: length of the prompt where it is known. ends: False if more of the prompt follows as further blocks.
    """
    method = cache.method
    cache.prompt = prompt if cache.prompt is None else cache.prompt.concat(prompt)
    if not cache.last_chunk and (method.prunes_after is not None or method.observes.second_pass):
        what = "drop_hidden_states" if method.prunes_after is not None else "a second pass"
        raise UnsupportedModeError(
            f"{method.name} with {what} needs the whole prompt in one forward pass; remove prefill_chunk_size"
        )
    if not cache.last_chunk:
        return
    cache.context, cache.first_columns = cache.prompt, cache.prompt.columns
    cache.first_lengths = None
    cache._request = request_of(cache, cache.prompt, itemsize, total)
    unseen = method.visual_only and not bool(cache.prompt.visual.any())
    if unseen and ends:
        raise _no_visual_tokens(method.name, cache.kinds_known)
    cache.undecided = unseen or (not ends and _empty(cache.prompt))
    if not cache.undecided:
        cache.state = method.begin(cache._request)


def begin_block(cache: Any, reads: Reads, prompt: PromptMap, itemsize: int, mask: Any) -> Block:
    """Take the map of a further block, and let the method begin it where it decides anything.

    mask: the call's 2-D mask of the context, 0 at padding, or None.
    """
    kind, total = reads.kind, reads.total
    if kind == "turn":
        cache.turn_start = reads.began
    start, device = cache.seen, prompt.kinds.device
    context = cache.context
    if context.columns < start:  # decoded tokens
        real = None
        if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] >= start + prompt.columns:
            real = mask[:, context.columns : start].to(device) != 0
        context = context.append(start - context.columns, real)
    context = context.concat(prompt)
    block = Block(kind, _mode(cache), start, context)
    if kind == "chunk":
        cache.first_columns = context.columns
    last = total is None or context.columns >= total
    if kind == "turn" and not last and cache.options.chunks == "whole":
        block.mode = "keep"  # decided with the last chunk of the turn, which knows the question
    method = cache.method
    if method.visual_only and not bool(context.visual.any()):
        if kind == "chunk" and last:
            raise _no_visual_tokens(method.name, cache.kinds_known)
        block.mode = "keep"
    if block.mode == "keep" or (not last and _empty(context)):
        block.mode = "keep"
        return block
    block.protected = _protected(cache, context, kind)
    if block.mode == "block":
        own = PromptMap(context.kinds[:, start:], context.index[:, start:])
        block.protected = None
        if method.visual_only and not bool(own.visual.any()):
            block.mode = "keep"
            return block
        block.request = request_of(cache, own, itemsize, None)
    else:
        block.request = request_of(cache, context, itemsize, total, block.protected, start)
    cache._request = block.request
    cache.state = method.continue_context(block.request, cache.state)
    cache.undecided = False
    return block


def end_block(cache: Any) -> None:
    """Finish a prompt or a further block after its last layer: its tokens are part of the prompt from now on."""
    block: Block | None = cache.block
    if block is None:
        evicted = sum(layer.counts.evicted for layer in cache.compressed)
        cache.blocks.append(_report(cache, "prompt", "context", int(cache.full_prompt.lengths.sum()), evicted))
        return
    cache.context = block.context
    tokens = int(block.context.real[:, block.start :].sum())
    if block.mode != "keep":
        cache.prompt = block.context
        whole = int(block.context.lengths.sum())
        for layer in cache.compressed:
            layer.end_block(block.context.columns, whole)
    cache.blocks.append(_report(cache, block.kind, block.mode, tokens, block.evicted))


def _report(cache: Any, kind: str, decided: str, tokens: int, evicted: int) -> BlockReport:
    cache.note_peak()
    slots = sum(layer.stored_slots for layer in cache.compressed)
    return BlockReport(kind, decided, tokens, slots, evicted, cache.stored_nbytes, cache.block_peak)


def request_of(
    cache: Any, prompt: PromptMap, itemsize: int, total: int | None, protected: Tensor | None = None, start: int = 0
) -> PromptView:
    """What the method is told of a context: budgets are of its tokens without the protected ones."""
    geometry = geometry_of(cache.config, prompt, len(cache.compressed), itemsize)
    lengths = prompt.lengths.cpu()
    kept = 0 if protected is None else (protected & prompt.real).sum(-1).cpu()
    whole = lengths + max(0, (total or 0) - prompt.columns)  # what is still to come counts: its length is known
    if cache.first_lengths is None:
        cache.first_lengths = whole
    shares = cache.first_lengths if cache.options.budget_of == "prompt" else whole - kept
    geometry = dataclasses.replace(geometry, contexts=lengths - kept, shares_of=shares)
    layers = tuple(layer.layer_idx for layer in cache.compressed)
    return PromptView(prompt, geometry, layers, len(cache.layers), start)


def _mode(cache: Any) -> Mode:
    """What this cache does with a further block."""
    if cache.preallocated is not None or cache.options.turns == "store":
        return "keep"
    further: Mode = cache.method.further
    return further


def _protected(cache: Any, context: PromptMap, kind: Kind) -> Tensor | None:
    """Tokens of earlier blocks that further blocks may not evict: bool [B, columns]; None: there are none."""
    options, real = cache.options, context.real
    found = torch.zeros_like(real)
    columns = torch.arange(context.columns, device=real.device)
    if options.keeps_text(cache.method):
        found |= context.text & (columns < cache.turn_start)
    first = columns < cache.first_columns
    if options.pinned == "first":
        found |= real & first & (kind != "chunk")
    elif options.pinned == "system":
        if kind != "chunk" and not bool((context.visual & first).any(-1).all()):
            raise MethodError(
                'pinned="system" pins the text before the first image, and the first block has no image; give the '
                "number of tokens to pin"
            )
        found |= real & (columns < context.first_visual[:, None])
    elif options.pinned != "none":
        found |= real & (real.cumsum(-1) <= options.pinned) & first
    return found if bool(found.any()) else None


def _empty(context: PromptMap) -> bool:
    """Whether a sequence has no token yet: the first chunks of a padded batch."""
    return bool((context.lengths == 0).any())


def _no_visual_tokens(method: str, kinds_known: bool) -> NoVisualTokensError:
    if not kinds_known:
        return NoVisualTokensError(
            f"{method} evicts visual tokens only, and inputs_embeds do not say which tokens are visual: "
            "pass mm_token_type_ids as well (0 text, 1 image, 2 video)"
        )
    return NoVisualTokensError(
        f"{method} evicts visual tokens only, and this prompt has no image or video; add one, or use "
        "snapkv, h2o or streaming for text"
    )
