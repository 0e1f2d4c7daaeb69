"""Image patches that a method keeps: per layer, per head, averaged, and per decode step.

Notation: C prompt columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foveakv.analysis.passes import check, run
from foveakv.core.columns import held_share
from foveakv.core.prompt import PromptMap
from foveakv.errors import InputError, MethodError
from foveakv.methods import Method

if TYPE_CHECKING:
    from foveakv.engines.transformers.cache import CompressedCache


@dataclass(frozen=True)
class Share:
    """Share of (layer, KV head) pairs that store each prompt column.

    label: what the share is of, such as "layer 3". heads: number of pairs. columns: float32 [C], the shares.
    """

    label: str
    heads: int
    columns: Tensor


@dataclass(frozen=True)
class Shown:
    """The prompt columns that a method kept for one prompt.

    rows: at the end of the answer, one per requested layer, or one for all. steps: columns that each decode step
    attended to; with HybridKV, of dynamic heads only. tokens: token ids of the answer; step s (from 0) reads tokens[s]
    and generates tokens[s + 1]. prompt: map of the prompt. settings: settings of the method.
    """

    rows: tuple[Share, ...]
    steps: tuple[Share, ...]
    tokens: tuple[int, ...]
    prompt: PromptMap
    settings: dict[str, Any]

    def to_dict(self, images: Sequence[Tensor]) -> dict[str, Any]:
        """Return plain values for JSON. images: the prompt columns of every image (`core.patches.image_columns`)."""

        def plain(share: Share) -> dict[str, Any]:
            values = [[round(value, 6) for value in share.columns[own].tolist()] for own in images]
            return {"label": share.label, "heads": share.heads, "images": values}

        return {
            "settings": self.settings,
            "tokens": list(self.tokens),
            "rows": [plain(row) for row in self.rows],
            "steps": [plain(step) for step in self.steps],
        }

    def table_rows(self, images: Sequence[Tensor]) -> list[dict[str, Any]]:
        """Return one flat row per share, image and patch, for CSV. images: as in `to_dict`."""
        return [
            {"when": when, "label": share.label, "image": i + 1, "patch": patch, "share": round(value, 6)}
            for when, shares in (("end", self.rows), ("step", self.steps))
            for share in shares
            for i, own in enumerate(images)
            for patch, value in enumerate(share.columns[own].tolist())
        ]


def shown(
    model: Any,
    inputs: Mapping[str, Any],
    method: Method,
    *,
    new_tokens: int = 16,
    layers: Sequence[int] | None = None,
    head: int | None = None,
    each: bool = False,
    steps: bool = False,
    to_the_end: bool = False,
) -> Shown:
    """Answer one prompt with a method and return the prompt columns that it keeps.

    Args:
        model: a model that `foveakv.compress` supports.
        inputs: inputs of `generate` for one sequence.
        method: any method.
        new_tokens: the most tokens to generate.
        layers: the model's indices of the layers to include; None = all compressed layers.
        head: include only this KV head of each layer; None = all.
        each: return one row per layer; False averages over layers.
        steps: also return the columns that each decode step attended to, averaged. The positions of all slots are kept
            in memory for all steps during the run.
        to_the_end: generate all new tokens, also after the end of the answer.

    Raises:
        MethodError: a layer is not compressed.
        InputError: the model does not have this head, or `steps` is set and the answer has no decode step or none of
            the requested heads retrieves.
    """
    check({"prompt": inputs})
    cache, tokens = run(model, inputs, method, new_tokens, to_the_end=to_the_end, trace=steps)
    numbers = [layer.layer_idx for layer in cache.compressed]
    asked = numbers if layers is None else list(dict.fromkeys(layers))
    pairs = _pairs(cache, asked, head)
    suffix = "" if head is None else f", head {head}"
    if each:
        rows = [_share(cache, {n: cache.kept(n)}, {n: pairs[n]}, f"layer {n}{suffix}") for n in asked]
    else:
        label = "all layers" if layers is None else "layer " + ", ".join(map(str, asked))
        rows = [_share(cache, {n: cache.kept(n) for n in asked}, pairs, label + suffix)]
    return Shown(
        rows=tuple(rows),
        steps=tuple(_steps(cache, pairs) if steps else ()),
        tokens=tuple(tokens),
        prompt=cache.full_prompt.to("cpu"),
        settings=method.describe(),
    )


def _pairs(cache: CompressedCache, layers: Sequence[int], head: int | None) -> dict[int, Tensor]:
    """Map each layer to the heads to include, bool [H]."""
    found = {}
    for number in layers:
        heads = cache.kept(number).shape[1]
        if head is not None and not 0 <= head < heads:
            raise InputError(f"there is no KV head {head}: this model has heads 0 to {heads - 1}")
        found[number] = torch.tensor([head in (None, h) for h in range(heads)])
    return found


def _share(cache: CompressedCache, positions: Mapping[int, Tensor], pairs: Mapping[int, Tensor], label: str) -> Share:
    """Compute the share of the selected heads that store each column; positions: layer -> [1, H, M], -1 = none."""
    held = (positions[number][0].cpu()[wanted] for number, wanted in pairs.items())
    share, heads = held_share(held, cache.prompt_columns)
    return Share(label, heads, share)


def _steps(cache: CompressedCache, pairs: Mapping[int, Tensor]) -> list[Share]:
    heads = cache.results.heads
    if heads is not None:
        dynamic = {layer.layer_idx: ~heads.static[0, layer.compressed_idx] for layer in cache.compressed}
        pairs = {number: wanted & dynamic[number] for number, wanted in pairs.items()}
        if not any(bool(wanted.any()) for wanted in pairs.values()):
            raise InputError("none of these heads retrieves: all are static and keep the same patches in every step")
    trace = cache.trace
    if trace is None:
        raise MethodError("the decode steps of this run were not recorded; run it with trace=True")
    decoded = [step for step in trace if step]
    if not decoded:
        raise InputError(
            "the answer has one token, which comes from the prompt's forward pass, so there is no decode step to show; "
            "raise the number of new tokens"
        )
    return [_share(cache, step, pairs, f"step {s + 1}") for s, step in enumerate(decoded)]
