"""Build the inputs of `generate` from chat messages with images at any place.

A processor with a chat template renders the messages with it. Without a template the parts of all messages are joined
in order, without role names: a system message ends with a line break and a reply with the model's end token, as in
`foveakv.evaluation.decoding`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from foveakv.errors import InputError
from foveakv.models.inputs import PLACEHOLDER, process

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True)
class Message:
    """One message. parts: its texts, and None at the place of each image."""

    role: Role
    parts: tuple[str | None, ...]

    @property
    def images(self) -> int:
        """Number of images."""
        return sum(part is None for part in self.parts)


def build_chat_inputs(
    processor: Any, messages: Sequence[Message], images: Sequence[Any] = (), *, model: Any = None
) -> dict[str, Any]:
    """Build the inputs of `model.generate` for the reply to a chat.

    Args:
        processor: the model's processor, or a plain tokenizer for a text-only model.
        messages: the chat so far; the last message is the user's.
        images: the images of all messages, in order: PIL images.
        model: if given, tensors are moved to its device and pixels cast to its dtype.

    Returns:
        The processor's outputs with a batch of one.

    Raises:
        InputError: there is no user message at the end, a text contains one of the model's media tokens, the numbers of
            images and places differ, or the model takes no images.
    """
    if not messages or messages[-1].role != "user":
        raise InputError("the last message must be the user's")
    if sum(message.images for message in messages) != len(images):
        raise InputError("the messages have another number of places for images than images were given")
    if images and getattr(processor, "image_processor", None) is None:
        raise InputError(f"this model takes no images, and {len(images)} were given")
    if not any(part is None or part.strip() for message in messages for part in message.parts):
        raise InputError("the prompt is empty")
    _check_texts(processor, messages)
    return process(processor, _render(processor, messages), images, model)


def _check_texts(processor: Any, messages: Sequence[Message]) -> None:
    """Refuse texts with media tokens: each would be taken for the place of an image."""
    tokens = [getattr(processor, name, None) for name in ("image_token", "video_token", "audio_token")]
    media = [str(token) for token in tokens if token]
    for message in messages:
        for part in message.parts:
            for token in media if part is not None else ():
                if token in str(part):
                    raise InputError(f"a text contains {token}, which marks the place of media; give images as parts")


def _render(processor: Any, messages: Sequence[Message]) -> str:
    if getattr(processor, "chat_template", None) is None or not hasattr(processor, "apply_chat_template"):
        return _joined(processor, messages)
    rich = getattr(processor, "tokenizer", None) is not None  # a processor; plain tokenizers take text alone
    chat = [{"role": message.role, "content": _content(message) if rich else _text(message)} for message in messages]
    try:
        return str(processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
    except Exception as error:  # a template is a program of the model's authors and may raise anything
        raise InputError(f"the model's chat template refused these messages: {error}") from error


def _content(message: Message) -> list[dict[str, str]]:
    return [{"type": "image"} if part is None else {"type": "text", "text": part} for part in message.parts]


def _text(message: Message) -> str:
    return "".join(part for part in message.parts if part is not None)


def _joined(processor: Any, messages: Sequence[Message]) -> str:
    image = str(getattr(processor, "image_token", None) or PLACEHOLDER)
    end = str(getattr(getattr(processor, "tokenizer", processor), "eos_token", None) or "\n")
    after = {"system": "\n", "user": "", "assistant": end}
    found = []
    for message in messages:
        parts = message.parts
        for i, part in enumerate(parts):
            found.append(image if part is None else part)
            following = parts[i + 1] if i + 1 < len(parts) else ""
            if part is None and not (following or "").startswith("\n"):
                found.append("\n")  # an image ends its line
        found.append(after[message.role])
    return "".join(found)
