"""The parts of a chat template around the frames of a stream, its questions and its answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foveakv.errors import InputError

_BEFORE, _AFTER, _SAID = "\u2042", "\u2051", "\u203b"  # unlikely to occur in a template
PLACEHOLDER = "<image>"


@dataclass(frozen=True)
class ChatParts:
    """Texts of one user message that holds all frames and, at its end, a question.

    opening: before the first frame. image: one frame, with the model's image token. closing: after a question, up to
    where the answer begins. following: after an answer, up to where the next frames begin.
    """

    opening: str
    image: str
    closing: str
    following: str

    @classmethod
    def of(cls, processor: Any) -> ChatParts:
        """Read the parts from the processor's chat template; without one, frames get a line each.

        Raises:
            InputError: the template fails on such a message, or leaves out its texts.
        """
        token = str(getattr(processor, "image_token", None) or PLACEHOLDER)
        if getattr(processor, "chat_template", None) is None or not hasattr(processor, "apply_chat_template"):
            return cls("", token + "\n", "", "\n")
        rich = getattr(processor, "tokenizer", None) is not None
        user = [{"type": "text", "text": _BEFORE}, {"type": "image"}, {"type": "text", "text": _AFTER}]
        first = _render(processor, [("user", user if rich else _BEFORE + _AFTER)])
        opening, image, closing = _cut(first, _BEFORE, _AFTER)
        said = [{"type": "text", "text": _SAID}] if rich else _SAID
        again = [{"type": "text", "text": _BEFORE}] if rich else _BEFORE
        chat = _render(processor, [("user", said), ("assistant", again), ("user", user if rich else _AFTER)])
        following = chat.partition(_BEFORE)[2].partition(_BEFORE if rich else _AFTER)[0]
        if token not in image:  # a template that puts all images first
            opening, image = opening.replace(token, ""), token + "\n"
        return cls(opening, image, closing, following)


def _render(processor: Any, messages: list[tuple[str, Any]]) -> str:
    chat = [{"role": role, "content": content} for role, content in messages]
    try:
        return str(processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
    except Exception as error:  # a template is a program of the model's authors and may raise anything
        raise InputError(f"the chat template of {type(processor).__name__} failed on a stream: {error}") from error


def _cut(text: str, *marks: str) -> list[str]:
    found = []
    for mark in marks:
        before, there, text = text.partition(mark)
        if not there:
            raise InputError("the chat template of this model leaves out text beside images, which a stream needs")
        found.append(before)
    return [*found, text]
