"""Pictures and a question -> the inputs that `generate` takes, with every check that can fail before the model runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foveakv.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

PLACEHOLDER = "<image>"
"""Marks the place of a picture in a prompt, whatever the model's own image token is called."""


def read_image(path: str | Path) -> Image:
    """One picture from a file, decoded completely, as RGB.

    Raises:
        InputError: the file is missing, is no picture, or is cut short; the message names it.
    """
    from PIL import Image, UnidentifiedImageError

    path = Path(path)
    if not path.exists():
        raise InputError(f"image file not found: {path}")
    if path.is_dir():
        raise InputError(f"{path} is a folder; give one picture file per --image")
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except UnidentifiedImageError as error:
        raise InputError(f"{path} is not a picture that Pillow can read (PNG, JPEG, WebP, ...)") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise InputError(f"{path} is damaged or cut short: {error}") from error


def read_images(paths: Sequence[str | Path]) -> list[Image]:
    return [read_image(path) for path in paths]


def build_inputs(
    processor: Any, prompt: str, images: Sequence[str | Path | Image] = (), *, model: Any = None
) -> dict[str, Any]:
    """The inputs of `model.generate` for one prompt.

    Args:
        processor: the model's processor; a plain tokenizer does for text-only models.
        prompt: the question. `<image>` (or the model's own image token) marks where each picture goes; without any mark
            the pictures come first. A processor with a chat template gets the prompt as one user message.
        images: files or PIL pictures, in the order of the marks.
        model: where given, tensors go to its device and pixels to its dtype.

    Raises:
        InputError: a picture cannot be read, marks and pictures differ in number, or the model takes no pictures.
    """
    pictures = [read_image(image) if isinstance(image, (str, Path)) else image for image in images]
    pieces = _split(processor, prompt, len(pictures))
    if pictures and getattr(processor, "image_processor", None) is None:
        raise InputError(
            f"{type(processor).__name__} takes no pictures, and {len(pictures)} were given; is this a text model?"
        )
    text = _render(processor, pieces)
    options: dict[str, Any] = {"text": text, "return_tensors": "pt"}
    bos = getattr(getattr(processor, "tokenizer", processor), "bos_token", None)
    if bos and text.startswith(bos):
        options["add_special_tokens"] = False  # the template wrote it already
    if pictures:
        options["images"] = pictures
    try:
        inputs = dict(processor(**options))
    except (ValueError, IndexError, TypeError) as error:
        raise InputError(
            f"{type(processor).__name__} refused this prompt with {len(pictures)} images: {error}"
        ) from error
    return inputs if model is None else _move(inputs, model)


def _own_token(processor: Any) -> str | None:
    token = getattr(processor, "image_token", None)
    return str(token) if token is not None else None


def _cut(processor: Any, prompt: str) -> list[str]:
    token = _own_token(processor)
    return prompt.replace(token, PLACEHOLDER).split(PLACEHOLDER) if token else prompt.split(PLACEHOLDER)


def _split(processor: Any, prompt: str, images: int) -> list[str]:
    """The texts between pictures: images + 1 pieces."""
    if not prompt.strip():
        raise InputError("the prompt is empty")
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
        # The pictures that come first each get a line of their own.
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
