"""transformers' Cache contract over compressed memory and a method.

Life of a prompt: `begin_forward` (the prompt is known) -> every layer `update` + `end_prefill` (dense attention, then
the method decides what stays), the last one's `end_layer` -> any number of `update` + `attend` (attention over stored
slots). What happens inside one layer is in `layer.py`.
"""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from foveakv import kernels
from foveakv.core.budget import Geometry
from foveakv.core.prompt import PromptMap
from foveakv.engines.transformers import compat
from foveakv.engines.transformers.layer import CompressedLayer, select_tensors
from foveakv.engines.transformers.options import CacheOptions
from foveakv.engines.transformers.preallocated import Clock, PreallocatedLayer, preallocate
from foveakv.errors import (
    CacheInUseError,
    MethodError,
    NoVisualTokensError,
    UnsupportedModeError,
    UnsupportedModelError,
)
from foveakv.memory import quantizer as codes
from foveakv.methods.base import Method


class CompressedCache(compat.Cache):
    """A transformers cache whose plain attention layers are compressed by a method.

    Layers that are not plain (sliding window, linear attention) stay what transformers makes them. Make one with
    `foveakv.cache_for(model, method)`, or let `foveakv.compress` make them.
    """

    def __init__(self, config: Any, method: Method, options: CacheOptions | None = None) -> None:
        options = options or CacheOptions()
        options.check(method)
        self.options = options
        self.preallocated = options.preallocated  # decoded tokens that fit; None: slots are added as needed
        make = CompressedLayer if self.preallocated is None else PreallocatedLayer
        layers: list[Any] = []
        compressed_idx = 0
        for layer_idx, layer in enumerate(compat.plain_layers(config)):
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
        codes.check_dims(self.kv_dtype, _head_dim(config), _head_dim(config))
        self.trace_wanted = options.trace
        self.owner: weakref.ref[Any] | None = None  # the model this cache was made for
        self.hold: Callable[[CompressedCache], Any] | None = None  # keeps the model attached for a copy's sake
        self._forget()

    def _forget(self) -> None:
        self.state: dict[Any, Any] = {}  # the method's, for the whole cache
        self.prompt: PromptMap | None = None
        self.geometry: Geometry | None = None
        self.clock: Clock | None = None  # with preallocated slots, once the prompt is complete
        self.dropped: tuple[Tensor, Tensor] | None = None  # columns that stay in the residual stream: index, valid
        self.trace: list[dict[int, Tensor]] | None = [] if self.trace_wanted else None
        self.model_state: list[Any] = []  # M-RoPE offsets that some models keep on themselves between calls
        self.forward_tokens: int | None = None
        self.last_chunk = True
        self.drafted = 0  # tokens behind the prompt in the pass that completes it (assisted decoding)
        self._prefilling = False
        self.peak_nbytes = 0
        self.prefill_seconds = 0.0
        self.steps: list[tuple[int, float]] = []  # tokens and seconds of each forward pass after the prompt
        self._started = 0.0
        self._new_positions: tuple[tuple[int, int, torch.device], Tensor] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedCache:
        """A cache of its own in the same state (one prompt, several continuations); model and method are shared."""
        copied = memo[id(self)] = object.__new__(type(self))
        with torch.inference_mode(False):  # copies made under inference_mode must be usable outside
            for name, value in vars(self).items():
                shared = name in ("config", "method", "owner", "hold", "options")
                setattr(copied, name, value if shared else copy.deepcopy(value, memo))
        for layer in copied.compressed:
            layer._cache = weakref.ref(copied)
        if copied.hold is not None:
            copied.hold(copied)
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedModeError(
            "a compressed cache cannot be pickled: it belongs to a model of this process; use copy.deepcopy(cache) for "
            "a second cache in the same state"
        )

    def reset(self) -> None:
        """Forgets the prompt; the next forward pass begins a new one."""
        super().reset()
        self._forget()

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the newest tokens in every layer, or raises and changes nothing."""
        for layer in self.compressed:
            if remove := compat.tokens_to_remove(tokens_to_remove, layer.seen):
                layer.check_crop(remove)
        self.note_peak()
        before = self.seen
        super().crop(tokens_to_remove)
        if self.clock is not None:
            self.clock.end(self.seen - before)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: sequence b continues what `beam_idx[b]` has; every side tensor follows."""
        super().reorder_cache(beam_idx)
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        if self.prompt is not None:
            self._select(torch.arange(self.prompt.batch, device=indices.device)[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.prompt is not None:
            self._select(torch.arange(self.prompt.batch).repeat_interleave(repeats))

    def _select(self, index: Tensor) -> None:
        if self.prompt is not None:
            self.prompt = self.prompt.select(index.to(self.prompt.kinds.device))
        if self.clock is not None:
            self.clock.select_sequences(len(index))
        select_tensors(self.state, index)

    def kept(self, layer: int) -> Tensor:
        """Positions that model layer `layer` can attend to: LongTensor [B, H, M], ascending, -1 behind the last.

        Those stored, and of the chunks that are read from a store those of the last step.
        """
        if not 0 <= layer < len(self.layers) or not isinstance(self.layers[layer], CompressedLayer):
            numbers = [done.layer_idx for done in self.compressed]
            raise MethodError(f"layer {layer} is not compressed; compressed layers: {numbers}")
        kept: Tensor = self.layers[layer].kept()
        return kept

    @property
    def compressed(self) -> list[CompressedLayer]:
        """The compressed layers, in model order."""
        return [layer for layer in self.layers if isinstance(layer, CompressedLayer)]

    @property
    def seen(self) -> int:
        """Tokens in the context so far, padding included."""
        return self.compressed[0].seen

    @property
    def prefilled(self) -> bool:
        """Whether the prompt is complete and compressed."""
        return self.compressed[-1].segments is not None

    @property
    def prompt_columns(self) -> int:
        """Width of the prompt; no padding is stored below it."""
        return self.full_prompt.kinds.shape[1]

    @property
    def full_prompt(self) -> PromptMap:
        if self.prompt is None:
            raise CacheInUseError("this cache has not seen a prompt yet")
        return self.prompt

    @property
    def stored_nbytes(self) -> int:
        """Storage bytes on the compute device, all layers (those that transformers keeps included)."""
        return sum(layer_nbytes(layer) for layer in self.layers)

    def note_peak(self, more: int = 0) -> None:
        """Records the present bytes, a running prefill's dense tensors included; called before they fall.

        more: bytes that no layer holds at this moment: what a method's own copies take, or what an eviction has just
        freed (whether it frees memory is known only once it is done).
        """
        self.peak_nbytes = max(self.peak_nbytes, self.stored_nbytes + more)

    def new_positions(self, seen: int, new: int, device: torch.device) -> Tensor:
        """int32 [1, new], the positions of the newest tokens; made once for all layers of a forward pass."""
        if self._new_positions is None or self._new_positions[0] != (seen, new, device):
            made = torch.arange(seen - new, seen, dtype=torch.int32, device=device)[None]
            self._new_positions = (seen, new, device), made
        return self._new_positions[1]

    # ---- called around every forward pass of the model

    def begin_forward(
        self,
        new: int,
        prompt: PromptMap | None,
        total: int | None,
        itemsize: int,
        batch: int | None = None,
        mask: Tensor | None = None,
    ) -> None:
        """Before a forward pass over `new` tokens.

        `prompt` describes them and is needed until the cache is `prefilled`; `total` is the length of a prefill that
        comes in chunks or together with drafted tokens, None for one that comes whole and alone; `itemsize` is the
        bytes of one key element; `mask` [B, >= new] is 0 at padding and read with preallocated slots only.
        """
        if self.forward_tokens is not None:
            raise CacheInUseError(
                "an earlier forward pass with this cache failed half-way; start again with a new cache"
            )
        segments = self.compressed[0].segments
        if segments is not None and batch is not None and batch != segments.batch:
            raise CacheInUseError(f"this cache holds {segments.batch} sequences and got {batch}")
        if self.clock is not None:
            self.clock.check_room(new)
        if prompt is not None and self.preallocated is None:
            kernels.prepare(prompt.kinds.device, itemsize=itemsize, backend=self.backend)
        self._prefilling = not self.prefilled
        if prompt is not None and self._prefilling:
            self.last_chunk = total is None or self.seen + new >= total
            self.drafted = 0 if total is None else max(0, self.seen + new - total)
            before = self.prompt
            try:
                self._take_prompt(prompt.crop(new - self.drafted), itemsize)
            except Exception:
                self.prompt, self.geometry = before, None  # as if this call had never been made
                self.state.clear()
                raise
        if self.trace is not None:
            self.trace.append({})
        if self.clock is not None:
            self.clock.begin(new, mask)
        self.forward_tokens = new
        self._started = time.perf_counter()

    def _take_prompt(self, prompt: PromptMap, itemsize: int) -> None:
        method = self.method
        self.prompt = prompt if self.prompt is None else self.prompt.concat(prompt)
        if method.drop_hidden_after is not None and (self.drafted or not self.last_chunk):
            raise UnsupportedModeError(
                f"{method.name} with drop_hidden_states needs the whole prompt at once and nothing else; remove "
                "prefill_chunk_size, and generate without an assistant"
            )
        if not self.last_chunk:
            return
        self.geometry = self._measure(itemsize)
        if method.visual_only and not bool(self.prompt.visual.any()):
            raise NoVisualTokensError(
                f"{method.name} drops visual tokens only, and this prompt has no image or video; add one, or use "
                "snapkv, h2o or streaming for text"
            )
        method.begin(self)

    def end_forward(self, model_state: list[Any]) -> None:
        """After the forward pass; `model_state` is what the model keeps on itself (M-RoPE offsets)."""
        seconds = time.perf_counter() - self._started
        if self._prefilling:
            self.prefill_seconds += seconds
        else:
            self.steps.append((self.forward_tokens or 0, seconds))
            if self.clock is not None:
                self.clock.end(self.forward_tokens or 0)
                for layer in self.compressed:
                    layer.seen += self.forward_tokens or 0
        self.model_state = model_state
        self.forward_tokens = None

    def drop_hidden(self, keep: Tensor) -> None:
        """Takes tokens out of the residual stream for the layers after this one; keep: bool [B, C] over the prompt.

        Rows that keep fewer tokens than the widest are filled at the left, so that the last token stays last.
        """
        width = int(keep.sum(-1).max())
        order = keep.to(torch.int8).argsort(dim=-1, stable=True)  # dropped first, kept last, both in order
        index = order[:, -width:]
        self.dropped = index, keep.gather(1, index)

    def end_layer(self, layer: CompressedLayer) -> None:
        """One layer's prefill is done."""
        self.note_peak()
        if layer.compressed_idx == len(self.compressed) - 1:
            self.method.after_prefill(self)
            for done in self.compressed:
                offloaded = sum(memory.extra_slots for memory in done.extra_memory)
                done.counts.add(evicted=done.prompt_slots - done.stored_slots - offloaded)
                done.store_drafts()
            self.note_peak()
            if self.preallocated is not None:
                self.clock = preallocate(self)

    def columns(self, compressed_idx: int) -> tuple[PromptMap, Tensor]:
        """The prompt as this layer sees it: [B, C] map and logical positions."""
        prompt = self.full_prompt
        after = self.method.drop_hidden_after
        if self.dropped is not None and after is not None and compressed_idx > after:
            index, valid = self.dropped
            return prompt.take(index, valid), index
        batch, columns = prompt.kinds.shape
        return prompt, torch.arange(columns, device=prompt.kinds.device).expand(batch, columns)

    def _measure(self, itemsize: int) -> Geometry:
        config, prompt = self.config, self.full_prompt
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim = _head_dim(config)
        return Geometry(
            batch=len(prompt.kinds), contexts=prompt.lengths.cpu(), layers=len(self.compressed), kv_heads=heads,
            head_dim=dim, value_dim=dim, itemsize=itemsize,
        )  # fmt: skip


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def layer_nbytes(layer: Any) -> int:
    """Storage bytes of one cache layer on the compute device, ours or transformers'; each storage counts once."""
    if isinstance(layer, CompressedLayer):
        return layer.device_nbytes
    fields = vars(layer).values()
    states = [state for value in fields if isinstance(value, dict) for state in value.values()]  # linear attention's
    tensors = [value for value in (*fields, *states) if isinstance(value, Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
