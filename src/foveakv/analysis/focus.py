"""What heads attend to while the prompt is read and while the answer is generated, beside their score S.

HybridKV (arXiv 2604.05887) rests on two observations: text rows of static heads concentrate on few tokens (Fig. 3), and
static heads attend to the same tokens in every decode step, while dynamic heads go on to new ones (Eq. 1 and Fig. 2).
S, measured when the prompt has been read, is to predict the latter.

We do not know the wording of Eq. 1. Our reading: the tokens in focus in a step are the k prompt tokens to which a KV
head attends most (summed over its query heads), with the k of Eq. 3, and the cumulative focus count is the number of
distinct tokens that have been in focus so far. A head that attends to the same tokens in every step stays at k.

The count weighs all tokens in focus alike, also those with next to no attention. So we also measure what the claim is
for (not in the paper): how much of a head's attention to the prompt goes, over all decode steps, to the k tokens that
the prompt's text attends to most, which a head that is pruned once could keep.

Notation: P prompts, L layers, H KV heads, C prompt tokens, T decode steps, X shares of the keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor

from foveakv.analysis.head_sweep import Point
from foveakv.analysis.heads import PromptHeads
from foveakv.analysis.passes import Progress, Prompts, run
from foveakv.analysis.rank_correlation import rank_correlation
from foveakv.core.attention_stats import column_sums, text_rows
from foveakv.core.row_tiles import TiledRows
from foveakv.errors import InputError, MethodError
from foveakv.evaluation.bootstrap import Interval
from foveakv.methods.base import Method
from foveakv.methods.hybridkv import HybridKV
from foveakv.methods.views import DecodeView, Observes, PrefillView, PromptView, State

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""The shares of the keys at which curves are measured."""


@dataclass(frozen=True)
class Focus:
    """Attention of every head for P prompts.

    maps: head scores and types of the same prompts. curves: float64 [P, L, H, X], share of the text rows' attention in
    the keys with the highest probabilities, the given `SHARES` of them. k: tokens in focus, per prompt. counts: one
    int64 [T, L, H] per prompt, the cumulative focus count after each decode step; empty if none was run. covered:
    float64 [L, H] per prompt, share of the attention to the prompt, over all steps, on the k tokens that its text rows
    attend to most. points: from `head_sweep.sweep`, if it was asked for.
    """

    maps: PromptHeads
    curves: Tensor
    k: tuple[int, ...]
    counts: tuple[Tensor, ...]
    covered: tuple[Tensor, ...] = ()
    points: tuple[Point, ...] = ()

    @property
    def steps(self) -> list[int]:
        """Number of decode steps, per prompt."""
        return [len(count) for count in self.counts]

    @property
    def final(self) -> Tensor:
        """The focus count after the last step as a multiple of k: float64 [P, L, H]."""
        return torch.stack([count[-1].double() / k for count, k in zip(self.counts, self.k, strict=True)])

    @property
    def coverage(self) -> Tensor:
        """`covered` of all prompts: float64 [P, L, H]."""
        return torch.stack(self.covered)

    @property
    def correlations(self) -> list[Interval]:
        """Rank correlation of S and the last focus count over all heads, per prompt, with intervals over heads."""
        return [rank_correlation(s, count) for s, count in zip(self.maps.scores, self.final, strict=True)]

    @property
    def correlation(self) -> Interval:
        """Rank correlation over heads of the means over prompts of S and of the last focus count."""
        return rank_correlation(self.maps.scores.mean(0), self.final.mean(0))

    @property
    def covered_correlation(self) -> Interval:
        """As `correlation`, of S and `covered`."""
        return rank_correlation(self.maps.scores.mean(0), self.coverage.mean(0))

    def class_mean(self, values: Tensor, static: bool, prompt: int | None = None) -> float | None:
        """Return the mean of values [P, L, H] over the static or dynamic heads of one prompt or all; None without."""
        which = slice(None) if prompt is None else slice(prompt, prompt + 1)
        chosen = values[which][self.maps.static[which] == static]
        return float(chosen.mean()) if len(chosen) else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, those of `maps` included."""
        classes = (("static", True), ("dynamic", False))
        plain: dict[str, Any] = {
            "shares": list(SHARES),
            "curves": self.curves.tolist(),
            "class_curves": {
                name: [self.class_mean(self.curves[..., x], static) for x in range(len(SHARES))]
                for name, static in classes
            },
        }
        if self.counts:
            plain |= {
                "k": list(self.k),
                "steps": self.steps,
                "correlation": _plain(self.correlation),
                "correlations": [_plain(each) for each in self.correlations],
                "covered_correlation": _plain(self.covered_correlation),
                "class_counts": {name: self.class_mean(self.final, static) for name, static in classes},
                "class_covered": {name: self.class_mean(self.coverage, static) for name, static in classes},
                "covered": [each.tolist() for each in self.covered],
                "counts": [count.tolist() for count in self.counts],
            }
        points = {"sweep": [asdict(point) for point in self.points]} if self.points else {}
        return {**self.maps.to_dict(), "focus": plain, **points}

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of `maps` with the curves and, with decode steps, the focus counts."""
        names = [f"attention_top_{share:g}" for share in SHARES]
        more = [dict(zip(names, curve, strict=True)) for curve in self.curves.flatten(0, 2).tolist()]
        if self.counts:
            last = torch.stack([count[-1] for count in self.counts])
            columns = [values.flatten().tolist() for values in (last, self.final, self.coverage)]
            for each, count, multiple, covered in zip(more, *columns, strict=True):
                each |= {"focus_count": count, "focus_count_per_k": multiple, "covered": covered}
        return [{**row, **each} for row, each in zip(self.maps.rows(), more, strict=True)]


@dataclass
class _Focused(State):
    """rows: text rows and which of them count. k: tokens in focus. counts: per decode step and layer, [H].

    Per layer: curves [1, H, X]; seen, best: bool [1, H, C], tokens that have been in focus, and the k that text rows
    attend to most; received: float64 [1, H, 2], attention to the prompt in decode steps, on the best and on all tokens.
    """

    rows: tuple[Tensor, Tensor]
    k: int
    curves: list[Tensor] = field(default_factory=list)
    seen: list[Tensor] = field(default_factory=list)
    best: list[Tensor] = field(default_factory=list)
    received: list[Tensor] = field(default_factory=list)
    counts: list[list[list[int]]] = field(default_factory=list)


@dataclass
class FocusProbe(Method):
    """Keep everything; measure attention curves of the prompt, and in each decode step which tokens are in focus.

    rules: settings of HybridKV, of which `k_ratio`, `text_rows` and `max_text_rows` are used.
    """

    rules: HybridKV

    name: ClassVar[str] = "focus-probe"

    @property
    def observes(self) -> Observes:
        """The text queries, and the attention sum of every decode step."""
        return Observes(queries="text", attention_sum=True)

    def begin(self, request: PromptView) -> _Focused:
        """Select the text rows and compute k, as `HybridKV` does."""
        rules, context = self.rules, int(request.prompt.lengths[0])
        rows = text_rows(request.prompt, rules.text_rows == "after_visual", rules.max_text_rows)
        return _Focused(rows, _tokens(rules.k_ratio, context))

    def prefill(self, view: PrefillView) -> None:
        """Measure the curves of one layer."""
        state, context = view.state, int(view.prompt.lengths[0])
        rows, valid = state.rows
        job = TiledRows.of(view.query, view.keys, rows, valid, view.scaling, view.visible, None)
        state.curves.append(attention_curves(job, [_tokens(share, context) for share in SHARES]).cpu())
        sums = column_sums(view.query, view.keys, rows, valid, view.scaling, view.visible)[..., :context].cpu()
        blank = torch.zeros_like(sums, dtype=torch.bool)
        state.best.append(blank.scatter(2, sums.topk(state.k, -1).indices, True))
        state.seen.append(blank)
        state.received.append(torch.zeros(*sums.shape[:2], 2, dtype=torch.float64))

    def decode(self, view: DecodeView) -> None:
        """Count the tokens in focus in one step of one layer."""
        state, attention_sum = view.state, view.attention_sum
        if attention_sum is None:
            raise MethodError(f"{self.name} needs the attention sum of every decode step")
        seen = state.seen[view.compressed_idx]
        received = attention_sum[:, :, : seen.shape[2]].cpu()
        best = received.masked_fill(~state.best[view.compressed_idx], 0)
        state.received[view.compressed_idx] += torch.stack([best, received], -1).sum(2, dtype=torch.float64)
        seen.scatter_(2, received.topk(state.k, -1).indices, True)
        if view.compressed_idx == 0:
            state.counts.append([])
        state.counts[-1].append(seen[0].sum(-1).tolist())


def attention_curves(job: TiledRows, counts: Sequence[int]) -> Tensor:
    """Compute the mean over rows of the sum of the n largest probabilities, for each n of `counts`: [B, H, X].

    The value of a KV head is the mean over its query heads, as in `core.attention_stats.topk_attention`.
    """
    sums = job.zeros(job.batch, job.heads, len(counts))
    rows = torch.zeros(job.batch, dtype=torch.int64, device=sums.device)
    for tile in job.tiles():
        rows += tile.counted.sum(1)
        for b, h, probs in tile.parts():
            ordered = probs.sort(-1, descending=True).values.cumsum(-1)
            last = torch.tensor(counts, device=sums.device).clamp_max(ordered.shape[-1]) - 1
            sums[b, h] += ordered[..., last].sum((2, 3))
    return sums / (rows.clamp_min(1) * job.group)[:, None, None]


def _plain(found: Interval) -> dict[str, Any]:
    """Return plain values, None for what is unknown: JSON has no NaN."""
    return {key: None if math.isnan(value) else value for key, value in vars(found).items()}


def _tokens(share: float, context: int) -> int:
    """Return a share of the prompt in tokens, rounded up, at least 1; without the rounding error of 0.05 * 140."""
    return max(1, math.ceil(Fraction(repr(float(share))) * context))


def focus(
    model: Any,
    prompts: Prompts,
    maps: PromptHeads,
    rules: HybridKV,
    *,
    new_tokens: int = 1,
    to_the_end: bool = False,
    progress: Progress | None = None,
) -> Focus:
    """Run every prompt with a full cache and measure the attention of its heads.

    Args:
        model: a model that `foveakv.compress` supports.
        prompts: the prompts of `maps`.
        maps: from `heads.head_maps`, with the same prompts and `rules`.
        rules: settings of HybridKV.
        new_tokens: tokens to generate, of which the first comes from the prompt's forward pass; 1 measures no focus
            counts. The paper has 500 decode steps.
        to_the_end: continue after the end of an answer.
        progress: called with each label before its run.

    Raises:
        InputError: an answer has no decode step although `new_tokens` is above 1.
    """
    curves, ks, counts, covered = [], [], [], []
    for label, inputs in prompts.items():
        if progress is not None:
            progress(label)
        cache, _ = run(model, inputs, FocusProbe(rules), new_tokens, to_the_end=to_the_end)
        found = cache.state
        if not isinstance(found, _Focused):
            raise MethodError("focus: the prompt was not processed")
        curves.append(torch.cat(found.curves).double())
        ks.append(found.k)
        if new_tokens > 1:
            if not found.counts:
                raise InputError(f"{label}: the answer has one token and no decode step; use --ignore-eos (to_the_end)")
            counts.append(torch.tensor(found.counts))
            received = torch.cat(found.received)
            covered.append(received[..., 0] / received[..., 1])
    return Focus(maps, torch.stack(curves), tuple(ks), tuple(counts), tuple(covered))
