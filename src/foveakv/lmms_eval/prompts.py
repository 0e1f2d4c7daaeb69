"""lmms-eval's messages -> what a processor takes: texts, pictures and videos of one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foveakv.errors import InputError
from foveakv.inputs import PLACEHOLDER, read_image


def batch_inputs(processor: Any, conversations: Sequence[Sequence[dict[str, Any]]], settings: dict[str, Any]) -> Any:
    """One batch as the processor makes it, on the CPU.

    Args:
        processor: a vision-language model's processor, or the tokenizer of a text-only model.
        conversations: per request its messages, {"role": ..., "content": [{"type": "text" | "image" | "video", ...}]},
            with "text" for texts and "url" (a PIL picture or a path) for the others.
        settings: further keyword arguments of the processor's call.

    Raises:
        InputError: a picture that cannot be read, content that is no text, picture or video, or a prompt that the
            processor refuses.
    """
    rendered = [render(processor, messages) for messages in conversations]
    images = [_pictures(messages) for messages in conversations]
    videos = [_urls(messages, "video") for messages in conversations]
    options: dict[str, Any] = {"text": rendered, "return_tensors": "pt", "padding": True, **settings}
    bos = getattr(getattr(processor, "tokenizer", processor), "bos_token", None)
    if bos and all(text.startswith(bos) for text in rendered):
        options["add_special_tokens"] = False  # the template wrote it already
    for name, found in (("images", images), ("videos", videos)):
        if not any(found):
            continue
        if getattr(processor, "tokenizer", None) is None:
            raise InputError(f"this task shows {name}, and {type(processor).__name__} reads text only")
        options[name] = found
    try:
        return processor(**options)
    except (ValueError, IndexError, TypeError) as error:
        raise InputError(f"{type(processor).__name__} refused a prompt of this task: {error}") from error


def render(processor: Any, messages: Sequence[dict[str, Any]]) -> str:
    """The prompt as text, by the model's chat template; a model without one gets the pieces one after the other."""
    for message in messages:
        for part in message["content"]:
            if part["type"] not in ("text", "image", "video"):
                raise InputError(f"this task has {part['type']} content; foveakv reads text, pictures and videos")
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


def _pictures(messages: Sequence[dict[str, Any]]) -> list[Any]:
    return [read_image(url) if isinstance(url, str) else url.convert("RGB") for url in _urls(messages, "image")]
