"""From a chat request to a generation, and the rules that hold before an engine sees it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foveakv.errors import InputError
from foveakv.models.chat import Message, build_chat_inputs
from foveakv.serving.choice import Choice, Policy
from foveakv.serving.engine import Engine, Generation
from foveakv.serving.errors import ApiError
from foveakv.serving.images import ImageReader
from foveakv.serving.limits import Limits
from foveakv.serving.metrics import Metrics
from foveakv.serving.sampling import Sampling
from foveakv.serving.schema import ChatMessage, ChatRequest, TextPart


@dataclass
class Service:
    """What a server offers: one model under one name.

    positions: of the model; 0: unknown. is_demo: whether the model is the embedded one, whose sample prompt the page
    offers.
    """

    name: str
    engine: Engine
    model: Any
    processor: Any
    policy: Policy
    limits: Limits
    images: ImageReader
    metrics: Metrics
    positions: int = 0
    is_demo: bool = False

    def __post_init__(self) -> None:
        self._processing = threading.Lock()  # processors are not made for several threads

    def check(self, request: ChatRequest) -> Choice:
        """Check what needs no image; return the method.

        Raises:
            ApiError: a value is outside the limits, or the operator does not allow it.
        """
        if request.model != self.name:
            message = f"the model {request.model!r} does not exist; this server has {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        if (request.n or 1) > self.limits.max_choices:
            raise ApiError(400, f"n is at most {self.limits.max_choices} on this server", param="n")
        asked = request.max_completion_tokens or request.max_tokens or 0
        if asked > self.limits.max_new_tokens:
            raise ApiError(
                400, f"max_tokens is at most {self.limits.max_new_tokens} on this server", param="max_tokens"
            )
        size = sum(len(part.text) for m in request.messages for part in m.content if isinstance(part, TextPart))
        if size > self.limits.max_text_chars:
            raise ApiError(400, f"the texts have more than {self.limits.max_text_chars:,} characters", param="messages")
        if any(_urls(message) for message in request.messages if message.role != "user"):
            raise ApiError(400, "images belong in messages of the user", param="messages")
        self.images.check([url for message in request.messages for url in _urls(message)])
        return self.policy.choose(request.foveakv)

    def prepare(self, request: ChatRequest, choice: Choice) -> Generation:
        """Read the images and build the model's inputs. Takes time; runs in any thread.

        Raises:
            ApiError: an image or the prompt is invalid, or the prompt is too long.
        """
        images = self.images.read([url for message in request.messages for url in _urls(message)])
        messages = [_message(message) for message in request.messages]
        try:
            with self._processing:
                inputs = build_chat_inputs(self.processor, messages, images, model=self.model)
        except InputError as error:
            raise ApiError(400, str(error), param="messages") from None
        tokens = int(inputs["input_ids"].shape[1])
        return Generation(
            inputs=inputs,
            choice=choice,
            max_new_tokens=self._new_tokens(request, tokens),
            images=tuple(image.size for image in images),
            choices=request.n or 1,
            sampling=Sampling(
                temperature=1.0 if request.temperature is None else request.temperature,
                top_p=1.0 if request.top_p is None else request.top_p,
                seed=request.seed,
            ),
            stops=tuple(request.stop or ()),
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            kept=request.foveakv.kept if request.foveakv is not None else False,
        )

    def _new_tokens(self, request: ChatRequest, tokens: int) -> int:
        """The most tokens of an answer; by default what the limits and the model's positions leave."""
        most = self.limits.max_prompt_tokens or self.positions
        if most and tokens > most - (self.limits.max_prompt_tokens is None):
            message = f"the prompt has {tokens:,} tokens, and this server takes {most:,}"
            raise ApiError(400, message, param="messages", code="context_length_exceeded")
        asked = request.max_completion_tokens or request.max_tokens
        left = self.positions - tokens if self.positions else self.limits.max_new_tokens
        if left < (asked or 1):
            message = (
                f"the model has {self.positions:,} positions; the prompt has {tokens:,} tokens, and {asked or 1:,} "
                "more were asked for"
            )
            raise ApiError(400, message, param="messages", code="context_length_exceeded")
        return asked or min(left, self.limits.max_new_tokens)


def _urls(message: ChatMessage) -> Sequence[str]:
    return [part.image_url.url for part in message.content if not isinstance(part, TextPart)]


def _message(message: ChatMessage) -> Message:
    parts = tuple(part.text if isinstance(part, TextPart) else None for part in message.content)
    return Message("system" if message.role == "developer" else message.role, parts)
