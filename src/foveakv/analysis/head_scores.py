"""Visual head scores, measured once per model, as in SparseMM (Wang et al., arXiv 2506.05344).

The model names what an image shows, and a head scores if its strongest attention is on the region that the generated
token names. The method `sparsemm` uses the scores.

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
from foveakv.methods.base import Method
from foveakv.methods.head_files import load_head_scores, read_head_scores, save_head_scores
from foveakv.methods.views import DecodeView, LayerView, Observes, PrefillView, PromptView, State

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
    """Something in an image that can be read or named.

    text: the text that the model should generate. image: index of the image in the sample, from 0. box: the region
    (left, top, right, bottom) as shares of the image's width and height; None = the whole image.
    """

    text: str
    image: int = 0
    box: tuple[float, float, float, float] | None = None


@dataclass(frozen=True)
class HeadSample:
    """A prompt about images whose answer names things in them.

    text: the question; `<image>` marks the positions of the images. images: files or images. targets: what the answer
    may name; without targets, every generated token counts as naming something anywhere in the images.
    """

    text: str
    images: Sequence[str | Path | Image]
    targets: Sequence[Target] = ()


@dataclass
class _Looks(State):
    """For every layer, the column that each query head attends to most, per generated token: int64 [H, G]."""

    layers: list[list[Tensor]]


@dataclass
class _Watcher(Method):
    """Keep everything and record the column that every query head attends to most for each generated token."""

    name: ClassVar[str] = "head scores"

    @property
    def observes(self) -> Observes:
        return Observes(queries="window", steps=True)

    def begin(self, request: PromptView) -> _Looks:
        return _Looks([[] for _ in request.layers])

    def prefill(self, view: PrefillView) -> None:
        last = torch.full((1, 1), view.keys.shape[-2] - 1, device=view.keys.device)
        seen = None if view.visible is None else view.visible(last)[0, 0, 0]  # [C]
        self._note(view, view.query[..., -1:, :], view.keys, seen)

    def decode(self, view: DecodeView) -> None:
        # Nothing was evicted, so slots are stored in the order of positions.
        self._note(view, view.query, view.slots.keys(), None)

    def _note(self, view: LayerView, query: Tensor, keys: Tensor, seen: Tensor | None) -> None:
        """Record the columns with the highest logits; query: [1, Hq, 1, D], keys: [1, H, M, D]."""
        heads = keys.shape[1]
        grouped = query[0, :, 0].view(heads, -1, query.shape[-1]).float()
        logits = grouped @ keys[0].float().mT  # [H, G, M]
        if seen is not None:
            logits = logits.masked_fill(~seen, -torch.inf)
        view.state.layers[view.compressed_idx].append(logits.argmax(-1).cpu())  # [H, G]


def visual_head_scores(
    model: Any, processor: Any, samples: Iterable[HeadSample], *, max_new_tokens: int = 64
) -> Tensor:
    """Measure the visual scores of all heads, for `sparsemm` and `save_head_scores`.

    The model answers every sample greedily with a full cache. For every generated token whose text occurs in exactly
    one target, each query head whose strongest attention is in the target's region gets 1 / (tokens of the region). The
    score of a query head is the mean over samples, that of a KV head the sum over its query heads. This is the paper's
    procedure on OCR data, with the rule of its code for tokens that match several targets.

    Not stated in the paper, which has a box for every word; we use the whole image as the region of a target without a
    box, and all images if a sample has no targets. This measure is coarser: it distinguishes heads that attend to the
    right image (or to any image) from the others. Layers whose cache is not compressed (sliding window) score 0.

    Args:
        model: a model that `foveakv.compress` supports.
        processor: its processor.
        samples: prompts whose answers the model knows.
        max_new_tokens: the most tokens to generate per sample.

    Returns:
        float32 [layers, KV heads].

    Raises:
        InputError: a sample is invalid, or no generated token named a target.
    """
    from foveakv.engines.transformers.api import compress
    from foveakv.models.images import read_images
    from foveakv.models.inputs import build_inputs

    tokenizer = getattr(processor, "tokenizer", processor)
    total: Tensor | None = None
    count = named = 0
    for sample in samples:
        images = read_images(sample.images)
        inputs = build_inputs(processor, sample.text, images, model=model)
        with torch.no_grad(), compress(model, _Watcher()) as session:
            output = model.generate(
                **inputs, max_new_tokens=max_new_tokens, do_sample=False, num_beams=1, return_dict_in_generate=False
            )
            cache = session.cache
        places = target_places(cache.full_prompt, images, sample.targets)
        noted = cache.state.layers if isinstance(cache.state, _Looks) else []
        looks = {layer.layer_idx: torch.stack(own) for layer, own in zip(cache.compressed, noted, strict=True)}
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


def target_places(prompt: PromptMap, images: Sequence[Image], targets: Sequence[Target]) -> list[Tensor]:
    """Return the prompt columns of each target's region, int64 [n] each; without targets, those of all images.

    Raises:
        InputError: a target has an invalid image or box, or the image tokens do not form a grid.
    """
    from foveakv.core.patches import image_columns, patch_grid

    columns = [own.cpu() for own in image_columns(prompt, images)]
    if not targets:
        return [torch.cat(columns)] if columns else []
    places = []
    for target in targets:
        if not 0 <= target.image < len(columns):
            raise InputError(
                f"head scores: image={target.image} of target {target.text!r} is out of range; images are counted from "
                f"0, and the sample has {len(columns)}"
            )
        own = columns[target.image]
        if target.box is not None:
            left, top, right, bottom = target.box
            if not (0 <= left < right <= 1 and 0 <= top < bottom <= 1):
                raise InputError(
                    f"head scores: box {target.box} of {target.text!r} must be (left, top, right, bottom) in shares of "
                    "the image, from 0 to 1"
                )
            grid = patch_grid(len(own), images[target.image].size)
            if grid is None:
                raise InputError(
                    f"head scores: the {len(own)} tokens of image {target.image} form no grid to apply a box to; "
                    "leave the boxes out"
                )
            across = slice(math.floor(left * grid[1]), math.ceil(right * grid[1]))
            down = slice(math.floor(top * grid[0]), math.ceil(bottom * grid[0]))
            own = own.view(grid)[down, across].flatten()
        places.append(own)
    return places


def _place_of(word: str, targets: Sequence[Target], places: Sequence[Tensor]) -> Tensor | None:
    """Return the region that a generated token names; None if it matches no target or more than one."""
    if not targets:
        return places[0] if places else None
    fitting = [place for target, place in zip(targets, places, strict=True) if word and word in target.text]
    return fitting[0] if len(fitting) == 1 else None
