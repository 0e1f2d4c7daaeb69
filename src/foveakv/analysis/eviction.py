"""Compare a recycle bin with greedy eviction by the attention they lose, on recorded attention of a full cache.

HAE (arXiv 2602.02197, Corollary 2.1) compares its decode eviction (DDES, a bin of D tokens) with greedy eviction (D =
1) by the sum of the scores (Eq. 5) of evicted tokens. This module measures that, and the attention that evicted tokens
would have received later (not in the paper), on recorded traces. A trace is the attention that the tokens of one layer
received in every decode step of a run without eviction, so that decisions do not affect later attention.

Notation: P prompts, L layers, C prompt tokens, T decode steps, N = C + T.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from foveakv.analysis.attention_trace import Trace, record
from foveakv.analysis.passes import Progress, Prompts, check
from foveakv.core.budget import Geometry, parse_budget
from foveakv.core.prompt import TEXT, PromptMap
from foveakv.engines.transformers.decisions import Storage, evict, store_prompt
from foveakv.engines.transformers.slots import StoredSlots
from foveakv.errors import MethodError
from foveakv.methods import checks
from foveakv.methods.ddes import BinState, RecycleBin
from foveakv.methods.prompt_scores import check_rows
from foveakv.methods.views import Decision, DecodeView, PrefillView, PromptView

if TYPE_CHECKING:
    from collections.abc import Sequence

GREEDY = 1


@dataclass(frozen=True)
class Replay:
    """Result of one policy on one trace.

    last_seen: int64 [L, N], the last step in which a token was stored: -1 = evicted at prefill, T = never evicted.
    lost: float64 [L], share of the trace's attention to tokens that are no longer stored, over all steps. lost_by_step:
    float64 [T], the same per step, averaged over layers. score: float64 [L], sum of the scores (Eq. 5) of tokens
    evicted while decoding, at the time of their eviction. evicted: tokens per layer evicted while decoding. peak: the
    most tokens stored.
    """

    last_seen: Tensor
    lost: Tensor
    lost_by_step: Tensor
    score: Tensor
    evicted: int
    peak: int


@dataclass(frozen=True)
class BinResult:
    """Comparison of a bin of D tokens with greedy eviction on all traces (layer x prompt).

    size: D. matched: whether both have the same steady size or the same peak. traces: number of traces. at_most_greedy:
    share of traces on which the bin loses no more attention. lost, greedy_lost: mean share of attention lost.
    score_at_most_greedy: as at_most_greedy, but a loss is the sum of the scores (Eq. 5) of evicted tokens at the time
    of their eviction. evicted, greedy_evicted: mean tokens per layer evicted while decoding.
    """

    size: int
    matched: Literal["steady size", "peak"]
    traces: int
    at_most_greedy: float
    lost: float
    greedy_lost: float
    score_at_most_greedy: float
    evicted: float
    greedy_evicted: float


@dataclass(frozen=True)
class Eviction:
    """Result of `eviction`.

    labels, steady, steps: label, steady size and number of decode steps of every prompt. layers: the model's indices of
    the layers. results: one comparison per D. by_layer, by_step: mean share of attention lost over prompts, for every D
    (1 is greedy), at the same steady size; steps after the end of a shorter answer are averaged over the other prompts.
    details: one entry per (prompt, D, layer). settings: arguments of the run.
    """

    labels: tuple[str, ...]
    layers: tuple[int, ...]
    steady: tuple[int, ...]
    steps: tuple[int, ...]
    results: tuple[BinResult, ...]
    by_layer: dict[int, list[float]]
    by_step: dict[int, list[float]]
    details: tuple[dict[str, Any], ...]
    settings: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "settings": self.settings,
            "prompts": [
                {"label": label, "steady": steady, "steps": steps}
                for label, steady, steps in zip(self.labels, self.steady, self.steps, strict=True)
            ],
            "layers": list(self.layers),
            "results": [vars(result) for result in self.results],
            "by_layer": self.by_layer,
            "by_step": self.by_step,
            "traces": list(self.details),
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat row per prompt, bin and layer, for CSV."""
        return list(self.details)


def replay(trace: Trace, rules: RecycleBin, steady: int, recent: int = 0) -> Replay:
    """Apply a recycle bin to a trace, with the implementation that `HAE` uses; layers are processed as a batch.

    The prompt is first reduced to `steady` tokens by its scores, as HAE does with a budget.

    Args:
        trace: the recorded attention.
        rules: settings of the bin.
        steady: steady size l.
        recent: newest tokens that are never evicted.
    """
    layers, columns = trace.prompt.shape
    steps = len(trace.steps)
    layer = _Layer(trace.prompt, rules, steady, recent)
    last_seen = torch.full((layers, trace.tokens), steps)
    score = torch.zeros(layers, trace.tokens, dtype=torch.float64)
    score[:, :columns] = trace.prompt
    last_seen[:, :columns].masked_fill_(~layer.stored(columns), -1)
    lost_by_layer = torch.zeros(layers, dtype=torch.float64)
    total = torch.zeros(layers, dtype=torch.float64)
    lost_by_step, left_score = [], torch.zeros(layers, dtype=torch.float64)
    evicted = peak = 0
    for t, received in enumerate(trace.steps):
        width = columns + t + 1
        gone = last_seen[:, :width] < t
        lost, all_of_it = received.double().masked_fill(~gone, 0).sum(1), received.double().sum(1)
        lost_by_layer += lost
        total += all_of_it
        lost_by_step.append(float((lost / all_of_it).mean()))
        score[:, :width] += received
        peak = max(peak, layer.step(received))
        leaving = ~gone & ~layer.stored(width)
        last_seen[:, :width].masked_fill_(leaving, t)
        left_score += score[:, :width].masked_fill(~leaving, 0).sum(1)
        evicted += int(leaving[0].sum())
    return Replay(
        last_seen, lost_by_layer / total, torch.tensor(lost_by_step, dtype=torch.float64), left_score, evicted, peak
    )


class _Layer:
    """The layers of a trace as the sequences of one cache layer, with placeholder keys and values."""

    def __init__(self, scores: Tensor, rules: RecycleBin, steady: int, recent: int) -> None:
        batch, columns = scores.shape
        self.rules, self.seen, self.state = rules, columns, BinState()
        sums, every = scores[:, None], torch.ones(batch, 1, columns, dtype=torch.bool)
        sizes, newest = torch.full((batch,), steady), torch.full((batch,), recent)
        keep = rules.shrink(sums, every, sizes, newest) if columns > steady else every
        self.state.add_layer(sizes, newest)
        blank = torch.zeros(batch, 1, columns, 1)
        places = torch.arange(columns).expand(batch, columns)
        prompt = PromptMap(torch.full((batch, columns), TEXT, dtype=torch.int8))
        self.request = PromptView(prompt, Geometry(batch, [columns] * batch, 1, 1, 1, 1, 4), (0,), 1)
        view = PrefillView(0, 0, blank, 1.0, self.request, self.state, blank, blank, places, prompt, None)
        storage = Storage("replay", "auto", None, 0)
        self.segments, _ = store_prompt(view, Decision(keep=keep, fields=rules.fields(sums)), storage)

    def step(self, received: Tensor) -> int:
        """Run one decode step; received: attention by token, [L, N]. Return the tokens stored before any eviction."""
        segments, batch = self.segments, self.segments.batch
        blank = torch.zeros(batch, 1, 1, 1)
        segments.append(blank, blank, torch.full((batch, 1), self.seen))
        self.seen += 1
        places = segments.positions()
        attention_sum = received[:, None].gather(-1, places.clamp_min(0)).masked_fill(places < 0, 0)
        slots = StoredSlots(segments)
        view = DecodeView(0, 0, blank, 1.0, self.request, self.state, slots, self.seen, attention_sum)
        length = segments.max_length
        decision = self.rules.step(view, self.state)
        if decision is not None:
            evict(segments, decision, "replay")
        return length

    def stored(self, tokens: int) -> Tensor:
        """Return which of the first `tokens` tokens are stored: bool [L, tokens]."""
        places = self.segments.positions()[:, 0]
        marks = torch.zeros(len(places), tokens + 1, dtype=torch.bool)
        return marks.scatter_(1, torch.where(places < 0, tokens, places), True)[:, :tokens]


def check_settings(
    bins: Sequence[int], budget: float | int | str, recent: int = 0, sink: int = 0, rows: Literal["all"] | int = "all"
) -> None:
    """Raise `MethodError` or `BudgetError` for settings of `eviction` that are invalid for any prompt."""
    if not bins:
        raise MethodError("eviction: name at least one bin size")
    for size in bins:
        checks.whole_number("eviction", "bins", size, 2, "1 is greedy eviction, the baseline")
    for option, value in (("recent", recent), ("sink", sink)):
        checks.whole_number("eviction", option, value, 0, "tokens that are always kept")
    check_rows("eviction", rows)
    if parse_budget(budget).kind == "bytes":
        raise MethodError("eviction: the steady size is a share of the prompt or tokens per head, not bytes")


def eviction(
    model: Any,
    prompts: Prompts,
    *,
    bins: Sequence[int] = (4, 16, 64),
    budget: float | int | str = 0.5,
    new_tokens: int = 96,
    recent: int = 0,
    sink: int = 0,
    rows: Literal["all"] | int = "all",
    to_the_end: bool = True,
    progress: Progress | None = None,
) -> Eviction:
    """Record every prompt once and replay greedy eviction and each bin on it.

    A bin stores up to D - 1 tokens more than greedy eviction with the same steady size l. It is therefore also compared
    at the same peak: l is then D - 1 tokens lower, if at least one token remains.

    Args:
        model: a model that `foveakv.compress` supports.
        prompts: one or more prompts.
        bins: values of D to compare with greedy eviction, each at least 2.
        budget: steady size l, as in `HAE`: a share of the prompt, or tokens per head.
        new_tokens: tokens to generate; the first flush of a bin is after D tokens.
        recent, sink: number of newest and oldest tokens that are never evicted; 0 in the paper.
        rows: prompt queries that count for the scores, "all" or a number of sampled rows.
        to_the_end: continue after the end of an answer, so that short answers are recorded too.
        progress: called with each label before its run.

    Raises:
        MethodError: a bin is below 2, or the budget is not larger than sink + recent.
    """
    check(prompts)
    check_settings(bins, budget, recent, sink, rows)
    parsed = parse_budget(budget)
    sizes = sorted({int(size) for size in bins})
    found: dict[tuple[int, str], list[tuple[Replay, Replay]]] = {}
    details, steady_sizes, step_counts = [], [], []
    by_step: dict[int, list[list[float]]] = {size: [] for size in (GREEDY, *sizes)}
    by_layer: dict[int, list[Tensor]] = {size: [] for size in (GREEDY, *sizes)}
    layers: tuple[int, ...] = ()
    for label, inputs in prompts.items():
        if progress is not None:
            progress(label)
        trace = record(model, label, inputs, new_tokens, rows=rows, to_the_end=to_the_end)
        layers = trace.layers
        columns = trace.prompt.shape[1]
        steady = max(1, math.floor(parsed.value * (columns if parsed.kind == "ratio" else 1)))
        if steady <= recent + sink:
            raise MethodError(
                f"eviction: {steady} tokens per head leave no room beside sink + recent tokens; raise the budget"
            )
        steady_sizes.append(steady)
        step_counts.append(len(trace.steps))
        greedy = replay(trace, RecycleBin(GREEDY, sink=sink), steady, recent)
        outcomes = {GREEDY: greedy}
        for size in sizes:
            outcomes[size] = replay(trace, RecycleBin(size, sink=sink), steady, recent)
            found.setdefault((size, "steady size"), []).append((outcomes[size], greedy))
            if steady - (size - 1) > recent + sink:
                lower = replay(trace, RecycleBin(size, sink=sink), steady - (size - 1), recent)
                found.setdefault((size, "peak"), []).append((lower, greedy))
        for size, outcome in outcomes.items():
            by_step[size].append(outcome.lost_by_step.tolist())
            by_layer[size].append(outcome.lost)
            details += [
                {
                    "prompt": label,
                    "bin": size,
                    "layer": number,
                    "steady": steady,
                    "lost": float(outcome.lost[i]),
                    "score_evicted": float(outcome.score[i]),
                    "evicted": outcome.evicted,
                    "peak": outcome.peak,
                }
                for i, number in enumerate(layers)
            ]
    return Eviction(
        labels=tuple(prompts),
        layers=layers,
        steady=tuple(steady_sizes),
        steps=tuple(step_counts),
        results=tuple(_result(size, matched, pairs) for (size, matched), pairs in found.items()),
        by_layer={size: torch.stack(values).mean(0).tolist() for size, values in by_layer.items()},
        by_step={size: _means(values) for size, values in by_step.items()},
        details=tuple(details),
        settings={
            "bins": sizes, "budget": budget, "new_tokens": new_tokens, "recent": recent, "sink": sink,
            "prompt_rows": rows, "to_the_end": to_the_end,
        },
    )  # fmt: skip


def _result(size: int, matched: str, pairs: list[tuple[Replay, Replay]]) -> BinResult:
    lost, greedy_lost = (torch.cat([pair[i].lost for pair in pairs]) for i in (0, 1))
    score, greedy_score = (torch.cat([pair[i].score for pair in pairs]) for i in (0, 1))
    return BinResult(
        size=size,
        matched="peak" if matched == "peak" else "steady size",
        traces=len(lost),
        at_most_greedy=float((lost <= greedy_lost).double().mean()),
        lost=float(lost.mean()),
        greedy_lost=float(greedy_lost.mean()),
        score_at_most_greedy=float((score <= greedy_score).double().mean()),
        evicted=fmean(pair[0].evicted for pair in pairs),
        greedy_evicted=fmean(pair[1].evicted for pair in pairs),
    )


def _means(rows: list[list[float]]) -> list[float]:
    """Return the column means of rows of different lengths."""
    return [fmean(row[t] for row in rows if t < len(row)) for t in range(max(map(len, rows)))]
