"""The interface between methods and engines: views that methods receive, and decisions that they return.

A method has no access to the cache. The engine (`foveakv.engines`) passes it views, which are dataclasses of tensors
and read-only facts, and carries out the `Decision` that it returns.

Notation: B sequences, L compressed layers, H KV heads, G query heads per KV head (Hq = H * G), C prompt columns, D and
Dv key and value dimensions, q new tokens, M the most slots that a head stores, P the most offloaded chunks of a head, T
tokens per chunk, n the length of an index tensor (see each function). A slot is the key and value of one token in one
KV head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor

from foveakv.core.budget import Geometry, parse_budget
from foveakv.core.fused_columns import Fused, WholeColumns
from foveakv.core.prompt import PromptMap
from foveakv.methods.slots import Chunks as Chunks
from foveakv.methods.slots import Slots as Slots

Granularity = Literal["token", "layer", "head"]
"""How finely the stored tokens may differ. "token": all layers and heads store the same tokens. "layer": all heads of a
layer store the same tokens. "head": every head of every layer stores its own tokens."""

When = Literal["prefill", "after_prefill", "decode", "read"]
"""The hooks of `Method` that make decisions."""

Further = Literal["context", "block", "keep"]
"""What happens to a further block: tokens that are read at once after the first prompt (a turn, a prefill chunk, a
group of frames). "context": the method decides anew over the stored slots and the block. "block": it sees the block
alone, as a prompt of its own, and earlier slots stay. "keep": the block is stored whole."""


@dataclass(frozen=True)
class Observes:
    """What a method reads in addition to the keys and values of the prompt.

    Args:
        queries: the prompt's query rows that `prefill` reads: none, a window at its end, the text rows, or all.
        attention_sum: the attention sum of every slot in each decode step.
        steps: every decode step; `decode` is called even if the method never evicts while decoding.
        second_pass: the queries of a second pass, in which the model reads the whole prompt again after itself.
            `prefill` is then called during that pass, and `view.repeated` has its queries.
    """

    queries: Literal["none", "window", "text", "all"] = "none"
    attention_sum: bool = False
    steps: bool = False
    second_pass: bool = False


# ---- per-request state


@dataclass
class State:
    """Base class of a method's per-request state. The method creates it in `begin`, and the engine stores it.

    Subclasses are dataclasses. All tensors in their fields, including those in lists, tuples and dicts, have shape
    [B, ...] and are reordered with the batch automatically (beam search).
    """

    def select_sequences(self, index: Tensor) -> None:
        """Select sequences: sequence i becomes the former sequence index[i]; index: int64 [B']."""
        for each in fields(self):
            setattr(self, each.name, _selected(getattr(self, each.name), index))

    @property
    def nbytes(self) -> int:
        """Storage bytes of all tensors of the state; shared storage counts once."""
        memory = (tensor.untyped_storage() for tensor in _tensors(self))
        return sum({each.data_ptr(): each.nbytes() for each in memory}.values())


def _selected(value: Any, index: Tensor) -> Any:
    if isinstance(value, Tensor):
        return value.index_select(0, index.to(value.device))
    if isinstance(value, State):
        value.select_sequences(index)
        return value
    if type(value) in (list, tuple):
        return type(value)(_selected(each, index) for each in value)
    if type(value) is dict:
        return {key: _selected(each, index) for key, each in value.items()}
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, State):
        yield from _tensors([getattr(value, each.name) for each in fields(value)])
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


# ---- views


@dataclass
class PromptView:
    """The complete prompt, before the first layer processes it, and the sizes of the cache.

    For a further block it describes the whole context so far (decoded tokens are text), or with `Method.further` ==
    "block" the block alone.

    prompt: map of the columns, [B, C]. geometry: batch, context lengths, layers, heads, dimensions. layers: the model's
    indices of the L compressed layers. decoder_layers: number of all decoder layers, compressed or not. block_start:
    column of `prompt` at which the newest block begins, 0 for a first prompt.
    """

    prompt: PromptMap
    geometry: Geometry
    layers: tuple[int, ...]
    decoder_layers: int
    block_start: int = 0
    _tokens: dict[Any, Tensor] = field(default_factory=dict, repr=False)

    @property
    def protected(self) -> Tensor:
        """Tokens of earlier blocks that options of the cache keep in addition to the budget, mostly text: int64 [B]."""
        return self.prompt.lengths - torch.as_tensor(self.geometry.contexts, device=self.prompt.kinds.device)

    def budget_tokens(self, budget: float | int | str, *, steady: bool = False) -> Tensor:
        """Return the tokens per KV head that a budget allows each sequence: int64 [B], on the prompt's device.

        steady: for methods that evict while decoding; the result may exceed the prompt, see `Budget.steady`.

        Raises:
            BudgetError: the budget is invalid, or its bytes do not hold one token per head.
        """
        key = type(budget), budget, steady  # 1 is a token and 1.0 everything, and they are equal
        if key not in self._tokens:
            parsed = parse_budget(budget)
            tokens = parsed.steady(self.geometry) if steady else parsed.tokens(self.geometry)
            self._tokens[key] = tokens.to(self.prompt.kinds.device)
        return self._tokens[key]

    def budget_slots(self, budget: float | int | str) -> Tensor:
        """Return the slots over all layers and heads that a budget allows each sequence: int64 [B], on the CPU.

        Raises:
            BudgetError: as in `budget_tokens`.
        """
        return parse_budget(budget).slots(self.geometry)


@dataclass
class LayerView:
    """Base class of the views of one layer.

    layer_idx: the model's index of the layer. compressed_idx: its index among the compressed layers, from 0. query: [B,
    Hq, q, D], after RoPE; query heads h * G ... h * G + G - 1 read KV head h. scaling: the factor of q . k. request:
    the complete prompt. state: what `begin` returned.
    """

    layer_idx: int
    compressed_idx: int
    query: Tensor
    scaling: float
    request: PromptView
    state: Any

    def budget_tokens(self, budget: float | int | str, *, steady: bool = False) -> Tensor:
        """Return the tokens per KV head that a budget allows each sequence; see `PromptView.budget_tokens`."""
        return self.request.budget_tokens(budget, steady=steady)


@dataclass
class Repeated:
    """One layer of a second pass, in which row c reads the token of prompt column c again, after the whole prompt.

    query: [B, Hq, C, D]. keys: [B, H, C, D], keys of the second pass. Row c attends to all real prompt columns and to
    columns 0 ... c of these keys.
    """

    query: Tensor
    keys: Tensor


@dataclass
class PrefillView(LayerView):
    """One layer at the end of its prefill, before anything is evicted.

    `keys` [B, H, C, D] (after RoPE) and `values` [B, H, C, Dv] are dense. Column c of sequence b is token
    `positions[b, c]` (int64), and `prompt` describes the same C columns. `query` has C rows too, or only the rows of
    the last chunk of a chunked prefill if `needs_queries` is False. `visible` returns the attention mask of some query
    rows (columns int64 [B, n] -> bool [B, 1 or H, n, C]); None means plain causal attention without padding. `pruned`:
    whether tokens were pruned from the residual stream before this layer, so that C may be smaller than the prompt.
    `repeated`: the second pass, for methods that observe one. `fused`: for `foveakv.core.attention_stats`.

    For a further block, the columns are all tokens that any head of the layer stores, in ascending order, followed by
    the block: the last q columns, from `block_start` on. A sequence with fewer tokens has padding before its block.
    Keys and values are zeros where a head does not store a token. `query` has the rows of the block only. `stored`,
    bool [B, 1 or H, C]: what each head may keep, its stored slots and the block's real tokens; None for a first prompt.
    `visible` hides everything else. `fields`: the values of per-slot fields of stored slots, 0 for the block,
    [B, H, C] each. Afterwards slots are stored in the order of tokens.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    prompt: PromptMap
    visible: Callable[[Tensor], Tensor] | None
    pruned: bool = False
    repeated: Repeated | None = None
    fused: Fused | WholeColumns | None = None
    stored: Tensor | None = None
    block_start: int = 0
    fields: dict[str, Tensor] = field(default_factory=dict)

    @property
    def candidates(self) -> Tensor:
        """What each head may keep: bool [B, 1 or H, C]. Rank and count these columns only."""
        real = self.prompt.real[:, None]
        return real if self.stored is None else self.stored & real

    @property
    def first_row(self) -> int:
        """The column of the first query row: `query` has the rows of the last q columns."""
        return self.keys.shape[2] - self.query.shape[2]


@dataclass
class PromptEndView:
    """The end of the prompt, after the last layer. request: the complete prompt. state: what `begin` returned."""

    request: PromptView
    state: Any


@dataclass
class DecodeView(LayerView):
    """One layer after the attention of a decode step (or of a later turn's q > 1 tokens); the new slots are stored.

    `attention_sum` [B, H, M] is the attention that every slot received in this step, summed over the query group and
    the q queries; None unless the method observes it. `seen` is the number of tokens in the context, the new ones
    included.
    """

    slots: Slots
    seen: int
    attention_sum: Tensor | None = None


@dataclass
class ReadView(LayerView):
    """One layer with offloaded chunks, before the attention of a decode step. `seen` as in `DecodeView`."""

    chunks: Chunks
    seen: int


@dataclass
class ResultView:
    """The data that `results` may use.

    request: the complete prompt. state: what `begin` returned. digest_bytes: bytes of all digests. choosing_heads:
    number of (sequence, KV head) pairs that select chunks in every step, over all layers.
    """

    request: PromptView
    state: Any
    digest_bytes: int = 0
    choosing_heads: int = 0


# ---- decisions


@dataclass(frozen=True)
class Evict:
    """Eviction of individual slots, in O(evicted).

    slots: int64 [B, H or 1, n], distinct within a head; the first counts[b] of the n entries are evicted from every
    head of sequence b. An int stands for the same slot in all heads and sequences. The last slots of a head move into
    the freed slots, so slots are then no longer in the order of tokens, and the method must use positions.
    """

    slots: Tensor | int
    counts: list[int]


@dataclass(frozen=True)
class Field:
    """A per-slot value that the engine stores for the method.

    values: [B, H, C], values of the view's columns; None = zeros, or in a further block the values that stored slots
    have and zeros for the block. New slots start at 0.
    """

    values: Tensor | None = None
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Offload:
    """Offload of some heads' complete chunks to a store, with one digest each; a step reads `Decision.chunks`.

    In a further block, the complete chunks of the heads' candidates are added to their stores.

    heads: bool [B, H]. chunk: tokens per chunk, real tokens in column order (T). place: "host", "device" or "disk".
    directory: directory of the file, for "disk". summary: kind of digest, "mean" of the chunk's keys or "bounds" of
    their channels. digest_dtype: "model", "bf16", "int8" or "int4".
    """

    heads: Tensor
    chunk: int
    place: Literal["host", "device", "disk"] = "host"
    directory: str | None = None
    summary: Literal["mean", "bounds"] = "mean"
    digest_dtype: Literal["model", "bf16", "int8", "int4"] = "model"


@dataclass
class Decision:
    """What to do with one layer. The defaults change nothing.

    Args:
        keep: bool, False = evict. From `prefill`, over the columns of the layer's view, from `after_prefill` over all
            columns of the prompt (for a further block, over the columns of that layer's view): [B, H, C] or [B, 1, C].
            From `decode`, over the stored slots: [B, H, M] or [B, 1, M]. Padding is never kept, nor what a head does
            not store.
        evict: individual slots to evict, from `decode`.
        keys, values: replacements of the view's dense keys and values (merging), of the same shape and dtype.
        fields: per-slot values by name, from `prefill`.
        offload: chunks to offload. `keep` must leave their tokens out in heads that read them, and `chunks` must
            follow, in the same decision or in that of `after_prefill`.
        chunks: int64 [B, H], the number of offloaded chunks that every step reads; decided once per layer and block.
        earlier: from `prefill`, one decision for each compressed layer before this one, with `keep` over the same
            columns as from `after_prefill` and nothing else. For methods that decide in a later layer; until then those
            layers store what they were told to, so the peak grows with the index of the layer.
        stream: bool [B, C], tokens to keep in the residual stream for the layers after `Method.prunes_after`; from
            `prefill` of a first prompt. The last token of a sequence is always kept, since its output is the result of
            the prompt.
        restored: for the report, from `decode`: slots that were marked for eviction and are kept.
        flushes: for the report, from `decode`: flushes of a recycle bin.
    """

    keep: Tensor | None = None
    evict: Evict | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    fields: dict[str, Field] = field(default_factory=dict)
    offload: Offload | None = None
    chunks: Tensor | None = None
    earlier: Sequence[Decision] | None = None
    stream: Tensor | None = None
    restored: int = 0
    flushes: int = 0
