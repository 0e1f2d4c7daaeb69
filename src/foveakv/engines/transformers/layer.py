"""One layer of a compressed cache, with the interface of transformers' cache layers."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from foveakv.core.columns import in_order
from foveakv.engines.transformers import blocks, compat, decisions
from foveakv.engines.transformers.contract import OwningCache
from foveakv.engines.transformers.counts import Counts
from foveakv.engines.transformers.decision_checks import check_relevance, returned
from foveakv.engines.transformers.handle import KVHandle
from foveakv.engines.transformers.masks import Mask, stored_mask, visible_rows
from foveakv.engines.transformers.prefill import store_layer
from foveakv.engines.transformers.second_pass import attend_twice
from foveakv.engines.transformers.slots import StoredChunks, StoredSlots
from foveakv.errors import CacheInUseError, UnsupportedModeError
from foveakv.kernels import decode_attention, fused_columns
from foveakv.kernels.cpu_chunks import chunk_kernel
from foveakv.kernels.paged import attend_with_pages
from foveakv.memory.chunks import ChunkStore
from foveakv.memory.pages import Pages
from foveakv.memory.segments import Segments
from foveakv.methods.views import Decision, DecodeView, PrefillView, PromptView, ReadView, Repeated, State


class CompressedLayer(compat.CacheLayerMixin):
    """Compressed keys and values of one layer. Reported lengths are logical: tokens seen, not slots stored."""

    is_compileable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: OwningCache, layer_idx: int, compressed_idx: int) -> None:
        super().__init__()
        self._cache = weakref.ref(cache)  # weak: a reference cycle would delay freeing the memory
        self.layer_idx = layer_idx
        self.compressed_idx = compressed_idx
        self.reset()

    def reset(self) -> None:
        """Discard everything; the next update starts a new prompt."""
        self.segments: Segments | None = None
        self.store: ChunkStore | None = None  # chunks that the method offloaded
        self.counts = Counts()
        self.seen = 0
        self.prompt_slots = 0
        self.prompt_columns = 0
        self.decoded_from = 0  # decoded tokens before this position are not stored
        self.full_nbytes = 0
        self._dense: tuple[Tensor, Tensor] | None = None
        self._queries: Tensor | None = None
        self._first_pass: PrefillView | None = None  # kept until the second pass over the prompt
        self.is_initialized = False

    @property
    def cache(self) -> OwningCache:
        """The cache that owns this layer."""
        cache = self._cache()
        if cache is None:
            raise CacheInUseError("the cache of this layer no longer exists; keep a reference to it while generating")
        return cache

    # ---- transformers' interface

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Mark the layer as initialized; storage is allocated at the end of the prefill."""
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[KVHandle, KVHandle]:
        """Add new keys [B, H, q, D] and values [B, H, q, Dv]; return handles for the attention function."""
        new = self.cache.forward_tokens
        if new is None:
            raise CacheInUseError(
                "a compressed cache was used outside its model's forward pass: call the model itself, not a submodule "
                "or another model, inside `with foveakv.compress(model, ...)` or with a cache from "
                "`foveakv.cache_for(...)`"
            )
        self.is_initialized = True
        if self._first_pass is not None:
            handle = KVHandle(self)
            self._dense = key_states, value_states  # of the second pass, for its attention only
            return handle, handle
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
        """Return the number of tokens seen."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and the offset of the attention mask, by tokens seen."""
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: the length is not limited."""
        return -1

    @property
    def is_croppable(self) -> bool:
        """Whether decoded tokens can be removed, which assisted decoding requires."""
        return not self.cache.method.evicts_while_decoding and self.cache.max_decode_slots is None

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens, such as rejected drafts of assisted decoding."""
        remove = compat.tokens_to_remove(tokens_to_remove, self.seen)
        if remove == 0:
            return
        self.check_crop(remove)
        self.seen -= remove
        if self.segments is not None:
            self.segments.crop(self.seen)

    def check_crop(self, remove: int) -> None:
        """Check that the newest `remove` tokens can be removed; changes nothing.

        Raises:
            CacheInUseError: the prompt is not complete.
            UnsupportedModeError: tokens are evicted while decoding, or the prompt would be cropped.
        """
        if self._incomplete:
            raise CacheInUseError("the prompt is read in chunks and not complete yet, so it cannot be cropped")
        if not self.is_croppable:
            what = self.cache.method.name if self.cache.max_decode_slots is None else "max_decode_slots"
            raise UnsupportedModeError(
                f"{what} evicts while decoding, so rejected draft tokens cannot be removed; use a method that "
                "evicts at prefill only (snapkv, adakv, hybridkv) without max_decode_slots, or generate without an "
                "assistant"
            )
        if self.seen - remove < self.prompt_columns:
            if len(self.cache.blocks) > 1:
                raise UnsupportedModeError(
                    f"{self.cache.method.name}: tokens that model(...) reads together are compressed as a block and "
                    'cannot be cropped; use turns="store" to verify drafts in a loop of your own'
                )
            raise UnsupportedModeError(
                f"{self.cache.method.name}: the prompt is compressed as a whole and cannot be cropped; call reset() "
                "and start again"
            )

    @property
    def _incomplete(self) -> bool:
        """Whether the layer has read a part of the prompt only."""
        return self.segments is None and self._dense is not None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder sequences for beam search: sequence b becomes the former sequence `beam_idx[b]`."""
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences `indices`."""
        self._select(torch.arange(self._batch, device=indices.device)[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times."""
        self._select(torch.arange(self._batch).repeat_interleave(repeats))

    @property
    def _batch(self) -> int:
        return self.segments.batch if self.segments is not None else 0

    def _select(self, index: Tensor) -> None:
        if self._incomplete:
            raise CacheInUseError("the prompt is read in chunks and not complete yet, so it cannot be reordered")
        if self.segments is None:
            return
        if self.compressed_idx == 0:
            self.cache.note_peak()
        before = self.segments.batch
        self.segments.select_sequences(index)
        if self.segments.batch != before:  # after repeats and selections; beam search preserves the batch size
            self.full_nbytes = self.full_nbytes // before * self.segments.batch
        if self.store is not None:
            self.store.select_sequences(index)

    def count_sequences(self, tokens: int) -> None:
        """Count the prompt's slots anew after sequences were selected or repeated; tokens: of all prompts."""
        if self.segments is not None:
            self.prompt_slots = tokens * self.segments.heads

    # ---- called by FoveaKV's attention function

    def end_prefill(self, query: Tensor, handle: KVHandle, mask: Mask | None, scaling: float) -> None:
        """Finish a prefill chunk after its dense attention; after the last one, store what the method keeps."""
        cache = self.cache
        query = query.detach()
        wanted = cache.method.needs_queries(self.compressed_idx)
        if wanted and self._queries is not None:
            query = torch.cat([self._queries, query], dim=-2)
        if not cache.last_chunk:
            self._queries = query if wanted else None
            handle.release()
            return
        keys, values = (t.detach() for t in self._dense or ())
        prompt, positions, pruned = cache.columns(self.compressed_idx)
        view = PrefillView(
            *self.shared(query, scaling), keys, values, positions, prompt, visible_rows(mask, keys.shape[-2]), pruned,
            fused=fused_columns(keys, cache.backend),
        )  # fmt: skip
        if cache.method.observes.second_pass:
            if not wanted:
                view.query = query[..., :0, :]
            self._first_pass, self._dense, self._queries = view, None, None
            handle.release()
            return
        self._store(view, handle)

    def attend_second_pass(self, query: Tensor, scaling: float) -> Tensor:
        """Attend in the second pass, query [B, Hq, C, D] -> [B, C, Hq, Dv]; then store what the method keeps."""
        view, self._first_pass = self._first_pass, None
        if view is None or self._dense is None:
            raise CacheInUseError("this layer has no prompt yet")
        query, (keys, values) = query.detach(), self._dense
        output = attend_twice(query, (view.keys, keys), (view.values, values), view.prompt.real, scaling)
        view.repeated = Repeated(query, keys)
        self._dense = view.keys, view.values  # counted as bytes of the layer until the prompt is stored
        self._store(view, None)
        return output.transpose(1, 2).contiguous()

    def shared(self, query: Tensor, scaling: float) -> tuple[int, int, Tensor, float, PromptView, State | None]:
        """The fields of `LayerView`."""
        cache = self.cache
        return self.layer_idx, self.compressed_idx, query, scaling, cache.request, cache.state

    def _store(self, view: PrefillView, handle: KVHandle | None) -> None:
        """Let the method decide and store the slots that it keeps."""
        self.segments, self.store = store_layer(self, view)
        batch, heads, _, dim = view.keys.shape
        self.prompt_slots = int(self.cache.full_prompt.lengths.sum()) * heads
        per_slot = (dim + view.values.shape[-1]) * view.keys.element_size()
        # Not C, which is smaller if tokens were pruned from the residual stream.
        self.prompt_columns = self.decoded_from = self.cache.prompt_columns
        self.full_nbytes = per_slot * heads * batch * self.cache.prompt_columns
        self._dense = self._queries = None
        if handle is not None:
            handle.release()
        self.cache.end_layer(self)

    def narrow(self, keep: Tensor | None) -> None:
        """Evict prompt columns that a later layer has decided about; keep: bool [B, H or 1, C], None = all."""
        if keep is not None:
            decisions.keep_columns(self._stored, keep)

    def settle(self, decision: Decision) -> None:
        """Carry out the decision that `after_prefill` made for this layer."""
        cache = self.cache
        if cache.block is not None:
            blocks.settle(self, cache.block, decision)
            return
        real = cache.full_prompt.real
        self.store = decisions.settle(self._stored, self.store, decision, real, cache.storage)

    def end_block(self, columns: int, tokens: int) -> None:
        """Count a further block as part of the prompt, which has `tokens` tokens in `columns` columns from now on."""
        self.full_nbytes = self.full_nbytes // max(1, self.prompt_columns) * columns
        self.prompt_columns = self.decoded_from = columns
        self.count_sequences(tokens)

    def count_prompt(self) -> None:
        """Count the evicted slots of the prompt: neither stored on the device nor offloaded."""
        offloaded = 0 if self.store is None else self.store.extra_slots
        self.counts.evicted += self.prompt_slots - self.stored_slots - offloaded

    def attend(self, query: Tensor, mask: Mask | None, scaling: float) -> Tensor:
        """Attend with query [B, Hq, q, D] to the stored slots; return [B, q, Hq, Dv]."""
        if self._first_pass is not None:
            return self.attend_second_pass(query, scaling)
        cache, segments = self.cache, self._stored
        method, new = cache.method, query.shape[-2]
        pages = self._read(query, scaling)
        if cache.trace is not None:
            cache.trace[-1][self.layer_idx] = self.kept()
        allowed = None
        special = mask is not None and (not mask.plain or mask.padded_from(cache.prompt_columns))
        if new > 1 or special:
            allowed = stored_mask(mask, segments.positions(), self.seen, new, cache.prompt_columns)
        observes = method.observes
        block = None if cache.block is None or cache.block.mode == "keep" else cache.block
        summed = observes.attention_sum and block is None
        wanted: dict[str, Any] = {"need_attention_sum": summed, "backend": cache.backend}
        if pages is None:
            output, attention_sum = decode_attention(query, segments.runs, scaling, allowed, **wanted)
        else:
            page_mask = self._page_mask(mask, new) if special else None
            output, attention_sum, _ = attend_with_pages(
                query, segments.runs, scaling, pages, allowed, page_mask, **wanted
            )
        if block is not None:
            blocks.end_layer(self, query, mask, scaling)
        elif not cache.undecided and (method.evicts_while_decoding or observes.attention_sum or observes.steps):
            view = DecodeView(
                *self.shared(query, scaling), StoredSlots(segments, cache.backend), self.seen, attention_sum
            )
            decision = method.decode(view)
            if decision is not None:
                self._evict(returned(method, "decode", decision))
        if cache.max_decode_slots is not None and block is None:
            self._guard(segments, cache.max_decode_slots)
        return output.transpose(1, 2).contiguous()  # no copy if q = 1

    def _read(self, query: Tensor, scaling: float) -> Pages | None:
        """Select the chunks that this step reads; return the pages to read in place, if any."""
        store = self.store
        if store is None or not store.choosing:
            return None
        method, backend = self.cache.method, self.cache.backend
        relevance = method.read(ReadView(*self.shared(query, scaling), StoredChunks(store, backend), self.seen))
        check_relevance(method.name, relevance, store)
        if store.in_place:
            asked, hits = store.pick(relevance, chunk_kernel(query.device, backend))
        else:
            asked, hits = store.fetch(self._stored, relevance)
        self.counts.retrieved += asked
        self.counts.hits += hits
        return store.pages() if store.in_place and asked else None

    @property
    def _stored(self) -> Segments:
        if self.segments is None:
            raise CacheInUseError("this layer has no prompt yet")
        return self.segments

    def _page_mask(self, mask: Mask | None, new: int) -> Tensor | None:
        """Return the mask of the pages for a mask that is not plain causal; None = all pages are visible."""
        positions = None if self.store is None else self.store.chosen_positions()
        if positions is None:
            return None
        allowed = stored_mask(mask, positions, self.seen, new, self.cache.prompt_columns)
        if allowed is None or bool((allowed | (positions < 0)[:, :, None]).all()):
            return None
        return allowed

    def kept(self) -> Tensor:
        """Return the positions that a step attends to: int64 [B, H, M], ascending, padded with -1."""
        if self.segments is None:
            raise CacheInUseError("nothing is stored yet: the prompt has not been processed")
        chosen = None if self.store is None else self.store.chosen_positions()
        if chosen is None:
            return in_order(self.segments.positions())
        positions = torch.cat([self.segments.positions(), chosen], -1)
        return in_order(positions)[..., : int((positions >= 0).sum(-1).max())]

    @property
    def stored_slots(self) -> int:
        """Number of slots that a step attends to, over all sequences and heads."""
        own = 0 if self.segments is None else self.segments.total
        return own + (0 if self.store is None else int(self.store.chosen_slots.sum()))

    def _evict(self, decision: Decision) -> None:
        """Carry out the evictions of a decode step."""
        segments = self._stored
        slots, held = segments.total, segments.held_nbytes
        decisions.evict(segments, decision, self.cache.method.name)
        if segments.held_nbytes < held:
            self.cache.note_peak(held - segments.held_nbytes)
        self.counts.evicted += slots - segments.total
        self.counts.restored += decision.restored
        self.counts.flushes += decision.flushes

    def _guard(self, segments: Segments, limit: int) -> None:
        """Evict the oldest decoded tokens if more than `limit` are stored, down to 7/8 of it, to do so rarely."""
        if self.seen - self.decoded_from <= limit:
            return
        start = self.seen - max(1, limit - limit // 8)
        positions = segments.positions()
        self._evict(Decision(keep=(positions < self.prompt_columns) | (positions >= start)))
        self.decoded_from = start

    @property
    def device_nbytes(self) -> int:
        """Storage bytes on the compute device: keys, values, positions, side tensors, digests."""
        first = self._first_pass
        waiting = (*(self._dense or ()), self._queries)
        if first is not None:
            waiting = (*waiting, first.query, first.keys, first.values)
        dense = sum(t.nbytes for t in waiting if t is not None)
        stored = 0 if self.segments is None else self.segments.nbytes + self.segments.side_nbytes
        return dense + stored + (0 if self.store is None else self.store.device_nbytes)

    @property
    def host_nbytes(self) -> int:
        """Storage bytes in the backing store, 0 for methods without one."""
        return 0 if self.store is None else self.store.host_nbytes
