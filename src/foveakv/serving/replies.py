"""OpenAI's JSON for replies, whole and in chunks."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from foveakv import __version__
from foveakv.serving.engine import Delta, Done, Event, Failed, Finished


class Reply:
    """Writes the events of one request as OpenAI's objects.

    logprobs: whether the client asked for log-probabilities. usage: whether a stream ends with the usage.
    """

    def __init__(self, model: str, choices: int, *, logprobs: bool, usage: bool) -> None:
        self._model = model
        self._choices = choices
        self._logprobs = logprobs
        self._usage = usage
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """The reply, from all events of a request that has not failed."""
        texts = [""] * self._choices
        entries: list[list[Mapping[str, Any]]] = [[] for _ in texts]
        reasons: list[str | None] = [None] * self._choices
        usage: Mapping[str, Any] = {}
        for event in events:
            if isinstance(event, Delta):
                texts[event.index] += event.text
                entries[event.index] += event.logprobs
            elif isinstance(event, Finished):
                reasons[event.index] = event.reason
            elif isinstance(event, Done):
                usage = event.usage
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": texts[i], "refusal": None},
                "logprobs": self._entries(entries[i]),
                "finish_reason": reasons[i],
            }
            for i in range(self._choices)
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": usage}

    def opening(self) -> list[bytes]:
        """The first chunks of a stream: the role of every choice."""
        return [self._chunk(i, {"role": "assistant", "content": ""}) for i in range(self._choices)]

    def chunks(self, event: Event) -> list[bytes]:
        """The chunks of an event, as server-sent events."""
        if isinstance(event, Delta):
            return [self._chunk(event.index, {"content": event.text}, self._entries(event.logprobs))]
        if isinstance(event, Finished):
            return [self._chunk(event.index, {}, reason=event.reason)]
        if isinstance(event, Failed):
            return [_sse(event.error.body())]
        last = {**self._head("chat.completion.chunk"), "choices": [], "usage": event.usage}
        return [*([_sse(last)] if self._usage else []), b"data: [DONE]\n\n"]

    def _head(self, kind: str) -> dict[str, Any]:
        fingerprint = f"foveakv-{__version__}"
        head = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        return {**head, "system_fingerprint": fingerprint}

    def _chunk(self, index: int, delta: dict[str, Any], entries: Any = None, reason: str | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": entries, "finish_reason": reason}
        usage = {"usage": None} if self._usage else {}
        return _sse({**self._head("chat.completion.chunk"), "choices": [choice], **usage})

    def _entries(self, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        return {"content": list(entries), "refusal": None} if self._logprobs else None


def _sse(data: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf8", "replace") + b"\n\n"
