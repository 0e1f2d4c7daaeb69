"""What a method sees of a request, and what it decides.

A method never holds a cache. The engine (`foveakv.engines`) shows it views, plain data classes of tensors and read-only
facts, and carries out the `Decision` that it returns.

Notation: B sequences, L compressed layers, H KV heads, G query heads per KV head (Hq = H * G), C prompt columns, D and
Dv key and value dimensions, q new tokens, M the most slots that a head stores. A slot is the key and value of one token
in one KV head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from foveakv.core.budget import Geometry, parse_budget
from foveakv.core.prompt import PromptMap

Granularity = Literal["token", "layer", "head"]
"""Which slots may differ: "token": all layers and heads store the same tokens; "layer": all heads of a layer do;
"head": every head of every layer stores its own."""

When = Literal["prefill", "after_prefill", "decode", "read"]


@dataclass(frozen=True)
class Observes:
    """What a method reads beyond the keys and values of the prompt.

    queries: the prompt's query rows that `prefill` reads: none, a window at its end, the text rows, or all.
    attention_sum: what every slot receives in each decode step.
    steps: every decode step (`decode` is called even when the method evicts nothing there).
    second_pass: the queries of a second pass, in which the model reads the whole prompt again behind itself. `prefill`
        is then called during that pass, and `view.repeated` holds its queries.
    """

    queries: Literal["none", "window", "text", "all"] = "none"
    attention_sum: bool = False
    steps: bool = False
    second_pass: bool = False


# ---- per-request state


@dataclass
class State:
    """What a method remembers of one request. The method makes it in `begin`, the engine keeps it.

    Subclasses are data classes. Tensors in their fields are [B, ...], also those inside lists, tuples and dicts, and
    follow every reordering of the batch (beam search) by themselves.
    """

    def select_sequences(self, index: Tensor) -> None:
        """Sequence i becomes the former sequence index[i]; index int64 [B']."""
        for each in fields(self):
            setattr(self, each.name, _selected(getattr(self, each.name), index))

    @property
    def nbytes(self) -> int:
        """Storage bytes of all tensors of the state; each storage counts once."""
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
    """The whole prompt, before its first layer is read, and the sizes of the cache.

    prompt: what every column is, [B, C]. geometry: batch, context lengths, layers, heads, dimensions. layers: the
    model's indices of the L compressed layers. decoder_layers: all layers of the decoder, compressed or not.
    """

    prompt: PromptMap
    geometry: Geometry
    layers: tuple[int, ...]
    decoder_layers: int
    _tokens: dict[Any, Tensor] = field(default_factory=dict, repr=False)

    def budget_tokens(self, budget: float | int | str, *, steady: bool = False) -> Tensor:
        """Tokens per KV head that a budget allows each sequence: int64 [B], on the prompt's device.

        With `steady`, for methods that evict while decoding, it may exceed the prompt; see `Budget.steady`.
        """
        key = budget, steady
        if key not in self._tokens:
            parsed = parse_budget(budget)
            tokens = parsed.steady(self.geometry) if steady else parsed.tokens(self.geometry)
            self._tokens[key] = tokens.to(self.prompt.kinds.device)
        return self._tokens[key]

    def budget_slots(self, budget: float | int | str) -> Tensor:
        """Slots over all layers and heads that a budget allows each sequence: int64 [B], on the CPU."""
        return parse_budget(budget).slots(self.geometry)


@dataclass
class LayerView:
    """What all views of one layer share.

    layer_idx: the model's index of the layer. compressed_idx: its index among the compressed layers, from 0. query: [B,
    Hq, q, D], after RoPE; query heads h * G ... h * G + G - 1 read KV head h. scaling: the factor of q . k. request:
    facts about the whole prompt. state: what `begin` returned.
    """

    layer_idx: int
    compressed_idx: int
    query: Tensor
    scaling: float
    request: PromptView
    state: Any

    def budget_tokens(self, budget: float | int | str, *, steady: bool = False) -> Tensor:
        """Tokens per KV head that a budget allows each sequence: int64 [B]; see `PromptView.budget_tokens`."""
        return self.request.budget_tokens(budget, steady=steady)


@dataclass
class Repeated:
    """One layer of a second pass, in which row c reads the token of prompt column c again, after the whole prompt.

    query: [B, Hq, C, D]. keys: [B, H, C, D], what the pass itself adds: row c attends to all real prompt columns and to
    columns 0 ... c of these.
    """

    query: Tensor
    keys: Tensor


@dataclass
class PrefillView(LayerView):
    """One layer at the end of its prefill, before anything is evicted.

    `keys` [B, H, C, D] (after RoPE) and `values` [B, H, C, Dv] are dense; column c of sequence b is token
    `positions[b, c]` (int64), and `prompt` describes the same C columns. `query` has C rows too, or the rows of the
    last chunk only when the prefill came in chunks and the method does not ask for more in `needs_queries`. `visible`
    gives the attention mask of some query rows (int64 [B, n] of columns -> bool [B, 1, n, C]); None means plain causal
    attention without padding. `pruned`: tokens have left the residual stream before this layer, so that C may be
    smaller than the prompt. `repeated`: the second pass, for methods that observe one.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    prompt: PromptMap
    visible: Callable[[Tensor], Tensor] | None
    pruned: bool = False
    repeated: Repeated | None = None


@dataclass
class PromptEndView:
    """All layers of the prompt have been read. request: facts about the prompt; state: what `begin` returned."""

    request: PromptView
    state: Any


class Slots(Protocol):
    """The slots that one layer stores, with a method's own values per slot (fields).

    "Padded" tensors are [B, H, M]; entries at or beyond a head's length mean nothing. Slots are stored in the order of
    tokens, until a decision evicts single slots (`Evict`); who needs the order of tokens reads positions.
    """

    @property
    def batch(self) -> int: ...

    @property
    def heads(self) -> int: ...

    @property
    def max_length(self) -> int:
        """M."""

    @property
    def lengths(self) -> Tensor:
        """int64 [B, H] on the CPU."""

    @property
    def sequence_lengths(self) -> list[int]:
        """[B], the lengths of the first heads, for methods whose heads store equally many."""

    @property
    def device(self) -> torch.device: ...

    @property
    def uniform(self) -> bool:
        """Whether all heads of all sequences store M slots."""

    def positions(self) -> Tensor:
        """[B, H, M] integers, -1 beyond a head's length; read-only."""

    def valid(self) -> Tensor:
        """bool [B, H, M]: where a slot is stored."""

    def keys(self) -> Tensor:
        """[B, H, M, D], zeros beyond a head's length: a copy, for analyses."""

    def field(self, name: str) -> Tensor:
        """[B, H, M], read-only."""

    def add(self, name: str, amounts: Tensor) -> None:
        """Adds amounts [B, H, M] to a field."""

    def put(self, name: str, slots: Tensor, counts: list[int], value: float) -> None:
        """Sets a field at single slots; slots [B, H or 1, n] and counts as in `Evict`."""

    def set_field(self, name: str, padded: Tensor) -> None:
        """Replaces a field by padded [B, H, M]."""

    def add_and_find(
        self,
        name: str,
        amounts: Tensor,
        low: list[int],
        high: list[int],
        *,
        per_head: bool,
        by_position: bool,
        mark: str | None = None,
    ) -> Tensor | None:
        """`add`, and the lowest value of every group in the same pass: int64 [B, H or 1, 1]; None = not available here.

        A group is a head, or without `per_head` a sequence, whose heads' values are summed. Candidates are the slots
        from `low` on, below `high` (one of each per group), counted by position or by slot. mark: a bool field; marked
        slots are no candidates, and the one that is found becomes marked. Where it returns None nothing was added.
        """


@dataclass
class DecodeView(LayerView):
    """One layer after the attention of a decode step (or of a later turn's q > 1 tokens); the new slots are stored.

    `attention_sum` [B, H, M] is what every slot received in this step, summed over the query group and the q queries;
    None unless the method observes it. `seen` counts all tokens of the context, the new ones included.
    """

    slots: Slots
    seen: int
    attention_sum: Tensor | None = None


class Chunks(Protocol):
    """The offloaded chunks of one layer; n rows are the (sequence, KV head) pairs that choose among theirs."""

    def relevance(self, query: Tensor, scaling: float) -> Tensor:
        """[n, P] for query [B, Hq, q, D]: log of the maximum over queries of the softmax over chunks of q . digest."""


@dataclass
class ReadView(LayerView):
    """One layer with offloaded chunks, before the attention of a decode step. `seen` as in `DecodeView`."""

    chunks: Chunks
    seen: int


@dataclass
class ResultView:
    """What `results` may use: the request, the state, and facts about offloaded chunks.

    digest_bytes: bytes of all digests. choosing_heads: (sequence, KV head) pairs that choose chunks in every step, over
    all layers.
    """

    request: PromptView
    state: Any
    digest_bytes: int = 0
    choosing_heads: int = 0


# ---- decisions


@dataclass(frozen=True)
class Evict:
    """Single slots to evict, in time proportional to their number and not to what is stored.

    slots: int64 [B, H or 1, n], distinct in a head; sequence b loses the first counts[b] of its n entries in every
    head. A number names the same slot everywhere. The last slots of a head move into the holes, so that slots are no
    longer in the order of tokens: a method that evicts this way goes by positions.
    """

    slots: Tensor | int
    counts: list[int]


@dataclass(frozen=True)
class Field:
    """One value per slot that the engine stores beside it. values: [B, H, C] over the prompt's columns; None: zeros.

    New slots start at 0.
    """

    values: Tensor | None = None
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Offload:
    """Complete chunks of some heads move to a store with one digest each; `Decision.chunks` says how many are read.

    heads: bool [B, H]. chunk: tokens per chunk, real tokens in column order. place: "host", "device" or "disk".
    directory: of the file, for "disk". summary: the digest, "mean" of the chunk's keys or "bounds" of their channels.
    digest_dtype: "model", "bf16" or "int8".
    """

    heads: Tensor
    chunk: int
    place: Literal["host", "device", "disk"] = "host"
    directory: str | None = None
    summary: Literal["mean", "bounds"] = "mean"
    digest_dtype: Literal["model", "bf16", "int8"] = "model"


@dataclass
class Decision:
    """What is to be done with one layer. The defaults keep everything as it is.

    keep: bool. From `prefill` and `after_prefill` it is over the prompt columns that the layer's view showed, [B, H, C]
        or [B, 1, C]; from `decode` over the stored slots, [B, H, M] or [B, 1, M]. False = evict. Padding is never kept.
    evict: single slots, from `decode`.
    keys, values: replace the dense keys and values of the view (merging); new tensors of the same shape and dtype.
    fields: values per slot, by name, from `prefill`.
    offload: chunks that move to a store, besides what `keep` keeps on the device.
    chunks: int64 [B, H], offloaded chunks that every step reads, of a layer that has a store.
    stream: bool [B, C], tokens that stay in the residual stream for the layers after `Method.prunes_after`. A
        sequence's last token stays in any case, since its output is the prompt's result.
    restored, flushes: for the report, slots that were marked for eviction and stay, and flushes of a recycle bin.
    """

    keep: Tensor | None = None
    evict: Evict | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    fields: dict[str, Field] = field(default_factory=dict)
    offload: Offload | None = None
    chunks: Tensor | None = None
    stream: Tensor | None = None
    restored: int = 0
    flushes: int = 0
