"""Sparsity of attention to images and to text, and the agreement of the first layer's evictions with other layers.

HAE (arXiv 2602.02197) evicts visual tokens by the attention of the first layer alone, based on two observations:
attention to visual tokens is sparser than to text (probabilities <= 1e-4 count as zero), and the other layers would
evict mostly the same tokens. It motivates DAP by the variance of cumulative scores, too.

Notation: L layers, C prompt columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from foveakv.analysis.deciding import ROWS, Deciding, deciding, mean_of
from foveakv.analysis.passes import Progress, Prompts, check, run
from foveakv.core import attention_stats as scores
from foveakv.core.prompt import PromptMap
from foveakv.core.selection import keep_top
from foveakv.errors import MethodError, NoVisualTokensError
from foveakv.methods import checks
from foveakv.methods.base import Method
from foveakv.methods.hae import HAE
from foveakv.methods.views import Observes, PrefillView, PromptView, State

THRESHOLD = 1e-4
"""Threshold of HAE: probabilities up to it count as zero."""
PAPER_OVERLAP = 0.9
"""Overlap that the HAE paper states; it is that of Phi-3.5-Vision (90.43%)."""

Per = Literal["visible", "all"]


@dataclass(frozen=True)
class PromptSparsity:
    """Measurements of one prompt; lists have one entry per layer.

    visual, text, overall: share of the text rows' probabilities that are <= 1e-4, in visual, text, and all columns.
    overlap: share of the first layer's evictions that this layer would also make if it evicted the same number of
    tokens, those with its lowest a_j (Eq. 1). rule_overlap: the same if it evicted by the rule of the first layer (the
    same r and alpha, applied to its own attention), so that the numbers differ; rule_evicted: these numbers. Both
    overlaps are None if the first layer evicts nothing. lost: share of this layer's attention to visual tokens that
    goes to those evicted by the first layer. visual_variance, text_variance: variance of a_j over visual and over text
    tokens. deciding: each layer in the role of the first one, by `rows`. visual_tokens, evicted: numbers of tokens.
    """

    label: str
    prompt_tokens: int
    visual_tokens: int
    evicted: int
    visual: list[float]
    text: list[float]
    overall: list[float]
    overlap: list[float] | None
    rule_overlap: list[float] | None
    rule_evicted: list[int]
    lost: list[float]
    visual_variance: list[float]
    text_variance: list[float]
    deciding: dict[str, Deciding]

    @property
    def chance(self) -> float:
        """Expected overlap of two random choices, evicted / visual_tokens."""
        return self.evicted / self.visual_tokens

    @property
    def rule_chance(self) -> list[float]:
        """Expected rule_overlap if this layer's evictions were drawn at random, rule_evicted / visual_tokens."""
        return [count / self.visual_tokens for count in self.rule_evicted]


@dataclass(frozen=True)
class Sparsity:
    """Result of `sparsity`.

    layers: the model's indices of the L layers. prompts: one entry per prompt. settings: settings of HAE. per, share:
    see `sparsity`.
    """

    layers: tuple[int, ...]
    prompts: tuple[PromptSparsity, ...]
    settings: dict[str, Any]
    per: Per
    share: float

    @property
    def mean_overlap(self) -> float | None:
        """Mean overlap over prompts and layers, without the first layer (which is 1); None if nothing was evicted."""
        return _mean(value for prompt in self.prompts for value in (prompt.overlap or [])[1:])

    @property
    def mean_rule_overlap(self) -> float | None:
        """As `mean_overlap`, for evictions by the same rule."""
        return _mean(value for prompt in self.prompts for value in (prompt.rule_overlap or [])[1:])

    @property
    def layers_above_claim(self) -> float | None:
        """Share of (prompt, layer) pairs, without the first layer, whose rule_overlap is at least the paper's 90%."""
        return _mean(value >= PAPER_OVERLAP for prompt in self.prompts for value in (prompt.rule_overlap or [])[1:])

    @property
    def mean_chance(self) -> float:
        """Mean expected overlap of two random choices, over prompts."""
        return sum(prompt.chance for prompt in self.prompts) / len(self.prompts)

    @property
    def mean_rule_chance(self) -> float | None:
        """Mean of `rule_chance` over the prompts and layers of `mean_rule_overlap`."""
        return _mean(value for prompt in self.prompts if prompt.rule_overlap for value in prompt.rule_chance[1:])

    @property
    def deciding(self) -> dict[str, Deciding]:
        """Each layer in the role of the first one, mean over prompts, by `rows`."""
        return {rows: mean_of([prompt.deciding[rows] for prompt in self.prompts]) for rows in ROWS}

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "settings": self.settings,
            "threshold": THRESHOLD,
            "per": self.per,
            "share": self.share,
            "layers": list(self.layers),
            "mean_overlap": self.mean_overlap,
            "mean_chance": self.mean_chance,
            "mean_rule_overlap": self.mean_rule_overlap,
            "mean_rule_chance": self.mean_rule_chance,
            "layers_above_claim": self.layers_above_claim,
            "paper_overlap": PAPER_OVERLAP,
            "deciding": _plain(self.deciding),
            "prompts": [
                {
                    **vars(prompt), "chance": prompt.chance, "rule_chance": prompt.rule_chance,
                    "deciding": _plain(prompt.deciding),
                }
                for prompt in self.prompts
            ],
        }  # fmt: skip

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat row per prompt and layer, for CSV."""
        return [
            {
                "prompt": prompt.label,
                "layer": layer,
                "visual_sparsity": prompt.visual[i],
                "text_sparsity": prompt.text[i],
                "overall_sparsity": prompt.overall[i],
                "visual_variance": prompt.visual_variance[i],
                "text_variance": prompt.text_variance[i],
                "overlap": None if prompt.overlap is None else prompt.overlap[i],
                "rule_overlap": None if prompt.rule_overlap is None else prompt.rule_overlap[i],
                "rule_evicted": prompt.rule_evicted[i],
                "lost_visual_attention": prompt.lost[i],
                **{f"deciding_best_{rows}": prompt.deciding[rows].best[i] for rows in ROWS},
                **{f"deciding_lost_{rows}": prompt.deciding[rows].lost[i] for rows in ROWS},
                "evicted": prompt.evicted,
                "visual_tokens": prompt.visual_tokens,
            }
            for prompt in self.prompts
            for i, layer in enumerate(self.layers)
        ]


def _mean(values: Iterable[float]) -> float | None:
    every = list(values)
    return sum(every) / len(every) if every else None


def _plain(found: Mapping[str, Deciding]) -> dict[str, Any]:
    return {rows: vars(each) for rows, each in found.items()}


@dataclass
class _Measured(State):
    rows: tuple[Tensor, Tensor]
    evicted: Tensor | None = None  # by the first layer, bool [B, C]
    seeing: Tensor | None = None  # text rows that see each column, int64 [B, C]
    sums: list[Tensor] = field(default_factory=list)  # a_j per layer, [B, C]
    layers: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class SparsityProbe(Method):
    """Measure every layer of the prompt and evict nothing. rules: settings of HAE, of which those of DAP are used."""

    rules: HAE
    per: Per = "visible"

    name: ClassVar[str] = "sparsity-probe"

    @property
    def observes(self) -> Observes:
        """The text queries."""
        return Observes(queries="text")

    def begin(self, request: PromptView) -> _Measured:
        """Check that the prompt has visual tokens and select the text rows."""
        if not request.prompt.has_visual:
            raise NoVisualTokensError(
                "sparsity compares visual tokens with text, and this prompt has no image or video; add one"
            )
        return _Measured(scores.text_rows(request.prompt, max_rows=None))

    def prefill(self, view: PrefillView) -> None:
        """Measure one layer."""
        state, visual, text = view.state, view.prompt.visual, view.prompt.text
        rows, valid = state.rows
        given = view.query, view.keys, rows, valid, view.scaling, view.visible
        stats = scores.head_mean_stats(*given)
        own_rule = self.rules.redundant(stats.sums, stats.maxima, stats.variance, visual)
        if view.compressed_idx == 0:
            state.evicted = own_rule
            state.seeing = scores.seeing_rows(rows, valid, visual.shape[1], view.visible).cpu()
        evicted: Tensor = state.evicted
        sparse = scores.sparsity(*given, (visual, text, view.prompt.real), threshold=THRESHOLD, per=self.per)
        total = stats.sums.masked_fill(~visual, 0).sum(-1)
        state.sums.append(stats.sums.cpu())
        state.layers.append(
            {
                "visual": float(sparse[0, 0]),
                "text": float(sparse[1, 0]),
                "overall": float(sparse[2, 0]),
                "overlap": overlap(evicted, would_evict(stats.sums, visual, evicted.sum(-1)))[0],
                "rule_overlap": overlap(evicted, own_rule)[0],
                "rule_evicted": int(own_rule.sum()),
                "lost": float(stats.sums.masked_fill(~evicted, 0).sum(-1)[0] / total.clamp_min(1e-30)[0]),
                "visual_variance": float(stats.sums[visual].double().var(correction=0)),
                "text_variance": float(stats.sums[text].double().var(correction=0)),
            }
        )


def would_evict(sums: Tensor, visual: Tensor, count: Tensor) -> Tensor:
    """Mark the count[b] visual tokens with the lowest a_j: bool [B, C].

    sums: [B, C], a_j. visual: bool [B, C]. count: int64 [B].
    """
    return keep_top((-sums).masked_fill(~visual, -torch.inf), count)


def overlap(evicted: Tensor, own: Tensor) -> list[float | None]:
    """Return the share of `evicted` that is also in `own`, both bool [B, C]: [B], None if nothing is evicted."""
    count, both = evicted.sum(-1).tolist(), (evicted & own).sum(-1).tolist()
    return [same / n if n else None for same, n in zip(both, count, strict=True)]


def check_settings(rules: HAE, per: str, share: float) -> None:
    """Raise `MethodError` for settings of `sparsity` that are invalid for any prompt."""
    checks.choice("sparsity", "per", per, ("visible", "all"))
    checks.share("sparsity", "share", share, above_zero=True, meaning="of the visual tokens, to keep")
    if not rules.dap:
        raise MethodError("sparsity measures the evictions of DAP; leave dap=False out")


def sparsity(
    model: Any,
    prompts: Prompts,
    rules: HAE | None = None,
    *,
    per: Per = "visible",
    share: float = 0.15,
    progress: Progress | None = None,
) -> Sparsity:
    """Run the prefill of every prompt once and measure each layer; nothing is evicted and no answer is generated.

    The rows are all text tokens after the first visual token, as in DAP, for sparsity and variance too (not stated in
    the paper). Whether another layer "would evict" a token is measured by its own rule (the paper's question), and for
    the same number of tokens (not in the paper), see `PromptSparsity`.

    Args:
        model: a model that `foveakv.compress` supports.
        prompts: one or more prompts, each with at least one image or video.
        rules: settings of HAE, which determine what the first layer evicts (r, alpha, relative, target_visual_tokens,
            ...).
        per: divisor of the sparsity: "all" pairs of a row and a column (the paper's), or "visible" ones, see
            `core.attention_stats.sparsity`. The default is not the paper's: there the causal mask counts as sparsity,
            so that the figure depends on the order of text and images.
        share: share of the visual tokens that the deciding layer keeps, see `deciding.deciding`.
        progress: called with each label before its run.

    Raises:
        InputError: the prompts are not single sequences.
        NoVisualTokensError: a prompt has no image or video.
        MethodError: `rules` has dap=False, or `per` or `share` is invalid.
    """
    check(prompts)
    rules = rules or HAE()
    check_settings(rules, per, share)
    measured: list[PromptSparsity] = []
    layers: Sequence[int] = ()
    for label, inputs in prompts.items():
        if progress is not None:
            progress(label)
        cache, _ = run(model, inputs, SparsityProbe(rules, per))
        layers = [layer.layer_idx for layer in cache.compressed]
        measured.append(_measured(label, cache.state, cache.full_prompt, share))
    return Sparsity(tuple(layers), tuple(measured), rules.describe(), per, share)


def _measured(label: str, found: Any, prompt: PromptMap, share: float) -> PromptSparsity:
    if not isinstance(found, _Measured) or found.evicted is None or found.seeing is None:
        raise MethodError("sparsity: the prompt was not processed")
    per_layer: dict[str, Any] = {key: [layer[key] for layer in found.layers] for key in found.layers[0]}
    evicted = int(found.evicted.sum())
    if not evicted:
        per_layer |= {"overlap": None, "rule_overlap": None}
    visual = prompt.visual[0].cpu()
    sums = torch.stack([layer[0, visual] for layer in found.sums])
    given = sums, found.seeing[0, visual], prompt.index[0].cpu()[visual]
    return PromptSparsity(
        label=label,
        prompt_tokens=int(prompt.real.sum()),
        visual_tokens=int(prompt.visual.sum()),
        evicted=evicted,
        deciding={rows: deciding(*given, share, rows) for rows in ROWS},
        **per_layer,
    )
