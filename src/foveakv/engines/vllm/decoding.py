"""Call a method after a decode step: its view of the stored tokens, their attention sums, and what it evicts.

vLLM's attention kernels return no probabilities. They are computed again here, from the step's queries and the stored
keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foveakv.engines.vllm.deciding import mask_of
from foveakv.engines.vllm.stored import Eviction, PagedStore, Ranks, Step
from foveakv.errors import MethodError
from foveakv.methods import Method
from foveakv.methods.views import Decision, DecodeView, Evict

_NOT_HERE = ("keys", "values", "offload", "chunks", "stream", "earlier")


def is_called(method: Method) -> bool:
    """Whether `Method.decode` of a method is called."""
    observes = method.observes
    return method.evicts_while_decoding or observes.attention_sum or observes.steps


def decide_step(
    step: Step, store: PagedStore, layers: int, scaling: float, ranks: Ranks, attention_every: int = 1
) -> Eviction | None:
    """Call a method for every layer of a decode step; returns what it evicts.

    Args:
        step: the step, with the query rows of every layer.
        store: the paged cache, with the keys and values of the new tokens.
        layers: number of layers.
        scaling: the factor of q . k.
        ranks: gathers the heads of all ranks, so that all of them decide alike.
        attention_every: N; attention is computed in every Nth step and multiplied by N, and is 0 in the others (not in
            any paper).

    Raises:
        MethodError: the method decides about more than which tokens to keep, or not the same for all layers and heads.
        FoveaKVError: the method fails.
    """
    known, reading = step.known, step.known.decoding
    if reading is None:
        return None
    method, positions = reading.method, known.stored(step.stop)
    stored = positions.shape[0]
    sums = None
    if method.observes.attention_sum:
        if (step.stop - known.prompt) % attention_every == 0:
            sums = _sums(step, store, layers, stored, scaling, ranks) * attention_every
        else:
            sums = torch.zeros(layers, reading.view.geometry.kv_heads, stored, device=step.queries[0].device)
    together = torch.stack([step.queries[idx] for idx in range(layers)], -1)  # [q, Hq of this rank, D, L]
    queries = ranks.gather_heads(together.flatten(2)).unflatten(2, together.shape[2:]).transpose(0, 1)
    orders: list[Tensor | None] = []
    for idx in range(layers):
        slots = PagedSlots(step, store, idx, positions, ranks, reading.view.geometry.kv_heads)
        view = DecodeView(
            idx, idx, queries[None, ..., idx], scaling, reading.view, reading.state, slots, step.stop,
            None if sums is None else sums[None, idx],
        )  # fmt: skip
        orders.append(_left(method, method.decode(view), slots))
    order = _same(method, orders, stored)
    if order is None:
        return None
    number = torch.arange(order.shape[0])
    moved = order != number
    return Eviction(step.stop, order.shape[0], order[moved], number[moved])


def attention_sums(logits: Tensor, heads: int) -> Tensor:
    """Return the attention that every stored token receives, summed over query heads of a group and over queries.

    logits: [Hq, q, n], scaled, of the newest q tokens. heads: number of KV heads, H.

    Returns:
        [H, n], float32.
    """
    rows, stored = logits.shape[1:]
    if rows > 1:
        future = torch.ones(rows, stored, dtype=torch.bool, device=logits.device).triu(stored - rows + 1)
        logits = logits.masked_fill(future, -torch.inf)
    return logits.softmax(-1).unflatten(0, (heads, -1)).sum((1, 2))


def _sums(step: Step, store: PagedStore, layers: int, stored: int, scaling: float, ranks: Ranks) -> Tensor:
    """Return the attention sums of all layers and heads: [L, H, n]."""
    found = []
    for idx in range(layers):
        logits = store.dot(idx, step.blocks, stored, step.queries[idx]) * scaling
        found.append(attention_sums(logits, store.heads))
    local = torch.stack(found).permute(2, 1, 0)  # [n, H of this rank, L]
    return ranks.gather_heads(local).permute(2, 1, 0)


def _left(method: Method, decision: Decision | None, slots: PagedSlots) -> Tensor | None:
    """Return the old numbers of the tokens that one layer keeps, in the new order: int64 [m]; None = everything."""
    if decision is None:
        return None
    stored = slots.max_length
    for name in _NOT_HERE:
        if getattr(decision, name) is not None:
            raise MethodError(f"{method.name}: while decoding it decides about {name}, and it can only evict tokens")
    if decision.keep is not None and decision.evict is not None:
        raise MethodError(f"{method.name}: `decode` returned both `keep` and `evict`; return one of them")
    if decision.evict is not None:
        return _refilled(method, decision.evict, stored)
    if decision.keep is None:
        return None
    return mask_of(method, decision.keep, stored).nonzero().flatten()


def _refilled(method: Method, evict: Evict, stored: int) -> Tensor:
    """The last tokens move into the evicted slots, see `Evict`."""
    named, (count,) = evict.slots, evict.counts
    if isinstance(named, Tensor):
        if bool((named != named[:, :1]).any()):
            raise MethodError(
                f"{method.name}: its heads evict different tokens, and vLLM has one block table per request"
            )
        gone = named[0, 0, :count].tolist()
    else:
        gone = [named] * count
    if len(set(gone)) != count or not all(0 <= each < stored for each in gone):
        raise MethodError(f"{method.name}: Evict.slots must name stored slots, each of them once; got {gone}")
    left = stored - count
    order = torch.arange(left)
    last = [each for each in range(left, stored) if each not in set(gone)]
    holes = [each for each in gone if each < left]
    if holes:
        order[holes] = torch.tensor(last)
    return order


def _same(method: Method, orders: list[Tensor | None], stored: int) -> Tensor | None:
    full = torch.arange(stored)
    found = [full if each is None else each for each in orders]
    for idx, order in enumerate(found):
        if not torch.equal(order, found[0]):
            raise MethodError(
                f"{method.name}: layers 0 and {idx} evict different tokens, and vLLM has one block table per request"
            )
    if found[0].shape[0] == 0:
        raise MethodError(f"{method.name}: it keeps no token")
    return None if found[0].shape[0] == stored else found[0]


class PagedSlots:
    """The stored tokens of one layer as methods see them: `foveakv.methods.views.Slots`, without fields."""

    def __init__(self, step: Step, store: PagedStore, idx: int, positions: Tensor, ranks: Ranks, heads: int) -> None:
        self._step, self._store, self._idx, self._ranks = step, store, idx, ranks
        self._positions = positions
        self.batch, self.heads, self.max_length = 1, heads, positions.shape[0]
        self.sequence_lengths = [self.max_length]
        self.device, self.uniform = step.queries[idx].device, True

    @property
    def lengths(self) -> Tensor:
        """Number of tokens per head: int64 [1, H]."""
        return torch.full((1, self.heads), self.max_length)

    def positions(self) -> Tensor:
        """Return the positions of the tokens in the context: int64 [1, H, M]."""
        return self._positions.to(self.device).expand(1, self.heads, -1)

    def valid(self) -> Tensor:
        """Return where tokens are stored: bool [1, H, M]."""
        return torch.ones(1, self.heads, self.max_length, dtype=torch.bool, device=self.device)

    def keys(self) -> Tensor:
        """Return a copy of the keys: [1, H, M, D]."""
        local = self._store.keys(self._idx, self._step.blocks, self.max_length)
        return self._ranks.gather_heads(local).transpose(0, 1)[None]

    def field(self, name: str) -> Tensor:
        """Raise MethodError: there are no fields."""
        raise MethodError(f"vLLM stores no values per token for methods, such as {name!r}; keep them in the state")

    def add(self, name: str, amounts: Tensor) -> None:
        """Raise MethodError: there are no fields."""
        self.field(name)

    def put(self, name: str, slots: Tensor, counts: list[int], value: float) -> None:
        """Raise MethodError: there are no fields."""
        self.field(name)

    def set_field(self, name: str, padded: Tensor) -> None:
        """Raise MethodError: there are no fields."""
        self.field(name)

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
        """Raise MethodError: there are no fields."""
        return self.field(name)
