"""Which heads are static and which dynamic, and whether that is a trait of the model or of the prompt.

HybridKV (arXiv 2604.05887) calls a head static when the prompt's text rows find most of their attention in few tokens:
S, the mean of the k largest probabilities' sum (Eq. 2 and 3), is at least theta. P prompts, L layers, H KV heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from foveakv.analysis.passes import Progress, Prompts, check, run
from foveakv.errors import MethodError
from foveakv.methods import HeadMaps, Method


@dataclass(frozen=True)
class Pair:
    """How two prompts agree. correlation: Pearson's, of S over all heads; None where one of them is constant.

    changed: share of heads that are static for one prompt and dynamic for the other.
    """

    first: str
    second: str
    correlation: float | None
    changed: float


@dataclass(frozen=True)
class PromptHeads:
    """The heads of a model under P prompts.

    scores: float64 [P, L, H], S of Eq. 3, 0 to 1. static: bool [P, L, H]. budgets: int64 [P, L, H], slots that HybridKV
    gives each head. layers: the model's numbers of the L layers. tokens, visual: prompt tokens and visual tokens [P].
    """

    labels: tuple[str, ...]
    layers: tuple[int, ...]
    scores: Tensor
    static: Tensor
    budgets: Tensor
    tokens: tuple[int, ...]
    visual: tuple[int, ...]
    settings: dict[str, Any]

    @property
    def static_shares(self) -> list[float]:
        """Share of static heads, per prompt."""
        return self.static.double().flatten(1).mean(1).tolist()

    @property
    def static_frequency(self) -> Tensor:
        """Share of prompts for which a head is static: float64 [L, H]."""
        return self.static.double().mean(0)

    @property
    def steady_share(self) -> float:
        """Share of heads that have one type for all prompts."""
        often = self.static_frequency
        return float(((often == 0) | (often == 1)).double().mean())

    @property
    def pairs(self) -> list[Pair]:
        """Every two prompts."""
        return [
            Pair(
                self.labels[a],
                self.labels[b],
                correlation(self.scores[a], self.scores[b]),
                float((self.static[a] != self.static[b]).double().mean()),
            )
            for a, b in combinations(range(len(self.labels)), 2)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        prompts = [
            {
                "label": self.labels[p],
                "prompt_tokens": self.tokens[p],
                "visual_tokens": self.visual[p],
                "static_share": self.static_shares[p],
                "scores": self.scores[p].tolist(),
                "static": self.static[p].tolist(),
                "budgets": self.budgets[p].tolist(),
            }
            for p in range(len(self.labels))
        ]
        return {
            "settings": self.settings,
            "layers": list(self.layers),
            "steady_share": self.steady_share,
            "pairs": [vars(pair) for pair in self.pairs],
            "prompts": prompts,
        }

    def rows(self) -> list[dict[str, Any]]:
        """One flat row per prompt, layer and KV head, for CSV."""
        prompts, layers, heads = self.scores.shape
        return [
            {
                "prompt": self.labels[p],
                "layer": self.layers[layer],
                "kv_head": head,
                "top_k_attention": float(self.scores[p, layer, head]),
                "static": bool(self.static[p, layer, head]),
                "budget_slots": int(self.budgets[p, layer, head]),
            }
            for p in range(prompts)
            for layer in range(layers)
            for head in range(heads)
        ]


def head_maps(model: Any, prompts: Prompts, method: Method, *, progress: Progress | None = None) -> PromptHeads:
    """Reads every prompt once with the method and takes its head scores, classes and budgets.

    Scores come from the dense attention of the prompt, before anything is dropped; no answer is generated.

    Args:
        model: a model that `foveakv.compress` takes.
        prompts: one or more; heads are compared between them.
        method: a method that classifies heads, such as `HybridKV()` with its settings.
        progress: called with each label before its run.
    """
    check(prompts)
    maps: list[HeadMaps] = []
    tokens, visual = [], []
    layers: tuple[int, ...] = ()
    for label, inputs in prompts.items():
        if progress is not None:
            progress(label)
        cache, _ = run(model, inputs, method)
        heads = cache.results.heads
        if heads is None:
            raise MethodError(f"{method.name} classifies no heads; use a method that does, such as hybridkv")
        maps.append(heads)
        tokens.append(int(cache.full_prompt.real.sum()))
        visual.append(int(cache.full_prompt.visual.sum()))
        layers = tuple(layer.layer_idx for layer in cache.compressed)
    return PromptHeads(
        labels=tuple(prompts),
        layers=layers,
        scores=torch.cat([heads.scores for heads in maps]).double(),
        static=torch.cat([heads.static for heads in maps]),
        budgets=torch.cat([heads.budgets for heads in maps]),
        tokens=tuple(tokens),
        visual=tuple(visual),
        settings=method.describe(),
    )


def correlation(first: Tensor, second: Tensor) -> float | None:
    """Pearson's correlation of two equally shaped tensors over all entries; None where one of them is constant."""
    a, b = (t.double().flatten() - t.double().mean() for t in (first, second))
    spread = float(a.norm() * b.norm())
    return float(a @ b) / spread if spread > 0 else None
