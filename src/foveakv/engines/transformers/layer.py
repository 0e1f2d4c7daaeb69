"""One layer of a compressed cache: what transformers' cache layers promise, over stored slots."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from foveakv.engines.transformers import compat
from foveakv.engines.transformers.handle import KVHandle
from foveakv.engines.transformers.masks import Mask, stored_mask, visible_rows
from foveakv.errors import CacheInUseError, UnsupportedModeError
from foveakv.kernels import decode_attention
from foveakv.kernels.paged import attend_with_pages
from foveakv.memory.segments import Segments
from foveakv.methods.base import Counts, DecodeView, Drop, PrefillView

if TYPE_CHECKING:
    from foveakv.engines.transformers.cache import CompressedCache


class ExtraMemory(Protocol):
    """Memory that a method adds to a layer, e.g. a backing store with its digests."""

    @property
    def device_nbytes(self) -> int: ...

    @property
    def host_nbytes(self) -> int: ...

    @property
    def extra_slots(self) -> int:
        """Prompt slots that live here and that no step attends to unless it chooses others."""

    @property
    def chosen_slots(self) -> Tensor:
        """int64 [B, H] on the CPU: slots that a step attends to here, outside the layer's segments."""

    def chosen_positions(self) -> Tensor | None:
        """int64 [B, H, n]: their positions at the present step, -1 behind the last; None = there are none."""

    def select_sequences(self, index: Tensor) -> None:
        """Follows a reordering of the batch (beams): LongTensor [B']."""


class CompressedLayer(compat.CacheLayerMixin):
    """One layer's compressed KV. Lengths it reports are logical: tokens seen, not slots stored."""

    is_compileable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: CompressedCache, layer_idx: int, compressed_idx: int) -> None:
        super().__init__()
        self._cache = weakref.ref(cache)  # the cache owns its layers; a strong link back would delay freeing the memory
        self.layer_idx = layer_idx
        self.compressed_idx = compressed_idx
        self.reset()

    def reset(self) -> None:
        """Forgets everything; the next update begins a new prompt."""
        self.segments: Segments | None = None
        self.extra_memory: list[ExtraMemory] = []
        self.state: dict[str, Any] = {}
        self.counts = Counts()
        self.seen = 0
        self.prompt_slots = 0
        self.prompt_columns = 0
        self.decoded_from = 0  # no decoded token before this position is stored
        self.full_nbytes = 0
        self._dense: tuple[Tensor, Tensor] | None = None
        self._queries: Tensor | None = None
        self._drafts: tuple[Tensor, Tensor] | None = None
        self.is_initialized = False

    @property
    def cache(self) -> CompressedCache:
        cache = self._cache()
        if cache is None:
            raise CacheInUseError(
                "the CompressedCache that owned this layer is gone; keep a reference to it while generating"
            )
        return cache

    # ---- transformers' contract

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[KVHandle, KVHandle]:
        """Takes new keys [B, H, q, D] and values [B, H, q, Dv]; returns a handle for our attention function."""
        new = self.cache.forward_tokens
        if new is None:
            raise CacheInUseError(
                "a compressed cache was used outside its model's forward pass: call that very model (no submodule, no "
                "other one), inside `with foveakv.compress(model, ...)` or with a cache from `foveakv.cache_for(...)`"
            )
        self.is_initialized = True
        self.seen += new
        if self.segments is None:
            if self._dense is not None:
                key_states = torch.cat([self._dense[0], key_states], dim=-2)
                value_states = torch.cat([self._dense[1], value_states], dim=-2)
            self._dense = (key_states, value_states)
            handle = KVHandle(self, key_states, value_states)
        else:
            positions = self.cache.new_positions(self.seen, new, key_states.device)
            self.segments.append(key_states, value_states, positions)
            handle = KVHandle(self)
        return handle, handle

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    @property
    def is_croppable(self) -> bool:
        return not self.cache.method.evicts_while_decoding and self.cache.max_decode_slots is None

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the newest tokens (assisted decoding rejects drafts this way)."""
        remove = compat.tokens_to_remove(tokens_to_remove, self.seen)
        if remove == 0:
            return
        self.check_crop(remove)
        self.seen -= remove
        if self.segments is not None:
            self.segments.crop(self.seen)

    def check_crop(self, remove: int) -> None:
        """Raises where the newest `remove` tokens cannot be taken back; changes nothing."""
        if self._incomplete:
            raise CacheInUseError("a prompt that comes in chunks is not complete yet and cannot be cropped")
        if not self.is_croppable:
            what = self.cache.method.name if self.cache.max_decode_slots is None else "max_decode_slots"
            raise UnsupportedModeError(
                f"{what} evicts while decoding, so rejected draft tokens cannot be taken back; use a method that "
                "evicts at prefill only (snapkv, adakv, hybridkv) without max_decode_slots, or generate without an "
                "assistant"
            )
        if self.seen - remove < self.prompt_columns:
            raise UnsupportedModeError(
                f"{self.cache.method.name}: the prompt is compressed as a whole and cannot be cropped; call reset() "
                "and start again"
            )

    @property
    def _incomplete(self) -> bool:
        """Whether some of the prompt is here, and not all of it."""
        return self.segments is None and self._dense is not None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(torch.arange(self._batch, device=indices.device)[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select(torch.arange(self._batch).repeat_interleave(repeats))

    @property
    def _batch(self) -> int:
        return self.segments.batch if self.segments is not None else 0

    def _select(self, index: Tensor) -> None:
        if self._incomplete:
            raise CacheInUseError("a prompt that comes in chunks is not complete yet and cannot be reordered")
        if self.segments is None:
            return
        if self.compressed_idx == 0:
            self.cache.note_peak()
        before = self.segments.batch
        self.segments.select_sequences(index)
        if self.segments.batch != before:  # beams keep their number; repeats and selections count anew
            self.full_nbytes = self.full_nbytes // before * self.segments.batch
            self.prompt_slots = self.prompt_slots * self.segments.batch // before
        for memory in self.extra_memory:
            memory.select_sequences(index)
        select_tensors(self.state, index)

    # ---- what our attention function calls

    def end_prefill(self, query: Tensor, handle: KVHandle, mask: Mask | None, scaling: float) -> None:
        """After the dense attention of a prefill chunk: in the last one, lets the method decide and stores the rest."""
        cache = self.cache
        query = query.detach()
        if cache.method.needs_queries(self.compressed_idx) and self._queries is not None:
            query = torch.cat([self._queries, query], dim=-2)
        if not cache.last_chunk:
            self._queries = query if cache.method.needs_queries(self.compressed_idx) else None
            handle.release()
            return
        keys, values = (t.detach() for t in self._dense or ())
        if cache.drafted:  # what an assistant guessed behind the prompt is no part of it
            drafts = slice(keys.shape[-2] - cache.drafted, None)
            self._drafts = keys[..., drafts, :].clone(), values[..., drafts, :].clone()
            keys, values, query = (t[..., : -cache.drafted, :] for t in (keys, values, query))
        prompt, positions = cache.columns(self.compressed_idx)
        view = PrefillView(
            self.layer_idx, self.compressed_idx, query, scaling, cache, self.state, self.counts,
            keys, values, positions, prompt, visible_rows(mask, keys.shape[-2]),
        )  # fmt: skip
        keep = cache.method.prefill(view)
        batch, heads, columns = keys.shape[:3]
        real = prompt.real[:, None]
        keep = real if keep is None else keep & real
        self.segments = Segments.from_dense(
            view.keys, view.values, keep.expand(batch, heads, columns), positions,
            kv_dtype=cache.kv_dtype, residual_length=cache.residual_length, real=prompt.real,
        )  # fmt: skip
        self.prompt_slots = int(cache.full_prompt.lengths.sum()) * heads
        per_slot = (keys.shape[-1] + values.shape[-1]) * keys.element_size()
        # Not `columns`: a layer may have got fewer when evicted tokens left the residual stream.
        self.prompt_columns = self.decoded_from = cache.prompt_columns
        self.full_nbytes = per_slot * heads * batch * cache.prompt_columns
        # A method that merges has made copies, which are still here.
        copies = sum(made.nbytes for made, given in ((view.keys, keys), (view.values, values)) if made is not given)
        cache.note_peak(copies)
        self._dense = self._queries = None
        handle.release()
        cache.end_layer(self)

    def store_drafts(self) -> None:
        """Once the prompt is compressed, adds what came with it but behind it; a crop takes rejected tokens back."""
        if self._drafts is not None and self.segments is not None:
            keys, values = self._drafts
            batch, _, count, _ = keys.shape
            positions = torch.arange(self.seen - count, self.seen, device=keys.device)
            self.segments.append(keys, values, positions.expand(batch, count))
            self._drafts = None

    def attend(self, query: Tensor, mask: Mask | None, scaling: float) -> Tensor:
        """Attention of query [B, Hq, q, D] over the stored slots; returns [B, q, Hq, Dv]."""
        cache, segments = self.cache, self.segments
        if segments is None:
            raise CacheInUseError("this layer has no prompt yet")
        method, new = cache.method, query.shape[-2]
        view = DecodeView(
            self.layer_idx, self.compressed_idx, query, scaling, cache, self.state, self.counts, segments, self.seen
        )
        if method.retrieves:
            method.before_attention(view)
        if cache.trace is not None:
            cache.trace[-1][self.layer_idx] = self.kept()
        allowed = None
        special = mask is not None and (not mask.plain or mask.padded_from(cache.prompt_columns))
        if new > 1 or special:
            allowed = stored_mask(mask, segments.positions(), self.seen, new, cache.prompt_columns)
        attention_sum, backend = method.needs_attention_sum, cache.backend
        if view.pages is None:
            output, view.attention_sum = decode_attention(
                query, segments.runs, scaling, allowed, need_attention_sum=attention_sum, backend=backend
            )
        else:
            hidden = self._page_mask(mask, new) if special else None
            output, view.attention_sum, _ = attend_with_pages(
                query,
                segments.runs,
                scaling,
                view.pages,
                allowed,
                hidden,
                need_attention_sum=attention_sum,
                backend=backend,
            )
        if method.evicts_while_decoding:
            leaving = method.decode(view)
            if leaving is not None:
                self._drop(segments, leaving)
        elif cache.max_decode_slots is not None:
            self._guard(segments, cache.max_decode_slots)
        return output.transpose(1, 2).contiguous()  # one query: no copy

    def _page_mask(self, mask: Mask | None, new: int) -> Tensor | None:
        """What a mask that is not plainly causal says about pages; None = every query may attend to all of them."""
        chosen = [p for memory in self.extra_memory if (p := memory.chosen_positions()) is not None]
        if not chosen:
            return None
        positions = torch.cat(chosen, -1)
        allowed = stored_mask(mask, positions, self.seen, new, self.cache.prompt_columns)
        if allowed is None or bool((allowed | (positions < 0)[:, :, None]).all()):
            return None
        return allowed

    def kept(self) -> Tensor:
        """Positions that a step attends to: int64 [B, H, M], ascending, -1 behind the last."""
        if self.segments is None:
            raise CacheInUseError("nothing is stored yet: the prompt has not been processed")
        chosen = [p for memory in self.extra_memory if (p := memory.chosen_positions()) is not None]
        if not chosen:
            return in_order(self.segments.positions())
        positions = torch.cat([self.segments.positions(), *chosen], -1)
        return in_order(positions)[..., : int((positions >= 0).sum(-1).max())]

    @property
    def stored_slots(self) -> int:
        """Slots that a step attends to, all sequences and heads."""
        own = 0 if self.segments is None else self.segments.total
        return own + sum(int(memory.chosen_slots.sum()) for memory in self.extra_memory)

    def _drop(self, segments: Segments, leaving: Tensor | Drop) -> None:
        """Carries out what a method decided: a mask of what stays, or single slots that go."""
        slots, held = segments.total, segments.held_nbytes
        if isinstance(leaving, Drop):
            segments.evict(leaving.slots, leaving.counts)
        else:
            segments.keep(leaving)
        if segments.held_nbytes < held:
            self.cache.note_peak(held - segments.held_nbytes)
        self.counts.add(evicted=slots - segments.total)

    def _guard(self, segments: Segments, limit: int) -> None:
        """Drops the oldest decoded tokens when more than `limit` are stored; an eighth more, so that it is rare."""
        if self.seen - self.decoded_from <= limit:
            return
        start = self.seen - max(1, limit - limit // 8)
        positions = segments.positions()
        self._drop(segments, (positions < self.prompt_columns) | (positions >= start))
        self.decoded_from = start

    @property
    def device_nbytes(self) -> int:
        """Storage bytes on the compute device: keys, values, positions, side tensors, a method's state, digests."""
        waiting = (*(self._dense or ()), *(self._drafts or ()), self._queries)
        dense = sum(t.nbytes for t in waiting if t is not None)
        stored = 0 if self.segments is None else self.segments.nbytes + self.segments.side_nbytes
        state = sum(t.untyped_storage().nbytes() for t in self.state.values() if isinstance(t, Tensor))
        return dense + stored + state + sum(memory.device_nbytes for memory in self.extra_memory)

    @property
    def host_nbytes(self) -> int:
        """Storage bytes in the backing store, 0 for methods without one."""
        return sum(memory.host_nbytes for memory in self.extra_memory)


def in_order(positions: Tensor) -> Tensor:
    """Positions [B, H, M] of slots in any order -> ascending in each head, -1 (no token) at the end."""
    return (
        torch.where(positions < 0, torch.iinfo(positions.dtype).max, positions)
        .sort(dim=-1)
        .values.where(
            (positions >= 0).sum(-1, keepdim=True) > torch.arange(positions.shape[-1], device=positions.device), -1
        )
    )


def select_tensors(state: dict[Any, Any], index: Tensor) -> None:
    """Reorders a method's state; by convention its tensors are [B, ...]."""
    for key, value in state.items():
        if isinstance(value, Tensor):
            state[key] = value.index_select(0, index.to(value.device))
