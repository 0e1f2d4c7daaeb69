"""What the HTTP application needs of an engine: submit, cancel, and events.

An engine decides itself when a request runs and how decode steps are scheduled.
`transformers_engine.TransformersEngine` decodes the answers of all running requests in one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from foveakv.serving.choice import Choice
from foveakv.serving.errors import ApiError
from foveakv.serving.sampling import Sampling

FinishReason: TypeAlias = Literal["stop", "length"]


@dataclass(frozen=True)
class Generation:
    """A request that is ready to run.

    inputs: of the model's forward pass, with a batch of one. images: (width, height) of the prompt's images. choice:
    its method. choices: number of answers. stops: strings that end an answer. max_new_tokens: for each answer.
    logprobs: number of alternatives for each token; None: no log-probabilities. kept: report which patches are stored.
    """

    inputs: Mapping[str, Any]
    choice: Choice
    max_new_tokens: int
    images: Sequence[tuple[int, int]] = ()
    choices: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    stops: tuple[str, ...] = ()
    logprobs: int | None = None
    kept: bool | Literal["layers"] = False

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt, those of images included."""
        return int(self.inputs["input_ids"].shape[1])


@dataclass(frozen=True)
class Delta:
    """A piece of the answer number `index`. logprobs: OpenAI's entries of its tokens."""

    index: int
    text: str
    logprobs: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Finished:
    """The answer number `index` is complete."""

    index: int
    reason: FinishReason


@dataclass(frozen=True)
class Done:
    """The request is complete. usage: OpenAI's, with the entry "foveakv"."""

    usage: Mapping[str, Any]


@dataclass(frozen=True)
class Failed:
    """The request has ended with an error."""

    error: ApiError


Event: TypeAlias = Delta | Finished | Done | Failed
Sink: TypeAlias = Callable[[Event], None]
"""Takes the events of a request. Called in a thread of the engine; must return at once. Done or Failed is the last."""


@dataclass(frozen=True)
class Status:
    """The load of an engine.

    queue: requests that wait. running: answers that are being decoded. reserved_bytes: KV bytes that running requests
    may come to store. stored_bytes, full_bytes, host_bytes: of running requests, on the device, without compression,
    and in the backing store. alive: whether the engine still takes requests.
    """

    queue: int
    running: int
    reserved_bytes: int
    stored_bytes: int
    full_bytes: int
    host_bytes: int
    alive: bool


class Handle(Protocol):
    """A submitted request."""


class Engine(Protocol):
    """Runs requests. All methods may be called from any thread."""

    def submit(self, generation: Generation, sink: Sink) -> Handle:
        """Queue a request.

        Raises:
            ApiError: the queue is full (429), or the request can never run (400).
        """
        ...

    def cancel(self, handle: Handle) -> None:
        """Drop a request and free its memory as soon as the current step is over. Does nothing after its last event."""
        ...

    def status(self) -> Status:
        """What is going on."""
        ...

    def close(self) -> None:
        """Drop all requests and stop. Waits until the memory is free."""
        ...
