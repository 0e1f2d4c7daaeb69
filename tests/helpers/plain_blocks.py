"""A context of several blocks over plain tensors: what each head of each layer stores, as masks over all tokens.

`Context.read` shows a method the next block as views are defined and carries out its decisions. Keys of tokens that a
head does not store are zeros, or noise on request: they must not matter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foveakv.core.budget import Geometry
from foveakv.core.prompt import IMAGE, PAD, TEXT, PromptMap
from foveakv.methods import Decision, Method, ModelFacts, PrefillView, PromptEndView, PromptView

LAYERS, HEADS, GROUP, DIM = 4, 2, 2, 8
SCALING = DIM**-0.5


def kinds_of(*rows: str) -> PromptMap:
    """t = text, i = image, . = padding."""
    codes = {"t": TEXT, "i": IMAGE, ".": PAD}
    return PromptMap(torch.tensor([[codes[each] for each in row] for row in rows], dtype=torch.int8))


@dataclass
class Context:
    """stored: bool [B, H, N] of every layer; fields: name -> [B, H, N] of every layer; decided: of the last block."""

    prompt: PromptMap
    noise: float = 0.0
    seed: int = 0
    seen: int = 0
    state: Any = None
    method: Any = None
    request: Any = None
    layers: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    stored: list[Tensor] = field(default_factory=list)
    offloaded: list[Tensor] = field(default_factory=list)
    chunks: list[Tensor] = field(default_factory=list)
    fields: list[dict[str, Tensor]] = field(default_factory=list)
    views: list[PrefillView] = field(default_factory=list)

    def __post_init__(self) -> None:
        g, (batch, n) = torch.Generator().manual_seed(self.seed), self.prompt.kinds.shape

        def rows(heads: int) -> Tensor:
            return torch.randn(batch, heads, n, DIM, generator=g, dtype=torch.float64)

        self.layers = [(2 * rows(HEADS * GROUP), rows(HEADS), rows(HEADS)) for _ in range(LAYERS)]
        nothing = torch.zeros(batch, HEADS, n, dtype=torch.bool)
        self.stored = [nothing.clone() for _ in range(LAYERS)]
        self.offloaded = [nothing.clone() for _ in range(LAYERS)]
        self.chunks = [torch.zeros(batch, HEADS, dtype=torch.int64) for _ in range(LAYERS)]
        self.fields = [{} for _ in range(LAYERS)]

    def read(self, method: Method, tokens: int) -> None:
        """Read the next block of `tokens` columns."""
        start, self.seen = self.seen, self.seen + tokens
        whole = self._part(self.seen)
        geometry = Geometry(whole.batch, whole.lengths, LAYERS, HEADS, DIM, DIM, 8)
        self.request = PromptView(whole, geometry, tuple(range(LAYERS)), LAYERS, start)
        if start == 0:
            self.method = method.for_model(ModelFacts(tuple(range(LAYERS)), LAYERS, "plain", lambda: "0" * 64))
            self.state = self.method.begin(self.request)
        else:
            self.state = self.method.continue_context(self.request, self.state)
        self.views = []
        for idx in range(LAYERS):
            self.stored[idx][:, :, start : self.seen] = whole.real[:, None, start:]
            view = self.view(idx, start)
            self.views.append(view)
            decision = self.method.prefill(view) or Decision()
            for name, each in decision.fields.items():
                old = self.fields[idx].get(name, torch.zeros(self.stored[idx].shape, dtype=each.dtype))
                if each.values is not None:
                    b, h, c = view.candidates.expand(each.values.shape).nonzero(as_tuple=True)
                    old[b, h, view.positions[b, c]] = each.values[b, h, c].to(old.dtype)
                self.fields[idx][name] = old
            self._carry_out(idx, decision)
            for number, each in enumerate(decision.earlier or []):
                self._carry_out(number, each)
        taken = self.method.after_prefill(PromptEndView(self.request, self.state))
        for idx, decision in enumerate(taken or []):
            self._carry_out(idx, decision)

    def view(self, idx: int, start: int) -> PrefillView:
        """The view of a layer once the block's tokens are stored."""
        query, keys, values = (t[:, :, : self.seen] for t in self.layers[idx])
        shared, whole = (idx, idx), self._part(self.seen)
        if start == 0:
            index = torch.arange(self.seen).expand(whole.batch, -1)
            return PrefillView(
                *shared, query, SCALING, self.request, self.state, keys, values, index, whole, _visible(whole.real)
            )
        stored = self.stored[idx][..., : self.seen]
        present = stored.any(1)
        present[:, start:] = True
        width = int(present.sum(-1).max())
        order = present.to(torch.int8).argsort(dim=-1, stable=True)[:, self.seen - width :]  # filler comes first
        filled = present.gather(1, order)
        held = stored.gather(2, order[:, None].expand(-1, HEADS, -1)) & filled[:, None]
        index = order[:, None, :, None].expand(-1, HEADS, -1, DIM)
        generator = torch.Generator().manual_seed(7)
        keys, values = (
            torch.where(held[..., None], t.gather(2, index), self.noise * torch.randn(index.shape, generator=generator))
            for t in (keys, values)
        )
        fields = {
            name: each[..., : self.seen].gather(2, order[:, None].expand(-1, HEADS, -1)) * held
            for name, each in self.fields[idx].items()
        }
        columns = torch.where(filled, order, 0)
        return PrefillView(
            *shared, query[:, :, start:], SCALING, self.request, self.state, keys, values, columns,
            whole.take(columns, filled), _visible(held), stored=held, block_start=width - (self.seen - start),
            fields=fields,
        )  # fmt: skip

    def positions(self, idx: int) -> list[list[list[int]]]:
        """The positions that each head of a layer stores."""
        return [[head.nonzero()[:, 0].tolist() for head in row] for row in self.stored[idx]]

    def counts(self) -> Tensor:
        """Stored tokens [B, L, H]."""
        return torch.stack(self.stored, 1).sum(-1)

    def _part(self, end: int) -> PromptMap:
        return PromptMap(self.prompt.kinds[:, :end], self.prompt.index[:, :end])

    def _carry_out(self, idx: int, decision: Decision) -> None:
        view, stored = self.views[idx], self.stored[idx]
        if decision.offload is not None:
            chunk = decision.offload.chunk
            for b, h in decision.offload.heads.nonzero().tolist():
                columns = view.positions[b, view.candidates.expand(-1, HEADS, -1)[b, h]]
                self.offloaded[idx][b, h, columns[: len(columns) // chunk * chunk]] = True
        if decision.chunks is not None:
            self.chunks[idx] = decision.chunks
        if decision.keep is None:
            return
        assert decision.keep.dtype == torch.bool
        assert decision.keep.shape in ((len(stored), 1, view.keys.shape[2]), (len(stored), *view.keys.shape[1:3]))
        keep = decision.keep.expand(-1, HEADS, -1)
        allowed = view.candidates.expand(-1, HEADS, -1)
        assert view.stored is None or not (keep & ~allowed).any(), "kept what a head may not keep"
        told = torch.zeros_like(stored)
        for b, h in torch.cartesian_prod(torch.arange(len(stored)), torch.arange(HEADS)).tolist():
            told[b, h, view.positions[b, keep[b, h] & allowed[b, h]]] = True
        stored &= told


def attention(found: Context, idx: int, rows: slice) -> Tensor:
    """Probabilities [B, H, G, n, N] of queries of the block, over what each head stored when they were read."""
    query, keys, _ = found.layers[idx]
    view = found.views[idx]
    shown = torch.zeros(found.stored[idx].shape, dtype=torch.bool)
    for b, h in torch.cartesian_prod(torch.arange(len(shown)), torch.arange(HEADS)).tolist():
        shown[b, h, view.positions[b, view.candidates.expand(-1, HEADS, -1)[b, h]]] = True
    n = found.prompt.columns
    logits = query.unflatten(1, (HEADS, GROUP))[:, :, :, rows] @ keys[:, :, None].mT * SCALING
    causal = torch.arange(n) <= torch.arange(n)[rows, None]
    seen = shown[:, :, None, None] & causal
    probs = logits.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0)
    return probs * found.prompt.real[:, None, None, rows, None]


def _visible(held: Tensor) -> Any:
    """The mask of rows over columns of which each head sees `held`, bool [B, C] or [B, H, C]."""
    held = held[:, None] if held.dim() == 2 else held
    columns = torch.arange(held.shape[-1])

    def rows(which: Tensor) -> Tensor:
        return (columns <= which[..., None])[:, None] & held[:, :, None]

    return rows
