"""Static and dynamic heads of a model, and how much their classification depends on the prompt.

In HybridKV (arXiv 2604.05887) a head is static if the attention of the prompt's text rows is concentrated on few
tokens: S, the mean of the sum of the k largest probabilities (Eq. 2 and 3), is at least theta.

Notation: P prompts, L layers, H KV heads.
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
    """Agreement of two prompts.

    first, second: labels of the prompts. correlation: Pearson correlation of S over all heads; None if one of them is
    constant. changed: share of heads that are static for one prompt and dynamic for the other.
    """

    first: str
    second: str
    correlation: float | None
    changed: float


@dataclass(frozen=True)
class PromptHeads:
    """Classification of a model's heads for P prompts.

    labels: labels of the prompts. layers: the model's indices of the L layers. scores: float64 [P, L, H], S of Eq. 3, 0
    to 1. static: bool [P, L, H]. budgets: int64 [P, L, H], slots that HybridKV allocates to each head. tokens, visual:
    prompt tokens and visual tokens [P]. settings: settings of the method.
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
        """Share of prompts for which each head is static: float64 [L, H]."""
        return self.static.double().mean(0)

    @property
    def steady_share(self) -> float:
        """Share of heads that have the same type for all prompts."""
        often = self.static_frequency
        return float(((often == 0) | (often == 1)).double().mean())

    @property
    def pairs(self) -> list[Pair]:
        """Agreement of every pair of prompts."""
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
        """Return plain values for JSON."""
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
        """Return one flat row per prompt, layer and KV head, for CSV."""
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
    """Run the prefill of every prompt once with the method and collect its head scores, classes and budgets.

    Scores are from the dense attention of the prompt, before anything is evicted; no answer is generated.

    Args:
        model: a model that `foveakv.compress` supports.
        prompts: one or more prompts, between which heads are compared.
        method: a method that classifies heads, such as `HybridKV()` with its settings.
        progress: called with each label before its run.

    Raises:
        InputError: the prompts are not single sequences.
        MethodError: the method does not classify heads.
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
            raise MethodError(f"{method.name} does not classify heads; use a method that does, such as hybridkv")
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
    """Return the Pearson correlation of two tensors of the same shape over all entries; None if one is constant."""
    a, b = (t.double().flatten() - t.double().mean() for t in (first, second))
    spread = float(a.norm() * b.norm())
    return float(a @ b) / spread if spread > 0 else None
