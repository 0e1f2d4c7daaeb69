"""What a method may see and decide.

A method is a dataclass of settings. It holds no state: everything it learns about a prompt lives in the cache
(`cache.state`, `view.state`, or a per-slot field of `view.segments`), so one object serves any number of prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from foveakv.core.budget import parse_budget
from foveakv.errors import CacheInUseError

if TYPE_CHECKING:
    from foveakv.core.prompt import PromptMap
    from foveakv.engines.transformers.cache import CompressedCache
    from foveakv.memory.pages import Pages
    from foveakv.memory.segments import Segments


class Counts(dict[str, int]):
    """What happened in one layer, counted in slots (`flushes`: in events)."""

    KEYS = ("evicted", "restored", "retrieved", "hits", "flushes")

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(self.KEYS, 0))

    def add(self, **amounts: int) -> None:
        for key, amount in amounts.items():
            self[key] += int(amount)


@dataclass
class LayerView:
    """What both phases share.

    `layer_idx` is the model's index of the layer, `compressed_idx` counts compressed layers only (0 is the first one).
    `query` [B, Hq, q, D] is rotated; query heads `h * G ... h * G + G - 1` read KV head `h`.
    `state` belongs to this layer, `cache.state` to the whole cache; both start empty with every prompt.
    """

    layer_idx: int
    compressed_idx: int
    query: Tensor
    scaling: float
    cache: CompressedCache
    state: dict[str, Any]
    counts: Counts

    def count(self, **amounts: int) -> None:
        """Adds to the report: `evicted`, `restored`, `retrieved`, `hits` in slots, `flushes` in events."""
        self.counts.add(**amounts)


@dataclass
class PrefillView(LayerView):
    """One layer at the end of its prefill, before anything is dropped.

    `keys` [B, H, C, D] (rotated) and `values` [B, H, C, Dv] are dense; column c of sequence b is token
    `positions[b, c]`, and `prompt` describes the same C columns. `query` has C rows too, or the rows of the last chunk
    only when the prefill came in chunks and the method did not ask for more in `needs_queries`.
    `visible` gives the attention mask for some query rows (LongTensor [B, n] of columns -> bool [B, 1, n, C]);
    None means plain causal attention without padding.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    prompt: PromptMap
    visible: Callable[[Tensor], Tensor] | None


@dataclass
class DecodeView(LayerView):
    """One layer in one decode step (or a later turn's q > 1 tokens), after the new KV was appended.

    `attention_sum` [B, H, M] is the attention that every stored slot received in this step, summed over the query group and the
    q queries; None in `before_attention`, and where the method does not set `needs_attention_sum`. `seen` counts all tokens of
    the context, the new ones included. `before_attention` may set `pages` of a store: the step then attends to them as
    well, where they lie (`foveakv.kernels.paged` says on what machines that works).
    """

    segments: Segments
    seen: int
    attention_sum: Tensor | None = field(default=None)
    pages: Pages | None = field(default=None)


@dataclass
class Drop:
    """Single slots that leave, at the price of what is dropped and not of what is stored.

    slots: int64 [B, H or 1, n], over `view.segments`, distinct in a head; sequence b loses the first counts[b] of its n
    entries in every head. A number names one slot, the same in every run. The last slots of a run move into the holes,
    so that its order is no longer that of the tokens: a method that drops this way goes by `segments.positions()`. See
    `Segments.evict`.
    """

    slots: Tensor | int
    counts: list[int]


@dataclass
class Method:
    """Base of all methods. Override `prefill`, and the others only where the method acts there.

    Rules that hold for every method: padding is never kept, tokens keep their positions, and the step that is running
    always attends to everything that was there when it began.
    """

    name: ClassVar[str] = ""
    visual_only: ClassVar[bool] = False
    """Drops nothing but visual tokens, so that a prompt without any is a mistake."""

    @property
    def needs_attention_sum(self) -> bool:
        """Whether `decode` reads `view.attention_sum`."""
        return False

    @property
    def evicts_while_decoding(self) -> bool:
        """Whether `decode` may drop slots; such a cache cannot be cropped (no assisted decoding)."""
        return False

    @property
    def retrieves(self) -> bool:
        """Whether `before_attention` does something."""
        return False

    @property
    def merges(self) -> bool:
        """Whether `prefill` replaces `view.keys` and `view.values`, so that what is stored is not what was computed."""
        return False

    @property
    def drop_hidden_after(self) -> int | None:
        """Ordinal of the layer after which evicted tokens also leave the residual stream; None = they never do."""
        return None

    def needs_queries(self, compressed_idx: int) -> bool:
        """Whether `prefill` of this layer reads query rows before the last chunk of a chunked prefill."""
        return False

    def begin(self, cache: CompressedCache) -> None:
        """Called once per prompt, before layer 0; `cache.prompt` and `cache.geometry` are known. Validate here."""

    def prefill(self, view: PrefillView) -> Tensor | None:
        """The slots to keep, bool [B, H, C] or [B, 1, C]; None keeps all."""
        return None

    def after_prefill(self, cache: CompressedCache) -> None:
        """Called once per prompt, after the last layer's `prefill`; may still drop slots of any layer."""

    def before_attention(self, view: DecodeView) -> None:
        """Called before each decode attention when `retrieves`."""

    def decode(self, view: DecodeView) -> Tensor | Drop | None:
        """What leaves after this step; None drops nothing.

        bool [B, H, M] over `view.segments` marks the slots to keep, and the others are closed up in order, which moves
        all that lies behind them: for evictions of many slots at once. `Drop` is for a few slots in every step.
        """
        return None

    def budget_tokens(self, cache: CompressedCache, budget: float | int | str, *, steady: bool = False) -> Tensor:
        """Tokens per KV head that a budget allows each sequence: LongTensor [B], on the cache's device.

        With `steady`, for methods that evict while decoding, it may exceed the prompt; see `Budget.steady`.
        """
        if cache.geometry is None:
            raise CacheInUseError("a budget is known only once the prompt is")
        key = ("budget", budget, steady)
        if key not in cache.state:
            parsed = parse_budget(budget)
            tokens = parsed.steady(cache.geometry) if steady else parsed.tokens(cache.geometry)
            cache.state[key] = tokens.to(cache.full_prompt.kinds.device)
        return cache.state[key]

    def summary(self, cache: CompressedCache) -> dict[str, Any]:
        """What the method did to this prompt beyond the common counts, as plain values for the report."""
        return {}

    def describe(self) -> dict[str, Any]:
        """Settings as plain values, for reports and result files."""
        return {"method": self.name, **{f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.init}}


def _plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)


def keep_top(scores: Tensor, count: Tensor) -> Tensor:
    """Marks the `count` highest scores of each row.

    Args:
        scores: [..., C]; excluded columns hold -inf and are never marked.
        count: integer tensor that broadcasts to `scores.shape[:-1]`.

    Returns:
        bool [..., C] with exactly min(count, finite scores) marks per row; ties go to the lower column.
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        -1, order, torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    )
    return (rank < count[..., None]) & (scores > -torch.inf)
