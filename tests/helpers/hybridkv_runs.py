"""Runs of HybridKV on a tiny model, and its head scores computed the slow way."""

from __future__ import annotations

import functools
import math
from typing import Any

import families
import matrix
import pytest
import torch
from torch import Tensor

from foveakv.core.prompt import IMAGE, PAD, TEXT
from foveakv.kernels import cpu
from foveakv.methods.hybridkv import HybridKV

FAMILY = "qwen2_5_vl"
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
# Random weights give scores of 0.7 to 0.8; a quantile makes half of the heads static.
MIXED: dict[str, Any] = {
    "theta_quantile": 0.5, "budget": 0.5, "window": 6, "rho": 0.75, "chunk_size": 8, "digest_dtype": "model",
}  # fmt: skip
# "cpu" reads chunks in place, "blocks" copies them into slots of the segments; "auto" is one of the two.
BACKENDS = ["blocks", pytest.param("cpu", marks=pytest.mark.skipif(cpu.problem() is not None, reason="no CPU kernel"))]
needs_cpu = BACKENDS[1].marks[0]


@functools.cache
def model() -> Any:
    return families.build(FAMILY)


@functools.cache
def prompt() -> Any:
    return families.prompt(FAMILY, images=3, text=20)


@functools.cache
def batch() -> families.Batch:
    return families.batch(FAMILY)


def generated(method: HybridKV, inputs: Any = None, *, backend: str = "auto", **options: Any) -> matrix.Run:
    options = {**GREEDY, **options}
    return matrix.compressed(model(), method, inputs or prompt(), session_options={"backend": backend}, **options)


def run(method: HybridKV, inputs: Any = None, **options: Any) -> tuple[Tensor, list[Tensor], Any]:
    """Tokens, logits of every step, and the session."""
    found = generated(method, inputs, **options)
    return found.tokens, found.logits, found.session


def check_reference(method: HybridKV, inputs: Any = None, *, backend: str = "auto", **options: Any) -> Any:
    """Every step's logits are those of the plain model attending to the same positions."""
    inputs = inputs or prompt()
    found = generated(method, inputs, backend=backend, **options)
    matrix.check_against_reference(model(), found, inputs, 1e-5, **{**GREEDY, **options})
    return found.session


def attentions(inputs: Any) -> list[Tensor]:
    """[B, Hq, C, C] of every layer, from the plain model."""
    plain = families.build(FAMILY)
    plain.set_attn_implementation("eager")
    with torch.no_grad():
        return list(plain(**inputs, output_attentions=True).attentions)


def naive_score(probabilities: Tensor, kinds: Tensor, rows: str, ratio: float = 0.05) -> list[float]:
    """S of each KV head of one layer and sequence: probabilities [Hq, C, C], kinds [C]."""
    real = [c for c in range(len(kinds)) if kinds[c] != PAD]
    text = [c for c in real if kinds[c] == TEXT]
    visual = [c for c in real if kinds[c] == IMAGE]
    if rows == "after_visual" and visual:
        text = [c for c in text if c > visual[0]]
    k = math.ceil(ratio * len(real) - 1e-9)
    group = families.HEADS // families.KV_HEADS
    scores = []
    for h in range(families.KV_HEADS):
        sums = [
            sum(sorted(probabilities[h * group + g, c].tolist(), reverse=True)[:k]) for g in range(group) for c in text
        ]
        scores.append(sum(sums) / len(sums))
    return scores
