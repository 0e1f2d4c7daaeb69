"""Build the inputs of `generate` from a question and images. All checks that can fail run before the model does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from foveakv.errors import InputError
from foveakv.models.images import image_list, read_image

if TYPE_CHECKING:
    from foveakv.models.images import ImageSource

PLACEHOLDER = "<image>"
"""Marks the place of an image in a prompt, whatever the model's own image token is called."""


def build_inputs(
    processor: Any,
    prompt: str,
    images: ImageSource | Sequence[ImageSource] = (),
    *,
    model: Any = None,
    allow_urls: bool = False,
) -> dict[str, Any]:
    """Build the inputs of `model.generate` for one prompt.

    Args:
        processor: the model's processor, or a plain tokenizer for a text-only model.
        prompt: the question. `<image>` (or the model's own image token) marks the place of each image; without any
            mark the images come first. A processor with a chat template gets the prompt as one user message.
        images: one image or several, in the order of the marks: whatever `read_image` takes. Arrays and tensors are
            handed to the processor unchanged.
        model: if given, tensors are moved to its device and pixels cast to its dtype.
        allow_urls: fetch images that are given as http(s) URLs.

    Returns:
        The processor's outputs with a batch of one, such as `input_ids` [1, tokens] and `pixel_values`.

    Raises:
        InputError: an image cannot be read, the numbers of marks and images differ, or the model takes no images.
    """
    given = [each if hasattr(each, "shape") else read_image(each, allow_urls=allow_urls) for each in image_list(images)]
    pieces = _split(processor, prompt, len(given))
    if given and getattr(processor, "image_processor", None) is None:
        raise InputError(
            f"{type(processor).__name__} takes no images, and {len(given)} were given; is this a text-only model?"
        )
    return process(processor, _render(processor, pieces), given, model)


def process(
    processor: Any, text: str, images: Sequence[Any], model: Any = None, *, begins: bool = True
) -> dict[str, Any]:
    """Run the processor on a complete prompt text, in which the model's image token marks the place of each image.

    begins: False for a later part of a context, which gets no special tokens at its start.

    Returns and errors: see `build_inputs`.
    """
    options: dict[str, Any] = {"text": text, "return_tensors": "pt"}
    bos = getattr(getattr(processor, "tokenizer", processor), "bos_token", None)
    if not begins or (bos and text.startswith(bos)):
        options["add_special_tokens"] = False  # the template wrote it already
    if images:
        options["images"] = list(images)
    try:
        inputs = dict(processor(**options))
    except (ValueError, IndexError, TypeError) as error:
        what = f"{type(processor).__name__} refused this prompt with {len(images)} images"
        raise InputError(f"{what}: {error}") from error
    return inputs if model is None else _move(inputs, model)


def _own_token(processor: Any) -> str | None:
    token = getattr(processor, "image_token", None)
    return str(token) if token is not None else None


def _cut(processor: Any, prompt: str) -> list[str]:
    token = _own_token(processor)
    return prompt.replace(token, PLACEHOLDER).split(PLACEHOLDER) if token else prompt.split(PLACEHOLDER)


def _split(processor: Any, prompt: str, images: int) -> list[str]:
    """The texts between the images: images + 1 pieces."""
    if not prompt.strip():
        raise InputError("the prompt is empty")
    try:
        prompt.encode("utf8")
    except UnicodeEncodeError:
        raise InputError("the prompt is not valid Unicode text (it has bytes that are not UTF-8)") from None
    pieces = _cut(processor, prompt)
    marks = len(pieces) - 1
    if marks == 0 and images:
        return [""] * images + [prompt]
    if marks != images:
        raise InputError(
            f"the prompt has {marks} {PLACEHOLDER} mark{'s' if marks != 1 else ''} and {images} "
            f"image{'s were' if images != 1 else ' was'} given; give as many images as marks, or leave the marks out"
        )
    return pieces


def _render(processor: Any, pieces: list[str]) -> str:
    if getattr(processor, "chat_template", None) is None or not hasattr(processor, "apply_chat_template"):
        # Images that come first get a line each.
        token = _own_token(processor) or PLACEHOLDER
        marked = [piece or "\n" if 0 < i < len(pieces) - 1 else piece for i, piece in enumerate(pieces)]
        if len(pieces) > 1 and not any(pieces[:-1]):
            marked[-1] = "\n" + marked[-1].lstrip("\n")
        return token.join(marked)
    content: list[dict[str, str]] = []
    for i, piece in enumerate(pieces):
        if i:
            content.append({"type": "image"})
        if piece:
            content.append({"type": "text", "text": piece})
    is_processor = getattr(processor, "tokenizer", None) is not None
    message = {"role": "user", "content": content if is_processor else pieces[0]}
    try:
        return str(processor.apply_chat_template([message], add_generation_prompt=True, tokenize=False))
    except Exception as error:  # a template is a program of the model's authors and may raise anything
        raise InputError(f"the chat template of {type(processor).__name__} failed on this prompt: {error}") from error


def _move(inputs: dict[str, Any], model: Any) -> dict[str, Any]:
    import torch

    moved = {}
    for key, value in inputs.items():
        if isinstance(value, torch.Tensor):
            value = value.to(model.device)
            if value.is_floating_point():
                value = value.to(model.dtype)
        moved[key] = value
    return moved
