"""Attention masks that can be evaluated at any query row and any stored position.

transformers describes a mask by a function of (batch, head, query index, key index) and builds a [B, 1, q, kv] tensor
from it. After an eviction no such tensor fits any more: stored slots differ per head. So the description is kept, the
tensor is built only for attention over dense keys, and stored slots are tested at their logical positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foveakv.engines.transformers import compat
from foveakv.errors import UnsupportedModeError


@dataclass
class LazyMask:
    """What transformers would have built a mask from (the arguments of its mask functions)."""

    base: str
    arguments: dict[str, Any]
    _dense: dict[str, Any] = field(default_factory=dict)
    _padded: dict[int, bool] = field(default_factory=dict)

    @property
    def padding(self) -> Tensor | None:
        """bool [B, seen + q], True = a real token; None when no padding mask was given."""
        return self.arguments.get("attention_mask")

    @property
    def plain(self) -> bool:
        """Causal apart from padding: no window, no image blocks, no custom overlay."""
        return bool(self.arguments.get("allow_is_causal_skip", True)) and self.arguments.get("local_size") is None

    def padded_from(self, column: int) -> bool:
        """Whether any token at or after `column` is padding; tested once per forward pass and column."""
        if self.padding is None:
            return False
        if column not in self._padded:
            self._padded[column] = not bool(self.padding[:, column:].all())
        return self._padded[column]

    def dense(self) -> Any:
        """The mask that the base implementation expects; built once per forward pass."""
        if "mask" not in self._dense:
            build = compat.base_mask(self.base)
            self._dense["mask"] = None if build is None else build(**self.arguments)
        return self._dense["mask"]

    def allowed(self, batch: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """Elementwise test; the three index tensors broadcast against each other."""
        zero = torch.zeros((), dtype=torch.long, device=keys.device)
        allowed = self.arguments["mask_function"](batch, zero, queries, keys)
        if self.padding is not None:
            allowed = allowed & self.padding[batch, keys]
        return allowed


# An additive mask value from here on leaves a weight of exp(-1e4) = 0 in every floating-point type.
_BLOCKED = -1e4


@dataclass
class TensorMask:
    """A 4-D mask [B or 1, heads, q, seen + q] that the caller prepared; it covers all tokens seen, stored or not.

    Boolean (True: may be attended to) or additive (0, or -inf and the like), the same for all heads; `visible` raises
    `UnsupportedModeError` for others.
    """

    mask: Tensor
    plain: bool = False
    _visible: Tensor | None = None

    def padded_from(self, column: int) -> bool:
        """False: what is padding is in the mask itself."""
        return False

    def dense(self) -> Tensor:
        """The mask as it was prepared, for attention over dense keys."""
        return self.mask

    @property
    def visible(self) -> Tensor:
        """bool [B or 1, q, seen + q], True where a query may attend to a key."""
        if self._visible is None:
            self._visible = _visible(self.mask)
        return self._visible

    def allowed(self, batch: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """Elementwise test; the three index tensors broadcast against each other."""
        visible = self.visible
        rows = queries - (visible.shape[-1] - visible.shape[-2])
        if bool((rows < 0).any()):
            raise UnsupportedModeError(
                "a 4-D attention mask has the rows of one forward pass only, and rows of earlier ones are needed; pass "
                "the prompt at once, or a 2-D mask (1 = token, 0 = padding)"
            )
        batch = batch if visible.shape[0] > 1 else torch.zeros_like(batch)
        return visible[batch, rows, keys]


def _visible(mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        visible = mask
    elif mask.is_floating_point():
        visible = mask == 0
        if not bool((visible | (mask <= _BLOCKED)).all()):
            raise UnsupportedModeError(
                "a 4-D additive attention mask may contain only 0 and -inf (or the dtype's lowest value): a bias such "
                "as ALiBi is not supported over stored slots"
            )
    else:
        raise UnsupportedModeError(f"a 4-D attention mask must be boolean or additive, got {mask.dtype}")
    if mask.shape[1] > 1 and mask.stride(1) != 0 and not bool((visible == visible[:, :1]).all()):
        raise UnsupportedModeError("a 4-D attention mask that differs between heads is not supported over stored slots")
    return visible[:, 0]


def check_prepared(mask: Any, seen: int, new: int) -> bool:
    """Whether a mask was prepared by the caller, as a 4-D tensor or a dict of them, one for each kind of layer.

    Raises:
        UnsupportedModeError: stored slots cannot be attended to under this mask exactly as dense keys would be.
    """
    if isinstance(mask, dict):
        # The others belong to layers that are not compressed.
        return check_prepared(mask.get("full_attention"), seen, new)
    if mask is None or isinstance(mask, LazyMask) or (isinstance(mask, Tensor) and mask.ndim == 2):
        return False
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        kind = f"of {mask.ndim} dimensions" if isinstance(mask, Tensor) else f"as a {type(mask).__name__}"
        raise UnsupportedModeError(
            f"an attention mask {kind} is not supported; pass a 2-D mask (1 = token, 0 = padding) or a 4-D tensor"
        )
    if tuple(mask.shape[-2:]) != (new, seen + new):
        raise UnsupportedModeError(
            f"a 4-D attention mask must cover the {new} new tokens and all {seen + new} tokens seen, stored or not: "
            f"expected [..., {new}, {seen + new}], got {list(mask.shape)}"
        )
    _visible(mask)
    return True


@dataclass
class SubsetMask:
    """A prompt's mask restricted to some of its tokens, for layers that see a shortened sequence.

    index: LongTensor [B, n], the original columns, ascending; valid: bool [B, n], False where a row has fewer than n.
    """

    whole: LazyMask
    index: Tensor
    valid: Tensor
    _dense: dict[str, Any] = field(default_factory=dict)

    @property
    def plain(self) -> bool:
        """Causal, and every row has all of its tokens."""
        return self.whole.plain and bool(self.valid.all()) and not self.whole.padded_from(0)

    def padded_from(self, column: int) -> bool:
        """Whether filler tokens or padding must be masked."""
        return not self.plain

    def dense(self) -> Any:
        """The mask that the base implementation expects for the shortened sequence; built once."""
        if "mask" not in self._dense:
            self._dense["mask"] = self._build()
        return self._dense["mask"]

    def _build(self) -> Any:
        base = self.whole.base
        if "flash" in base:
            return None if bool(self.valid.all()) else self.valid
        if self.plain and base != "eager":
            return None
        rows = torch.arange(self.index.shape[1], device=self.index.device)[None].expand_as(self.index)
        mask = self.rows(rows)
        # A filler row would have nothing to attend to, and softmax over nothing is NaN.
        mask = mask | torch.eye(mask.shape[-1], dtype=torch.bool, device=mask.device)
        if base == "eager":
            dtype = self.whole.arguments.get("dtype", torch.float32)
            return torch.where(mask, torch.zeros((), dtype=dtype), torch.finfo(dtype).min)
        return mask

    def rows(self, rows: Tensor) -> Tensor:
        """bool [B, 1, n, C] for the query columns `rows` [B, n] (columns of the shortened sequence)."""
        batch = torch.arange(len(rows), device=rows.device)[:, None, None]
        queries = self.index.gather(1, rows)[:, :, None]
        allowed = self.whole.allowed(batch, queries, self.index[:, None, :])
        return (allowed & self.valid[:, None, :])[:, None]


Mask = LazyMask | TensorMask | SubsetMask


def as_mask(attention_mask: Any) -> Mask | None:
    """What an attention function received -> a `Mask` (None = plain causal)."""
    if isinstance(attention_mask, Tensor):
        return TensorMask(attention_mask)
    return attention_mask


def visible_rows(mask: Mask | None, columns: int) -> Callable[[Tensor], Tensor] | None:
    """The mask of chosen query rows over a dense prompt of `columns` keys; None = plain causal, no padding."""
    if mask is None or (mask.plain and not mask.padded_from(0)):
        return None
    if isinstance(mask, SubsetMask):
        return mask.rows
    whole = mask

    def visible(rows: Tensor) -> Tensor:
        """bool [B, 1, n, columns] for the query rows `rows` [B, n]."""
        batch = torch.arange(len(rows), device=rows.device)[:, None, None]
        keys = torch.arange(columns, device=rows.device)[None, None, :]
        allowed = whole.allowed(batch, rows[:, :, None], keys)
        return allowed.expand(len(rows), rows.shape[1], columns)[:, None]

    return visible


def stored_mask(mask: Mask | None, positions: Tensor, seen: int, new: int, clean_until: int) -> Tensor | None:
    """The mask of the `new` newest queries over stored slots.

    Args:
        positions: LongTensor [B, H, M], logical positions of the slots, -1 where there is none.
        seen: tokens in the context, the new ones included.
        clean_until: no slot below this position is padding (a prompt's padding is never stored).

    Returns:
        bool [B, H, new, M], or None when every stored slot may be attended to.
    """
    plain = mask is None or mask.plain
    padded = mask is not None and mask.padded_from(clean_until)
    if plain and not padded and new == 1:
        return None
    queries = torch.arange(seen - new, seen, device=positions.device)[None, None, :, None]
    keys = positions[:, :, None, :]
    if plain and not padded:
        allowed = keys <= queries
    else:
        batch = torch.arange(len(positions), device=positions.device)[:, None, None, None]
        allowed = mask.allowed(batch, queries, keys.clamp_min(0))  # type: ignore[union-attr]
    return allowed & (keys >= 0)
