"""Convert lmms-eval's messages to the inputs of a processor: texts, images and videos of one batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foveakv.errors import InputError, MissingDependencyError
from foveakv.models.images import read_image
from foveakv.models.inputs import PLACEHOLDER


def batch_inputs(
    processor: Any, conversations: Sequence[Sequence[dict[str, Any]]], settings: dict[str, Any], *, frames: int = 32
) -> Any:
    """The output of the processor for one batch, on the CPU.

    Args:
        processor: a vision-language model's processor, or the tokenizer of a text-only model.
        conversations: per request its messages, {"role": ..., "content": [{"type": "text" | "image" | "video", ...}]},
            with "text" for texts and "url" (a PIL image or a path) for the others.
        settings: other keyword arguments of the processor's call.
        frames: maximum number of frames of a video, evenly spaced.

    Raises:
        InputError: an image or video cannot be read, content is of another kind, or the processor rejects a prompt.
    """
    rendered = [render(processor, messages) for messages in conversations]
    options: dict[str, Any] = {"text": rendered, "return_tensors": "pt", "padding": True}
    bos = getattr(getattr(processor, "tokenizer", processor), "bos_token", None)
    if bos and all(text.startswith(bos) for text in rendered):
        options["add_special_tokens"] = False  # the template adds it already
    images = [[_image(url) for url in _urls(messages, "image")] for messages in conversations]
    videos = [read_video(url, frames) for messages in conversations for url in _urls(messages, "video")]
    if (any(images) or videos) and getattr(processor, "tokenizer", None) is None:
        raise InputError(f"this task has images, and {type(processor).__name__} only accepts text")
    if any(images):
        options["images"] = images
    if videos:
        options["videos"] = [video for video, _ in videos]
        options["video_metadata"] = [metadata for _, metadata in videos]
        options["do_sample_frames"] = False
    options |= settings
    try:
        return processor(**options)
    except (ValueError, IndexError, TypeError) as error:
        raise InputError(f"{type(processor).__name__} rejected a prompt of this task: {error}") from error


def render(processor: Any, messages: Sequence[dict[str, Any]]) -> str:
    """The prompt as text, by the model's chat template; without a template, the parts are concatenated."""
    for message in messages:
        for part in message["content"]:
            if part["type"] not in ("text", "image", "video"):
                raise InputError(f"this task has {part['type']} content; supported are text, image and video")
    if getattr(processor, "chat_template", None) is None:
        marks = {
            "image": getattr(processor, "image_token", None) or PLACEHOLDER,
            "video": getattr(processor, "video_token", None) or "<video>",
        }
        return "".join(
            part["text"] if part["type"] == "text" else marks[part["type"]]
            for message in messages
            for part in message["content"]
        )
    sees = getattr(processor, "tokenizer", None) is not None
    chat = [{"role": message["role"], "content": _content(message["content"], sees)} for message in messages]
    return str(processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))


def _content(parts: Sequence[dict[str, Any]], sees: bool) -> list[dict[str, Any]] | str:
    if not sees:  # templates of text models expect a string
        return "".join(part["text"] for part in parts if part["type"] == "text")
    return [{name: part[name] for name in ("type", "text") if name in part} for part in parts]


def _urls(messages: Sequence[dict[str, Any]], kind: str) -> list[Any]:
    return [part["url"] for message in messages for part in message["content"] if part["type"] == kind]


def _image(url: Any) -> Any:
    return read_image(url)


def read_video(url: Any, frames: int) -> tuple[Any, Any]:
    """At most `frames` frames of a file, evenly spaced from the first to the last, and their times.

    Returns:
        (uint8 array [frames, height, width, 3], transformers' `VideoMetadata`).

    Raises:
        InputError: not a path, or a file without readable frames.
        MissingDependencyError: OpenCV is not installed.
    """
    import numpy as np
    from transformers.video_utils import load_video

    if not isinstance(url, str):
        raise InputError(f"videos must be paths, and this task has a {type(url).__name__}")
    if not Path(url).is_file():
        raise InputError(f"video file not found: {url}")

    def choose(metadata: Any, **_: Any) -> Any:
        total = metadata.total_num_frames
        if total < 1:
            raise InputError(f"{url} cannot be read by OpenCV as a video")
        return np.linspace(0, total - 1, min(frames, total)).round().astype(int)

    try:
        video, metadata = load_video(url, backend="opencv", sample_indices_fn=choose)
    except ImportError as error:
        raise MissingDependencyError("videos need OpenCV: pip install opencv-python-headless") from error
    return video, metadata
