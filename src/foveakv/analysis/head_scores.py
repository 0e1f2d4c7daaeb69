"""Which heads look at pictures: visual head scores, made once per model, and their files.

After SparseMM (Wang et al., arXiv 2506.05344): the model reads out what stands in a picture, and a head scores whenever
its strongest attention falls on the very place that the generated token names. The method `sparsemm` uses the scores.

    samples = [HeadSample("What is written here? <image>", ["sign.png"], [Target("EXIT", box=(0.1, 0.2, 0.5, 0.4))])]
    save_head_scores(visual_head_scores(model, processor, samples), "scores.json")
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from foveakv.errors import InputError
from foveakv.methods.base import DecodeView, Method, PrefillView
from foveakv.methods.head_files import load_head_scores, read_head_scores, save_head_scores

if TYPE_CHECKING:
    from PIL.Image import Image

    from foveakv.core.prompt import PromptMap

__all__ = [
    "HeadSample",
    "Target",
    "load_head_scores",
    "read_head_scores",
    "save_head_scores",
    "target_places",
    "visual_head_scores",
]


@dataclass(frozen=True)
class Target:
    """Something that can be read or named in a picture.

    text: what the model should write. image: in which of the sample's pictures, from 0. box: where in it, (left, top,
    right, bottom) as shares of its width and height; None = anywhere in it.
    """

    text: str
    image: int = 0
    box: tuple[float, float, float, float] | None = None


@dataclass(frozen=True)
class HeadSample:
    """A prompt about pictures whose answer names things in them.

    text: the question; `<image>` marks the places of the pictures. targets: what the answer may name; without any,
    every generated token is taken to name something anywhere in the pictures.
    """

    text: str
    images: Sequence[str | Path | Image]
    targets: Sequence[Target] = ()


@dataclass
class _Watcher(Method):
    """Keeps everything and notes where every query head looks most when it makes a token."""

    name: ClassVar[str] = "head scores"

    @property
    def retrieves(self) -> bool:
        return True

    def prefill(self, view: PrefillView) -> None:
        last = torch.full((1, 1), view.keys.shape[-2] - 1, device=view.keys.device)
        seen = None if view.visible is None else view.visible(last)[0, 0, 0]  # [C]
        self._note(view.state, view.query[..., -1:, :], view.keys, seen)

    def before_attention(self, view: DecodeView) -> None:
        # nothing was dropped, so slots stand in the order of positions
        self._note(view.state, view.query, view.segments.gather()[0], None)

    def _note(self, state: dict[str, Any], query: Tensor, keys: Tensor, seen: Tensor | None) -> None:
        """query [1, Hq, 1, D], keys [1, H, M, D]; the softmax does not change which column is the highest."""
        heads = keys.shape[1]
        grouped = query[0, :, 0].view(heads, -1, query.shape[-1]).float()
        logits = grouped @ keys[0].float().mT  # [H, G, M]
        if seen is not None:
            logits = logits.masked_fill(~seen, -torch.inf)
        state.setdefault("looks", []).append(logits.argmax(-1).cpu())  # [H, G]


def visual_head_scores(
    model: Any, processor: Any, samples: Iterable[HeadSample], *, max_new_tokens: int = 64
) -> Tensor:
    """Visual scores of all heads, float32 [layers, KV heads], for `sparsemm` and `save_head_scores`.

    The model answers every sample greedily with its full cache. For every generated token whose text occurs in exactly
    one target, each query head whose strongest attention lies in the target's place gets 1 / (tokens of that place). A
    head's score is the mean over samples, a KV head's the sum over its query heads. This is the paper's procedure on
    OCR data, with its code's rule for tokens that fit several targets.

    Not stated, since the paper has a box for every word; we take the whole picture as the place of a target without a
    box, and all pictures where a sample has no targets: a coarser measure, which tells heads that look at the right
    picture (or at any) from the others. Layers whose cache is not compressed (sliding windows) score 0.

    InputError: a sample cannot be used, or no generated token named a target.
    """
    from foveakv.engines.transformers.api import compress
    from foveakv.models.images import read_images
    from foveakv.models.inputs import build_inputs

    tokenizer = getattr(processor, "tokenizer", processor)
    total: Tensor | None = None
    count = named = 0
    for sample in samples:
        pictures = read_images(sample.images)
        inputs = build_inputs(processor, sample.text, pictures, model=model)
        with torch.no_grad(), compress(model, _Watcher()) as session:
            output = model.generate(
                **inputs, max_new_tokens=max_new_tokens, do_sample=False, num_beams=1, return_dict_in_generate=False
            )
            cache = session.cache
        places = target_places(cache.full_prompt, pictures, sample.targets)
        looks = {layer.layer_idx: torch.stack(layer.state["looks"]) for layer in cache.compressed}  # [steps, H, G]
        if total is None:
            total = torch.zeros(len(cache.layers), next(iter(looks.values())).shape[1])
        for step, token in enumerate(output[0, cache.prompt_columns :].tolist()):
            place = _place_of(tokenizer.decode([token]).strip(), sample.targets, places)
            if place is None:
                continue
            named += 1
            for layer, columns in looks.items():
                total[layer] += torch.isin(columns[step], place).sum(-1) / len(place)
        count += 1
    if total is None or not named:
        raise InputError(
            f"head scores: none of the tokens that the model generated for {count} samples names a target; give "
            "samples whose answers the model knows, and targets with the words of these answers"
        )
    return total / count


def target_places(prompt: PromptMap, pictures: Sequence[Image], targets: Sequence[Target]) -> list[Tensor]:
    """The columns of the prompt where each target is, int64 [n] each; without targets those of all pictures."""
    from foveakv.core.patches import image_columns, patch_grid

    columns = [own.cpu() for own in image_columns(prompt, pictures)]
    if not targets:
        return [torch.cat(columns)] if columns else []
    places = []
    for target in targets:
        if not 0 <= target.image < len(columns):
            raise InputError(f"head scores: target {target.text!r} is in picture {target.image} of {len(columns)}")
        own = columns[target.image]
        if target.box is not None:
            left, top, right, bottom = target.box
            if not (0 <= left < right <= 1 and 0 <= top < bottom <= 1):
                raise InputError(
                    f"head scores: box {target.box} of {target.text!r} must be (left, top, right, bottom) in shares of "
                    "the picture, from 0 to 1"
                )
            grid = patch_grid(len(own), pictures[target.image].size)
            if grid is None:
                raise InputError(
                    f"head scores: the {len(own)} tokens of picture {target.image} form no grid that a box could be "
                    "laid over; leave the boxes out"
                )
            across = slice(math.floor(left * grid[1]), math.ceil(right * grid[1]))
            down = slice(math.floor(top * grid[0]), math.ceil(bottom * grid[0]))
            own = own.view(grid)[down, across].flatten()
        places.append(own)
    return places


def _place_of(word: str, targets: Sequence[Target], places: Sequence[Tensor]) -> Tensor | None:
    """The place that a generated token names; None where it names nothing, or more than one target fits."""
    if not targets:
        return places[0] if places else None
    fitting = [place for target, place in zip(targets, places, strict=True) if word and word in target.text]
    return fitting[0] if len(fitting) == 1 else None
