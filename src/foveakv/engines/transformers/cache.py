"""A transformers Cache whose layers store compressed keys and values.

Life cycle of a prompt: `begin_forward` receives the prompt; every layer runs `update` and `end_prefill` (dense
attention, then the method decides what to keep), and the last layer calls `end_layer`. Each later forward pass runs
`update` and `attend` (attention over stored slots). Single layers are implemented in `layer.py`.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from foveakv import kernels
from foveakv.core.prompt import PromptMap
from foveakv.engines.transformers import compat, contexts, forks, saving
from foveakv.engines.transformers.blocks import Block, BlockReport, Reads
from foveakv.engines.transformers.cache_facts import CacheFacts
from foveakv.engines.transformers.contents import Contents
from foveakv.engines.transformers.decision_checks import check_stream_layer, decisions_of_layers
from foveakv.engines.transformers.decisions import Storage
from foveakv.engines.transformers.layer import CompressedLayer
from foveakv.engines.transformers.options import CacheOptions
from foveakv.engines.transformers.placed import Placed
from foveakv.engines.transformers.preallocated import PreallocatedLayer, StepState, preallocate
from foveakv.engines.transformers.sizes import head_dim, warn_beyond_positions
from foveakv.engines.transformers.stream import Stream
from foveakv.errors import (
    CacheInUseError,
    FoveaKVError,
    PoolFullError,
    UnsupportedModeError,
    UnsupportedModelError,
)
from foveakv.memory import quantizer
from foveakv.methods.base import Method
from foveakv.methods.views import PromptEndView, PromptView, State

# What `begin_forward` changes; a pass that cannot begin leaves it as it was.
_SET_BY_BEGIN = (
    "prompt", "context", "_request", "state", "undecided", "block", "block_peak", "turn_start", "first_columns",
    "first_lengths", "last_chunk", "kinds_known", "_prefilling", "forward_tokens",
)  # fmt: skip


class CompressedCache(CacheFacts):
    """A transformers cache whose full-attention layers are compressed by a method.

    Other layers (sliding window, linear attention) are transformers' own. Create it with
    `foveakv.cache_for(model, method)`, or implicitly with `foveakv.compress`.
    """

    def __init__(self, config: Any, method: Method, options: CacheOptions | None = None) -> None:
        """Create an empty cache; config: the config of the text decoder.

        Raises:
            MethodError: an option cannot be combined with the method or the head dimensions.
            UnsupportedModelError: `preallocate` is given, and a layer has no plain attention.
        """
        options = options or CacheOptions()
        options.check(method)
        self.options = options
        self.preallocated = options.preallocated  # slots for decoded tokens; None: allocated on demand
        make = CompressedLayer if self.preallocated is None else PreallocatedLayer
        layers: list[Any] = []
        compressed_idx = 0
        for layer_idx, layer in enumerate(compat.default_layers(config)):
            if type(layer) is compat.DynamicLayer:
                layers.append(make(self, layer_idx, compressed_idx))
                compressed_idx += 1
            elif self.preallocated is None:
                layers.append(layer)
            else:
                raise UnsupportedModelError(
                    f"preallocate= needs plain attention in every layer, and layer {layer_idx} of this model has a "
                    f"{type(layer).__name__}; remove preallocate"
                )
        super().__init__(layers=layers)
        self.config = config
        self.method = method
        self.backend = options.backend
        self.max_decode_slots = options.max_decode_slots
        self.kv_dtype = options.kv_dtype
        self.residual_length = options.residual_length
        quantizer.check_dims(self.kv_dtype, head_dim(config), head_dim(config))
        self.storage = Storage(method.name, options.backend, options.kv_dtype, options.residual_length, options.pool)
        self.trace_wanted = options.trace
        self.owner: weakref.ref[Any] | None = None  # the model this cache was created for
        self.hold: Callable[[CompressedCache], Any] | None = None  # keeps the model attached while a copy exists
        self._forget()

    def _forget(self) -> None:
        self.state: State | None = None  # the method's per-request state
        self.prompt: PromptMap | None = None  # what has been compressed
        self.context: PromptMap | None = None  # the same with what later blocks stored whole
        self.block: Block | None = None  # the further block that is being read
        self.blocks: list[BlockReport] = []  # what was stored of the blocks so far
        self.block_peak = 0  # highest bytes since the newest block began
        self.turn_start = 0  # columns before it belong to earlier turns
        self.first_columns = 0  # of the first prompt
        self.first_lengths: Tensor | None = None  # tokens of each sequence of the first prompt, int64 [B]
        self.undecided = False  # the method has not begun, since it evicts visual tokens only and has seen none
        self._request: PromptView | None = None  # the complete prompt
        self.clock: StepState | None = None  # with preallocated slots, once the prompt is complete
        self.stream: Stream | None = None  # tokens kept in the residual stream during the prefill
        self.trace: list[dict[int, Tensor]] | None = [] if self.trace_wanted else None
        self.model_state: list[Any] = []  # M-RoPE offsets that some models store on themselves between calls
        self.placed = Placed()  # where the next token is, for joined decode steps
        self.contents = Contents() if self.options.saveable else None  # what was read
        self.kinds_known = True  # False: the inputs are embeddings without mm_token_type_ids
        self.forward_tokens: int | None = None
        self.last_chunk = True
        self._prefilling = False
        self.peak_nbytes = 0
        self.prefill_seconds = 0.0
        self.steps: list[tuple[int, float]] = []  # tokens and seconds of each forward pass after the prompt
        self._started = 0.0
        self._new_positions: tuple[tuple[int, int, torch.device], Tensor] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedCache:
        """Return an independent cache in the same state, for several continuations of a prompt; the model is shared."""
        return forks.copied(self, memo)

    def fork(self) -> CompressedCache:
        """Return a cache in the same state, for another continuation of the context; neither changes the other.

        With `pool=` both share all stored pages, and copy a page before they write to it (see docs/pool.md). Without a
        pool the fork is a full copy, as `copy.deepcopy` makes it. Offloaded chunks are shared in both cases.

        Raises:
            CacheInUseError: a forward pass is running, or failed.
            PoolFullError: the pool has too little memory left for positions and side fields.
        """
        return forks.fork(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cache to a file, for `foveakv.load_cache`: slots in use as they are stored, and all that goes on.

        Needs `saveable=True`. The file is keyed by the model, the version of transformers, the method, its options and
        the cache's, and by what was read. It is written as a whole or not at all.

        Raises:
            UnsupportedModeError: the cache was made without `saveable=True`, or has preallocated slots.
            CacheInUseError: the prompt is not complete, a pass failed, or the model does not exist any more.
            StoreError: the file cannot be written, or a method's state or option cannot be.
        """
        saving.save(self, path)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedModeError(
            "a compressed cache cannot be pickled: it belongs to a model of this process; use copy.deepcopy(cache) for "
            "a second cache in the same state"
        )

    def reset(self) -> None:
        """Discard the prompt; the next forward pass starts a new one."""
        super().reset()
        self._forget()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens from every layer; if one of them cannot be cropped, change nothing and raise."""
        for layer in self.compressed:
            if remove := compat.tokens_to_remove(tokens_to_remove, layer.seen):
                layer.check_crop(remove)
        self.note_peak()
        before = self.seen
        with self._changing():
            super().crop(tokens_to_remove)
        if self.context is not None and self.context.columns > self.seen:
            self.context = PromptMap(self.context.kinds[:, : self.seen], self.context.index[:, : self.seen])
        if self.contents is not None:
            self.contents.crop(self.seen)
        if self.clock is not None:
            self.clock.end(self.seen - before)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder sequences for beam search: sequence b becomes the former sequence `beam_idx[b]`."""
        with self._changing():
            super().reorder_cache(beam_idx)
            self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences `indices`."""
        with self._changing():
            super().batch_select_indices(indices)
            if self.prompt is not None:
                self._select(torch.arange(self.prompt.batch, device=indices.device)[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times."""
        with self._changing():
            super().batch_repeat_interleave(repeats)
            if self.prompt is not None:
                self._select(torch.arange(self.prompt.batch).repeat_interleave(repeats))

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Around a change of all layers: a cache that it left half-changed is refused from then on, as after a pass."""
        try:
            yield
        except BaseException as error:
            # Refusals of this library come before the change; a pool may be full in any layer.
            if isinstance(error, PoolFullError) or not isinstance(error, FoveaKVError):
                self.forward_tokens = 0
            raise

    def _select(self, index: Tensor) -> None:
        self.placed.select(index)
        if self.contents is not None:
            self.contents.select(index)
        if self.prompt is not None:
            index = index.to(self.prompt.kinds.device)
            self.prompt = self.prompt.select(index)
            self.context = None if self.context is None else self.context.select(index)
            self.first_lengths = None if self.first_lengths is None else self.first_lengths[index.cpu()]
            slots = int(self.prompt.lengths.sum())
            for layer in self.compressed:
                layer.count_sequences(slots)
        if self.clock is not None:
            self.clock.select_sequences(len(index))
        if self.state is not None:
            self.state.select_sequences(index)

    def note_peak(self, more: int = 0) -> None:
        """Update the peak with the current bytes, including dense tensors of a running prefill; call before a decrease.

        more: bytes that no layer holds at this moment, such as copies made by a method, or memory that an eviction has
        just freed (the amount is known only afterwards).
        """
        self.block_peak = max(self.block_peak, self.stored_nbytes + more)
        self.peak_nbytes = max(self.peak_nbytes, self.block_peak)

    # ---- called around every forward pass of the model

    def begin_forward(
        self,
        new: int,
        prompt: PromptMap | None,
        total: int | None,
        itemsize: int,
        batch: int | None = None,
        mask: Tensor | None = None,
        kinds_known: bool = True,
        block: Reads | None = None,
    ) -> None:
        """Prepare a forward pass.

        Args:
            new: number of new tokens.
            prompt: map of the new tokens; required until the cache is `prefilled`, and for blocks.
            total: length of the prompt if it is read in chunks, else None.
            itemsize: bytes of one key element.
            batch: number of sequences.
            mask: [B, >= new], 0 at padding; or None, or a mask that the caller prepared.
            kinds_known: False if the inputs do not say which tokens are visual.
            block: what the pass reads, if a block of a context that has further ones.

        Raises:
            CacheInUseError, UnsupportedModeError, NoVisualTokensError, MethodError: the pass cannot begin; the cache
                is as before. So it is after any other error of the method, and after an interrupt.
        """
        if self.forward_tokens is not None:
            raise CacheInUseError(
                "an earlier forward pass with this cache, or a change of its sequences, failed half way; start again "
                "with a new cache"
            )
        segments = self.compressed[0].segments
        if segments is not None and batch is not None and batch != segments.batch:
            raise CacheInUseError(f"this cache has {segments.batch} sequences, but the inputs have {batch}")
        if self.clock is not None:
            self.clock.check_room(new)
        if prompt is not None:  # before the prefill asks for the fused sums: every request then computes alike
            kernels.prepare(prompt.kinds.device, itemsize=itemsize, backend=self.backend)
        before = {name: value for name, value in vars(self).items() if name in _SET_BY_BEGIN}
        passes = None if self.trace is None else len(self.trace)
        try:
            self._prefilling = not self.prefilled
            if prompt is not None:
                self.kinds_known = self.kinds_known and kinds_known
                self.block_peak = 0 if self.prefilled else self.block_peak
                contexts.begin(self, prompt, itemsize, new, total, block, mask)
            if self.trace is not None:
                self.trace.append({})
            warn_beyond_positions(self.config, self.seen, new)
            if self.clock is not None:
                self.clock.begin(new, mask if isinstance(mask, Tensor) and mask.ndim == 2 else None)
            self._started = time.perf_counter()
            self.forward_tokens = new
        except BaseException:
            self.__dict__.update(before)
            if self.clock is not None:
                self.clock.running = False
            if self.trace is not None:
                del self.trace[passes:]
            raise

    def end_forward(self, model_state: list[Any]) -> None:
        """Finish a forward pass; `model_state` is what the model stores on itself (M-RoPE offsets)."""
        seconds = time.perf_counter() - self._started
        if self._prefilling:
            self.prefill_seconds += seconds
        else:
            self.steps.append((self.forward_tokens or 0, seconds))
            if self.clock is not None:
                self.clock.end(self.forward_tokens or 0)
                for layer in self.compressed:
                    layer.seen += self.forward_tokens or 0
        if self.block is not None or (self._prefilling and self.prefilled):
            contexts.end_block(self)
        self.model_state = model_state
        self.forward_tokens = self.block = None

    def prune_stream(self, keep: Tensor, compressed_idx: int) -> None:
        """Prune tokens from the residual stream for the layers after `compressed_idx`; keep: bool [B, C].

        The last token of a sequence is always kept, since its output is the result of the prompt.
        """
        check_stream_layer(self.method, compressed_idx)
        real = self.full_prompt.real
        last = torch.arange(real.shape[1], device=real.device).masked_fill(~real, -1).amax(-1, keepdim=True)
        keep = (keep & real).scatter(1, last.clamp_min(0), last >= 0)
        if bool((keep == real).all()):
            return
        self.stream = Stream.of(keep)

    def end_layer(self, layer: CompressedLayer) -> None:
        """Finish the prefill of one layer, which has noted the peak; after the last one, carry out `after_prefill`."""
        if layer.compressed_idx < len(self.compressed) - 1:
            return
        taken = None if self.undecided else self.method.after_prefill(PromptEndView(self.request, self.state))
        made = decisions_of_layers(self.method, taken, len(self.compressed))
        for done, decision in zip(self.compressed, made, strict=True):
            done.settle(decision)
            if self.block is None:
                done.count_prompt()
        self.note_peak()
        if self.preallocated is not None:
            self.clock = preallocate(self)

    def columns(self, compressed_idx: int) -> tuple[PromptMap, Tensor, bool]:
        """Return the prompt of a layer: its map, positions int64 [B, C], and whether tokens were pruned before it."""
        prompt, after = self.full_prompt, self.method.prunes_after
        if self.stream is not None and after is not None and compressed_idx > after:
            return prompt.take(self.stream.index, self.stream.valid), self.stream.index, True
        batch, columns = prompt.kinds.shape
        return prompt, torch.arange(columns, device=prompt.kinds.device).expand(batch, columns), False
