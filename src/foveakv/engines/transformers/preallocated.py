"""Preallocated slots: keys and values never move after the prompt, so that a decode step can be compiled.

`compress(model, method, preallocate=512)` stores what the method keeps of a prompt as padded tensors [B, H, M, D], with
512 free slots after the longest run. A step writes to the next free slot of every run and attends to all M slots under
a mask: no shape depends on data and nothing is copied from the device to the host, as torch.compile and CUDA graphs
require. `generate` then compiles the step without further settings (see `compiled.py`).

A compiled step reads tensors only. What is counted on the host (tokens seen, slots stored, slots free) is updated
around the forward pass, outside the graph.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import CompileConfig
from transformers.masking_utils import causal_mask_function

from foveakv.engines.transformers.contract import OwningCache
from foveakv.engines.transformers.handle import KVHandle
from foveakv.engines.transformers.layer import CompressedLayer
from foveakv.engines.transformers.masks import LazyMask, Mask, SubsetMask
from foveakv.errors import CacheInUseError, UnsupportedModeError
from foveakv.memory.segments import Segments

# M is rounded up to a multiple of this: prompts of similar lengths share a compiled step, and rows are aligned.
SLOT_MULTIPLE = 64


class StepState:
    """What changes from step to step and is the same for all layers; its tensors keep their addresses.

    Attributes:
        room: the number of tokens that fit after the prompt.
        appended: the number of tokens stored after the prompt, counted on the host.
        running: whether a forward pass is in progress that has been checked against `room`.
        seen: int64 [], tokens of the context before this step.
        real: bool [B, q], False where a new token is padding.
    """

    def __init__(self, seen: int, batch: int, room: int, device: torch.device) -> None:
        self.room = room
        self.appended = 0
        self.running = False
        with torch.inference_mode(False):
            self.seen = at_fixed_address(torch.full((), seen, dtype=torch.int64, device=device))
            self._single = at_fixed_address(torch.ones(batch, 1, dtype=torch.bool, device=device))
        self.real = self._single

    def check_room(self, new: int) -> None:
        """Raises before a pass over `new` tokens for which there are not enough free slots; changes nothing."""
        if self.appended + new > self.room:
            raise UnsupportedModeError(
                f"preallocate={self.room} has slots for {self.room} tokens after the prompt; {self.appended} are "
                f"stored and {new} more do not fit. Nothing was overwritten. Start again with "
                f"preallocate={self.appended + new} or more"
            )

    def begin(self, new: int, mask: Tensor | None) -> None:
        """Before a pass over `new` tokens; mask [B, >= new], 0 at padding, or None."""
        if new == 1:
            self.real = self._single
            if mask is None:
                self.real.fill_(True)
            else:
                self.real.copy_(mask[:, -1:])
        elif mask is None:
            self.real = self.seen.new_ones(len(self._single), new, dtype=torch.bool)
        else:
            self.real = mask[:, -new:].to(self.seen.device, torch.bool)
        self.running = True

    def end(self, new: int) -> None:
        """After a pass over `new` tokens, or (negative) when the newest were cropped."""
        self.seen.add_(new)
        self.appended += new
        self.running = False

    def select_sequences(self, batch: int) -> None:
        """Follows a change of the batch size."""
        if batch != len(self._single):
            with torch.inference_mode(False):
                self._single = at_fixed_address(self._single.new_ones(batch, 1))
        self.real = self._single


class PreallocatedSlots:
    """One layer's slots in tensors of fixed size [B, H, M, ...]; every run fills the first ones.

    keys [B, H, M, D]; values [B, H, M, Dv]; positions int32 [B, H, M], -1 in slots that are free and in those of
    padding; base int64 [B, H, 1]: the next token's slot is base + tokens seen. It has the read-only interface of
    `Segments` (for the report and `kept`), and follows reordering and cropping.
    """

    saved_nbytes = 0

    def __init__(self, segments: Segments, clock: StepState, seen: int) -> None:
        self.clock = clock
        self._lengths = segments.lengths  # of the prompt, on the host
        self.heads = segments.heads
        slots = -(-(segments.max_length + clock.room) // SLOT_MULTIPLE) * SLOT_MULTIPLE
        keys, values = segments.gather()
        with torch.inference_mode(False):
            self.keys = at_fixed_address(_padded(keys, slots, 0))
            self.values = at_fixed_address(_padded(values, slots, 0))
            self.positions_ = at_fixed_address(_padded(segments.positions().to(torch.int32), slots, -1))
            self.base = at_fixed_address((self._lengths - seen)[..., None].to(keys.device))

    # ---- called inside a compiled step: tensors only

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Writes keys [B, H, q, D] and values [B, H, q, Dv] to the next free slots; they must fit."""
        new = torch.arange(keys.shape[2], device=keys.device) + self.clock.seen.to(keys.device)
        slot = self.base + new  # [B, H, q]
        position = torch.where(self.clock.real.to(keys.device), new, -1).to(torch.int32)
        self.keys.scatter_(2, slot[..., None].expand_as(keys), keys.to(self.keys.dtype))
        self.values.scatter_(2, slot[..., None].expand_as(values), values.to(self.values.dtype))
        self.positions_.scatter_(2, slot, position[:, None].expand_as(slot))

    def attend(self, query: Tensor, scaling: float) -> Tensor:
        """Attention of the newest tokens' query [B, Hq, q, D]; returns [B, q, Hq, Dv]."""
        batch, query_heads, new, dim = query.shape
        group = query_heads // self.heads
        at = self.positions_[:, :, None]
        allowed = at >= 0
        if new > 1:
            rows = torch.arange(new, device=query.device) + self.clock.seen.to(query.device)
            allowed = (allowed & (at <= rows[:, None])).repeat(1, 1, group, 1)
        # The query heads of a group are rows of one attention problem: keys are read once for all of them.
        rows_of_group = query.reshape(batch, self.heads, group * new, dim).to(self.keys.dtype)
        allowed = allowed.expand(batch, self.heads, group * new, at.shape[-1])
        output = F.scaled_dot_product_attention(rows_of_group, self.keys, self.values, attn_mask=allowed, scale=scaling)
        return output.to(query.dtype).reshape(batch, query_heads, new, -1).transpose(1, 2).contiguous()

    # ---- called outside of steps

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.keys.shape[0]

    @property
    def total(self) -> int:
        """Stored slots of all runs, padding after the prompt included."""
        return int(self._lengths.sum()) + self.clock.appended * self._lengths.numel()

    def positions(self) -> Tensor:
        """int64 [B, H, m], logical positions of the slots in use, -1 where a slot is empty."""
        longest = int(self._lengths.max()) + self.clock.appended
        return self.positions_[:, :, :longest].to(torch.int64)

    @property
    def nbytes(self) -> int:
        """Bytes held by keys and values, free slots included."""
        return self.keys.untyped_storage().nbytes() + self.values.untyped_storage().nbytes()

    @property
    def side_nbytes(self) -> int:
        """Bytes of positions and slot indices."""
        return self.positions_.untyped_storage().nbytes() + self.base.untyped_storage().nbytes()

    def select_sequences(self, index: Tensor) -> None:
        """Sequence b becomes a copy of sequence index[b]; in place where the batch size stays the same."""
        self._lengths = self._lengths.index_select(0, index.cpu())
        index = index.to(self.keys.device)
        for name in ("keys", "values", "positions_", "base"):
            held = getattr(self, name)
            with torch.inference_mode(False):  # later steps may run outside of it and write here
                chosen = held.index_select(0, index)
            if len(chosen) == len(held):
                held.copy_(chosen)
            else:
                setattr(self, name, at_fixed_address(chosen))

    def crop(self, length: int) -> None:
        """Frees the slots of tokens at or beyond position `length`."""
        self.positions_.masked_fill_(self.positions_ >= length, -1)


class PreallocatedLayer(CompressedLayer):
    """A compressed layer that moves to preallocated slots once the prompt is complete."""

    is_compileable = True

    @property
    def slots(self) -> PreallocatedSlots:
        """The layer's slots; only after the prompt is complete."""
        return cast(PreallocatedSlots, self.segments)

    def move(self, clock: StepState) -> None:
        """Moves the compressed prompt from `Segments` to preallocated slots."""
        if self.segments is None:
            raise CacheInUseError("this layer has no prompt yet")
        # `PreallocatedSlots` has the part of the interface of `Segments` that only reads.
        before = self.segments
        self.segments = cast(Segments, PreallocatedSlots(before, clock, self.seen))
        self.cache.note_peak(before.nbytes + before.side_nbytes)  # both were allocated for a moment

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[KVHandle, KVHandle]:
        """Stores new keys [B, H, q, D] and values [B, H, q, Dv]; returns a handle for the attention function."""
        if self.segments is None:
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.slots.clock.running:
            raise CacheInUseError(
                "a compressed cache with preallocate= was used outside its model's forward pass, where free slots are "
                "checked: call the model itself, or model.get_compiled_call(config), and not a compiled model.forward"
            )
        self.slots.append(key_states.detach(), value_states.detach())
        handle = KVHandle(self)
        return handle, handle

    def get_seq_length(self) -> Any:
        """Tokens seen; inside a compiled step as a tensor, so that it is the same graph at every length."""
        if self.segments is not None and torch.compiler.is_compiling():
            return self.slots.clock.seen
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask would cover."""
        if self.segments is not None and torch.compiler.is_compiling():
            return self.slots.keys.shape[2], 0  # no mask is made of it
        return super().get_mask_sizes(query_length)

    def end_prefill(self, query: Tensor, handle: KVHandle, mask: Mask | None, scaling: float) -> None:
        """After the dense attention of a prefill chunk; refuses masks that are not causal."""
        check_causal(self.cache, mask)
        super().end_prefill(query, handle, mask, scaling)

    def attend(self, query: Tensor, mask: Mask | None, scaling: float) -> Tensor:
        """Attention of query [B, Hq, q, D] over the slots; returns [B, q, Hq, Dv]."""
        if not torch.compiler.is_compiling():
            check_causal(self.cache, mask)
        return self.slots.attend(query, scaling)


def preallocate(cache: OwningCache) -> StepState:
    """Moves all layers of a cache whose prompt is complete to preallocated slots, one after the other."""
    layers = [layer for layer in cache.compressed if isinstance(layer, PreallocatedLayer)]
    first = layers[0].segments
    if first is None:
        raise CacheInUseError("this cache has not seen a prompt yet")
    clock = StepState(cache.seen, first.batch, cache.preallocated or 0, first.device)
    for layer in layers:
        layer.move(clock)
    return clock


def check_causal(cache: OwningCache, mask: Mask | None) -> None:
    """Raises `UnsupportedModeError` where a mask is more than causal order and padding."""
    whole = mask.whole if isinstance(mask, SubsetMask) else mask
    if whole is None or (isinstance(whole, LazyMask) and whole.arguments["mask_function"] is causal_mask_function):
        return
    raise UnsupportedModeError(
        f"{cache.method.name} with preallocate= attends in causal order only, and this model or call masks "
        "attention in another way (a window, image blocks, a 4-D mask); remove preallocate"
    )


def padding_mask(mask: Any) -> Tensor | None:
    """The 2-D mask [B, seen + q] of a forward pass; `generate` wraps it for caches of fixed size."""
    if isinstance(mask, dict):
        mask = next(iter(mask.values()), None)
    if isinstance(mask, LazyMask):
        mask = mask.padding
    if mask is None or (isinstance(mask, Tensor) and mask.ndim == 2):
        return mask
    raise UnsupportedModeError("with preallocate= an attention mask must be 2-D (1 = token, 0 = padding) or omitted")


def compile_settings(model: Any, given: Any) -> Any:
    """transformers' `CompileConfig` for a model: the one given to `generate`, or the model's default."""
    if given is not None:
        return given
    default = getattr(model, "_default_compile_config", CompileConfig)
    return default()


def at_fixed_address(tensor: Tensor) -> Tensor:
    """Marks a tensor for CUDA graphs: it is written in place and never moves."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(tensor)
    return tensor


def _padded(tensor: Tensor, slots: int, beyond: int) -> Tensor:
    """[B, H, m, ...] -> a new [B, H, slots, ...], padded with `beyond`."""
    wider = tensor.new_full((*tensor.shape[:2], slots, *tensor.shape[3:]), beyond)
    wider[:, :, : tensor.shape[2]] = tensor
    return wider
