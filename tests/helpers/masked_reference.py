"""An independent reference for compressed generation: the plain model, a plain cache, and a mask.

A compressed run records a trace: for every forward pass, the logical positions that each (sequence, KV head) of a layer
attended to. Generating again with nothing dropped, but with attention masked to exactly those positions (and by the
model's own mask), has to give the same logits. With `stored`, the keys and values that the compressed run attended to
are compared with those of the plain cache too. Nothing here knows how the compression works, and nothing is imported
from it.

    with compressed(model) as session, recorded(model) as got:
        model.generate(**inputs)
    with masked(model, session.trace), recorded(model) as want:
        model.generate(**inputs)
    assert largest_difference(got, want) < 1e-6
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

NAME = "masked_reference"

Trace = Sequence[dict[int, Tensor] | None]
Stored = tuple[Tensor, Tensor | None, Tensor | None]
"""Positions [B, H, M], -1 for none, with their keys [B, H, M, D] and values [B, H, M, Dv], or None for both."""


class _Replay:
    """Which step of the trace is running, and what each layer may attend to in it."""

    def __init__(
        self, trace: Trace, left: Tensor | None, left_after: int, stored: Sequence[dict[int, Stored]] | None
    ) -> None:
        self.trace = trace
        self.stored = stored
        self.furthest = 0.0  # largest difference between a stored key or value and that of the plain cache
        self.compared = 0
        self.step = -1
        self.left = left
        self.left_after = left_after
        self.layers_masked = 0
        self.dense_rows = 0  # the first rows of step 0 attend densely, whatever the trace says

    def allowed(self, layer: int, batch: int, heads: int, columns: int) -> Tensor | None:
        """bool [B, H, 1, columns], or None where the layer attends densely in this step."""
        step = self.trace[self.step]
        positions = None if step is None else step.get(layer)
        if positions is None:
            left = self.stream(layer)
            return None if left is None else left.expand(batch, heads, 1, columns)
        where = f"step {self.step}, layer {layer}"
        if positions.shape[:2] != (batch, heads):
            raise AssertionError(f"{where}: trace of {tuple(positions.shape)}, attention of {batch, heads}")
        if int(positions.max()) >= columns:
            raise AssertionError(f"{where}: position {int(positions.max())} of {columns} columns")
        real = positions >= 0
        counts = torch.zeros(batch, heads, columns, dtype=torch.long)
        counts.scatter_add_(2, positions.clamp_min(0), real.long())
        if int(counts.max()) > 1:
            raise AssertionError(f"{where}: a position is attended to twice")
        self.layers_masked += 1
        return (counts > 0)[:, :, None, :]

    def stream(self, layer: int) -> Tensor | None:
        """bool [B, 1, 1, C], the prompt columns that a layer's prefill sees; None for all of them."""
        if self.left is None or self.step > 0 or layer <= self.left_after:
            return None
        return self.left[:, None, None, :]

    def compare(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Compares what the compressed run attended to with the plain cache: key [B, H, C, D], value [B, H, C, Dv]."""
        held = None if self.stored is None else self.stored[self.step].get(layer)
        if held is None or held[1] is None:
            return
        positions = held[0]
        real = (positions >= 0)[..., None]
        for plain, stored in ((key, held[1]), (value, held[2])):
            assert stored is not None
            index = positions.clamp_min(0)[..., None].expand(*positions.shape, plain.shape[-1])
            off = (plain.gather(2, index).double() - stored.double()).masked_fill(~real, 0).abs().max().item()
            self.furthest = max(self.furthest, off if off == off else float("inf"))
        self.compared += 1


_running: list[_Replay] = []


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Softmax attention in the query's own precision, written out."""
    for name in ("softcap", "s_aux", "position_bias"):
        assert kwargs.get(name) is None, f"the reference does not know {name}"
    batch, query_heads, new, dim = query.shape
    heads, columns = key.shape[1], key.shape[2]
    _running[-1].compare(module.layer_idx, key, value)
    group = query_heads // heads
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    if attention_mask is None:
        allowed = torch.ones(new, columns, dtype=torch.bool).tril(columns - new)
    else:
        assert attention_mask.dtype == torch.bool
        allowed = attention_mask
    chosen = _running[-1].allowed(module.layer_idx, batch, heads, columns)
    if chosen is not None:
        chosen = chosen.repeat_interleave(group, 1)
        dense = _running[-1].dense_rows if _running[-1].step == 0 else 0
        if dense:
            seen = _running[-1].stream(module.layer_idx)
            seen = torch.ones(1, dtype=torch.bool) if seen is None else F.pad(seen, (0, columns - seen.shape[-1]))
            chosen = torch.where(torch.arange(new)[:, None] < dense, seen, chosen)
        allowed = allowed & chosen
    scores = query @ key.transpose(-1, -2) * (dim**-0.5 if scaling is None else scaling)
    scores = scores.masked_fill(~allowed, -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)  # a pad's row may attend to nothing
    return (weights @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def _text_key(model: Any) -> str:
    """The key under which `set_attn_implementation` knows the text decoder's config."""
    target = model.get_decoder().config
    if model.config is target:
        return ""
    return next(key for key in model.config.sub_configs if getattr(model.config, key, None) is target)


@contextmanager
def masked(
    model: Any,
    trace: Trace,
    *,
    left: Tensor | None = None,
    left_after: int = 0,
    stored: Sequence[dict[int, Stored]] | None = None,
    dense_rows: int = 0,
) -> Iterator[_Replay]:
    """Inside, the model attends to what the trace says, step after step.

    Args:
        trace: for every forward pass a dict of layer index -> LongTensor [B, H, M] of positions, -1 for none; a layer
            that is absent attends densely, and so does every layer of a step that is None or empty.
        left: bool [B, C], False for prompt tokens that left the residual stream after layer `left_after`: no query of
            the prefill sees them as keys in later layers. Rows of such tokens mean nothing then, all others are exact.
        stored: what the compressed run attended to, to be compared with the plain cache; the largest difference is
            `furthest` of what this yields.
        dense_rows: these rows of the first step are the prompt's and attend densely; rows after them (drafted tokens)
            attend to what the trace has for that step.
    """
    key, config = _text_key(model), model.get_decoder().config
    before = config._attn_implementation
    replay = _Replay(trace, left, left_after, stored)
    replay.dense_rows = dense_rows

    def count(*unused: Any) -> None:
        replay.step += 1
        if replay.step >= len(trace):
            raise AssertionError(f"the replay takes more forward passes than the {len(trace)} of the trace")

    handle = model.register_forward_pre_hook(count)
    model.set_attn_implementation({key: NAME})
    _running.append(replay)
    try:
        yield replay
    finally:
        _running.pop()
        model.set_attn_implementation({key: before})
        handle.remove()


@contextmanager
def recorded(model: Any) -> Iterator[list[Tensor]]:
    """Collects the logits of every forward pass in full precision (`generate` returns them rounded to fp32)."""
    steps: list[Tensor] = []
    handle = model.register_forward_hook(lambda module, args, output: steps.append(output.logits.detach().clone()))
    try:
        yield steps
    finally:
        handle.remove()


def largest_difference(got: Sequence[Tensor], want: Sequence[Tensor], every_row: bool = False) -> float:
    """Largest difference of logits: at the last token of the first step, and at all tokens of the later ones.

    With `every_row`, at all tokens of the first step too (wrong where a batch is padded).
    """
    assert len(got) == len(want), f"{len(got)} steps against {len(want)}"
    worst = 0.0
    for step, (a, b) in enumerate(zip(got, want, strict=True)):
        if step == 0 and not every_row:
            a, b = a[:, -1], b[:, -1]
        assert a.shape == b.shape, f"step {step}: {a.shape} against {b.shape}"
        difference = (a - b).abs().max().item()
        worst = max(worst, difference if difference == difference else float("inf"))
    return worst


def everything(first: int, steps: int, layers: Sequence[int], heads: int, batch: int) -> list[dict[int, Tensor]]:
    """A trace that keeps all: a dense step over `first` columns, then `steps - 1` steps of one token."""
    trace: list[dict[int, Tensor]] = [{}]
    for end in range(first + 1, first + steps):
        trace.append({layer: torch.arange(end).expand(batch, heads, end) for layer in layers})
    return trace


def stayed(trace: Trace, columns: int, after: int) -> Tensor:
    """bool [B, columns]: prompt tokens that layers behind layer `after` still hold in the first step after the prefill.

    Where tokens left the residual stream after layer `after`, they are those that did not.
    """
    first = next(step for step in trace if step)
    later = [positions for layer, positions in first.items() if layer > after]
    kept = torch.zeros(later[0].shape[0], columns, dtype=torch.bool)
    for positions in later:
        for b, row in enumerate(positions.flatten(1)):
            kept[b, row[(row >= 0) & (row < columns)]] = True
    return kept
