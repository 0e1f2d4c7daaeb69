"""Greedy replies token by token over a cache that has read the prompt, and what the model said at every step.

`generate` would do the same; a plain loop over `forward` keeps the logits and costs less between tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foveakv import compat
from foveakv.cache import CompressedCache
from foveakv.errors import InputError


@dataclass
class Reply:
    """tokens: the ids, an end token included. logits: [tokens, vocabulary] float32, what each token was chosen from."""

    tokens: list[int]
    logits: Tensor


class Speaker:
    """Speaks with one model. end: ids that end a reply."""

    def __init__(self, model: Any, processor: Any) -> None:
        self.model = model
        self.processor = processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self._name = compat.cache_argument(model)
        ends = getattr(model.generation_config, "eos_token_id", None)
        ends = self.tokenizer.eos_token_id if ends is None else ends
        if ends is None:
            raise InputError(f"{type(model).__name__} names no end token, so replies would never end")
        self.ends: list[int] = list(ends) if isinstance(ends, (list, tuple)) else [int(ends)]

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()

    def feed(self, cache: CompressedCache, tokens: Sequence[int]) -> Tensor:
        """Logits [tokens, vocabulary] after each of the new tokens, float32."""
        ids = torch.tensor([list(tokens)], device=self.model.device)
        with torch.inference_mode():
            output = self.model(input_ids=ids, **{self._name: cache}, use_cache=True)
        return output.logits[0].float()

    def reply(self, cache: CompressedCache, logits: Tensor, most: int) -> Reply:
        """Greedy: from the logits [vocabulary] behind the question, at most `most` tokens.

        The last token is not fed back: what comes next begins with it.
        """
        tokens: list[int] = []
        said: list[Tensor] = []
        while True:
            said.append(logits.float())
            tokens.append(int(logits.argmax()))
            if len(tokens) == most or tokens[-1] in self.ends:
                return Reply(tokens, torch.stack(said))
            logits = self.feed(cache, tokens[-1:])[-1]

    def repeat(self, cache: CompressedCache, logits: Tensor, tokens: Sequence[int]) -> Reply:
        """What the model would have said at each step of a reply that is given, one token at a time."""
        said = [logits.float()]
        for token in tokens[:-1]:
            said.append(self.feed(cache, [token])[-1])
        return Reply(list(tokens), torch.stack(said))

    def follow_up(self, question: str, last: int) -> list[int]:
        """Tokens to feed for the next question: the last token of the reply, its end where it was cut, the question."""
        tokens = [last] if last in self.ends else [last, self.ends[0]]
        template = getattr(self.processor, "chat_template", None)
        if template is None or not hasattr(self.processor, "apply_chat_template"):
            return tokens + self._ids(question)
        mark = "\u2042"  # unlikely to stand in a template
        rich = getattr(self.processor, "tokenizer", None) is not None

        def message(role: str, text: str) -> dict[str, Any]:
            return {"role": role, "content": [{"type": "text", "text": text}] if rich else text}

        talk = [message("user", "."), message("assistant", mark), message("user", question)]
        text = str(self.processor.apply_chat_template(talk, add_generation_prompt=True, tokenize=False))
        behind = self._ids(text.rpartition(mark)[2])
        return tokens + (behind[1:] if behind and behind[0] in self.ends else behind)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
