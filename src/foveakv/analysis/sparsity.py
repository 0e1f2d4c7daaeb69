"""Sparsity of attention to images and to text, and the agreement of the first layer's evictions with other layers.

HAE (arXiv 2602.02197) evicts visual tokens by the attention of the first layer alone, based on two observations:
attention to visual tokens is sparser than to text (probabilities <= 1e-4 count as zero), and the other layers would
evict mostly the same tokens.

Notation: L layers, C prompt columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from foveakv.analysis.passes import Progress, Prompts, check, run
from foveakv.core import attention_stats as scores
from foveakv.core.selection import keep_top
from foveakv.errors import MethodError, NoVisualTokensError
from foveakv.methods.base import Method
from foveakv.methods.hae import HAE
from foveakv.methods.views import Observes, PrefillView, PromptView, State

THRESHOLD = 1e-4
"""Threshold of HAE: probabilities up to it count as zero."""
PAPER_OVERLAP = 0.9
"""Overlap that the HAE paper states for its models."""


@dataclass(frozen=True)
class PromptSparsity:
    """Measurements of one prompt; lists have one entry per layer.

    visual, text: share of the text rows' probabilities that are <= 1e-4, among visible visual and text columns.
    overlap: share of the visual tokens evicted by the first layer that this layer would also evict if it evicted the
    same number by its own a_j (Eq. 1); None if the first layer evicts none. lost: share of this layer's attention to
    visual tokens that goes to those evicted by the first layer. visual_tokens, evicted: numbers of tokens.
    """

    label: str
    prompt_tokens: int
    visual_tokens: int
    evicted: int
    visual: list[float]
    text: list[float]
    overlap: list[float] | None
    lost: list[float]

    @property
    def chance(self) -> float:
        """Expected overlap of two random choices, evicted / visual_tokens."""
        return self.evicted / self.visual_tokens


@dataclass(frozen=True)
class Sparsity:
    """Result of `sparsity`.

    layers: the model's indices of the L layers. prompts: one entry per prompt. settings: settings of HAE.
    """

    layers: tuple[int, ...]
    prompts: tuple[PromptSparsity, ...]
    settings: dict[str, Any]

    @property
    def mean_overlap(self) -> float | None:
        """Mean overlap over prompts and layers, without the first layer (which is 1); None if nothing was evicted."""
        values = [value for prompt in self.prompts for value in (prompt.overlap or [])[1:]]
        return sum(values) / len(values) if values else None

    @property
    def layers_above_claim(self) -> float | None:
        """Share of (prompt, layer) pairs, without the first layer, whose overlap is at least the paper's 90%."""
        values = [value for prompt in self.prompts for value in (prompt.overlap or [])[1:]]
        return sum(value >= PAPER_OVERLAP for value in values) / len(values) if values else None

    @property
    def mean_chance(self) -> float:
        """Mean expected overlap of two random choices, over prompts."""
        return sum(prompt.chance for prompt in self.prompts) / len(self.prompts)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "settings": self.settings,
            "threshold": THRESHOLD,
            "layers": list(self.layers),
            "mean_overlap": self.mean_overlap,
            "mean_chance": self.mean_chance,
            "layers_above_claim": self.layers_above_claim,
            "paper_overlap": PAPER_OVERLAP,
            "prompts": [{**vars(prompt), "chance": prompt.chance} for prompt in self.prompts],
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat row per prompt and layer, for CSV."""
        return [
            {
                "prompt": prompt.label,
                "layer": layer,
                "visual_sparsity": prompt.visual[i],
                "text_sparsity": prompt.text[i],
                "overlap": None if prompt.overlap is None else prompt.overlap[i],
                "lost_visual_attention": prompt.lost[i],
                "evicted": prompt.evicted,
                "visual_tokens": prompt.visual_tokens,
            }
            for prompt in self.prompts
            for i, layer in enumerate(self.layers)
        ]


@dataclass
class _Measured(State):
    rows: tuple[Tensor, Tensor]
    evicted: Tensor | None = None  # by the first layer, bool [B, C]
    layers: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class SparsityProbe(Method):
    """Measure every layer of the prompt and evict nothing. rules: settings of HAE, of which those of DAP are used."""

    rules: HAE

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
        if view.compressed_idx == 0:
            state.evicted = self.rules.redundant(stats.sums, stats.maxima, stats.variance, visual)
        evicted: Tensor = state.evicted
        sparse = scores.sparsity(*given, (visual, text), threshold=THRESHOLD)
        own = would_evict(stats.sums, visual, evicted.sum(-1))
        total = stats.sums.masked_fill(~visual, 0).sum(-1)
        state.layers.append(
            {
                "visual": float(sparse[0, 0]),
                "text": float(sparse[1, 0]),
                "overlap": overlap(evicted, own)[0],
                "lost": float(stats.sums.masked_fill(~evicted, 0).sum(-1)[0] / total.clamp_min(1e-30)[0]),
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


def sparsity(model: Any, prompts: Prompts, rules: HAE | None = None, *, progress: Progress | None = None) -> Sparsity:
    """Run the prefill of every prompt once and measure each layer; nothing is evicted and no answer is generated.

    The rows are all text tokens after the first visual token, as in DAP. The paper does not state what another layer
    "would evict"; we let every layer evict as many tokens as the first one, those with its lowest a_j.

    Args:
        model: a model that `foveakv.compress` supports.
        prompts: one or more prompts, each with at least one image or video.
        rules: settings of HAE, which determine what the first layer evicts (r, alpha, relative, target_visual_tokens,
            ...).
        progress: called with each label before its run.

    Raises:
        InputError: the prompts are not single sequences.
        NoVisualTokensError: a prompt has no image or video.
        MethodError: `rules` has dap=False.
    """
    check(prompts)
    rules = rules or HAE()
    if not rules.dap:
        raise MethodError("sparsity measures the evictions of DAP; leave dap=False out")
    measured: list[PromptSparsity] = []
    layers: Sequence[int] = ()
    for label, inputs in prompts.items():
        if progress is not None:
            progress(label)
        cache, _ = run(model, inputs, SparsityProbe(rules))
        found, prompt = cache.state, cache.full_prompt
        if not isinstance(found, _Measured) or found.evicted is None:
            raise MethodError("sparsity: the prompt was not processed")
        layers = [layer.layer_idx for layer in cache.compressed]
        per_layer = {key: [layer[key] for layer in found.layers] for key in ("visual", "text", "overlap", "lost")}
        evicted = int(found.evicted.sum())
        if not evicted:
            per_layer["overlap"] = None  # type: ignore[assignment]
        measured.append(
            PromptSparsity(
                label=label,
                prompt_tokens=int(prompt.real.sum()),
                visual_tokens=int(prompt.visual.sum()),
                evicted=evicted,
                **per_layer,
            )
        )
    return Sparsity(tuple(layers), tuple(measured), rules.describe())
