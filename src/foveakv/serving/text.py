"""The text of a reply while it is generated: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

INCOMPLETE = "\ufffd"
"""What a decoder writes for the first bytes of a character whose last bytes are missing."""


class TextStream:
    """Turns tokens into pieces of text that can be sent at once.

    A piece never ends inside a character, nor inside what may become a stop string. All pieces together are the decoded
    tokens up to the first stop string.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self.stopped = False
        self.sent = 0
        """Characters that have been returned."""
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._tokens: list[int] = []
        self._before = self._read = 0  # tokens from _before to _read are decoded again, as the context of later ones
        self._held = ""

    @property
    def decoded(self) -> int:
        """Characters up to the last complete one, those that are held back included."""
        return self.sent + len(self._held)

    def push(self, token: int) -> str:
        """Add a token; return what can be sent now. `stopped` is set when a stop string is complete."""
        self._tokens.append(token)
        before = self._decode(self._before, self._read)
        after = self._decode(self._before, len(self._tokens))
        if len(after) <= len(before) or after.endswith(INCOMPLETE):
            return ""
        self._before, self._read = self._read, len(self._tokens)
        return self._take(after[len(before) :])

    def finish(self) -> str:
        """Return what was held back, at the end of the reply."""
        if self.stopped:
            return ""
        before = self._decode(self._before, self._read)
        after = self._decode(self._before, len(self._tokens))
        rest = self._take(after[len(before) :])
        if not self.stopped:
            self.sent += len(self._held)
            rest, self._held = rest + self._held, ""
        return rest

    def _decode(self, first: int, last: int) -> str:
        if first == last:
            return ""
        tokens = self._tokens[first:last]
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _take(self, text: str) -> str:
        """Add text; return the part that no stop string can begin in."""
        self._held += text
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            ready, self._held = self._held[: min(found)], ""
        else:
            keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
            cut = len(self._held) - keep
            ready, self._held = self._held[:cut], self._held[cut:]
        self.sent += len(ready)
        return ready


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, and not all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass
class TokenTexts:
    """Single tokens as text and bytes, for log-probabilities."""

    tokenizer: Any
    _byte_level: bool = field(init=False)
    _special: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self._byte_level = _is_byte_level(self.tokenizer)
        self._special = frozenset(self.tokenizer.all_special_ids)

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token stands for."""
        name = self.tokenizer.convert_ids_to_tokens(token)
        if name is None:
            return b""
        if token in self._special:
            return str(name).encode("utf8", "replace")
        if self._byte_level:
            return b"".join(_BYTES.get(letter, letter.encode("utf8")) for letter in name)
        if single := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", name):
            return bytes([int(single[1], 16)])
        return str(name).replace("\u2581", " ").encode("utf8", "replace")

    def entry(self, token: int, logprob: float) -> dict[str, Any]:
        """OpenAI's entry of a token."""
        raw = self.bytes_of(token)
        return {"token": raw.decode("utf8", "replace"), "logprob": logprob, "bytes": list(raw)}


def _is_byte_level(tokenizer: Any) -> bool:
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return False
    state = json.loads(decoder.__getstate__())
    return "ByteLevel" in [state.get("type"), *(part.get("type") for part in state.get("decoders", []))]


def _byte_letters() -> dict[str, bytes]:
    """The letter that byte-level tokenizers write for each byte (Radford et al. 2019, GPT-2), reversed."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {chr(byte): bytes([byte]) for byte in shown}
    return letters | {chr(256 + i): bytes([byte]) for i, byte in enumerate(hidden)}


_BYTES = _byte_letters()
