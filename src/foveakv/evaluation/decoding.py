"""Greedy decoding over caches that hold a prompt, with the logits of every step.

`generate` gives the same tokens; a loop over `forward` also keeps the logits, and has less overhead per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foveakv.engines.transformers import compat
from foveakv.engines.transformers.cache import CompressedCache
from foveakv.errors import InputError
from foveakv.evaluation.bundle import Bundle, fits


class GreedyDecoder:
    """Decodes with one model.

    ends: token ids that end a reply.

    Raises:
        InputError: the model has no end token.
    """

    def __init__(self, model: Any, processor: Any) -> None:
        self.model = model
        self.processor = processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self._name = compat.cache_argument(model)
        ends = getattr(model.generation_config, "eos_token_id", None)
        ends = self.tokenizer.eos_token_id if ends is None else ends
        if ends is None:
            raise InputError(f"{type(model).__name__} has no end token; set generation_config.eos_token_id")
        self.ends: list[int] = list(ends) if isinstance(ends, (list, tuple)) else [int(ends)]

    def text(self, tokens: Sequence[int]) -> str:
        """Token ids as text, without special tokens."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()

    def feed(self, cache: CompressedCache, tokens: Sequence[int]) -> Tensor:
        """Runs new tokens over a cache; logits [tokens, vocabulary] after each of them, float32."""
        ids = torch.tensor([list(tokens)], device=self.model.device)
        with torch.inference_mode():
            output = self.model(input_ids=ids, **{self._name: cache}, use_cache=True)
        return output.logits[0].float()

    def feed_all(self, caches: Sequence[CompressedCache], tokens: Sequence[Sequence[int]]) -> list[Tensor]:
        """`feed` for several caches, as one batch where possible (see `foveakv.evaluation.bundle.fits`)."""
        groups: dict[Any, list[int]] = {}
        for place, (cache, own) in enumerate(zip(caches, tokens, strict=True)):
            groups.setdefault((cache.seen, len(own)) if fits(cache) else place, []).append(place)
        found: list[Tensor] = [torch.empty(0)] * len(caches)
        for places in groups.values():
            if len(places) == 1:
                found[places[0]] = self.feed(caches[places[0]], tokens[places[0]])
                continue
            bundle = Bundle([caches[place] for place in places])
            ids = torch.tensor([list(tokens[place]) for place in places], device=self.model.device)
            with torch.inference_mode(), bundle.step(ids.shape[1]):
                output = self.model(input_ids=ids, **{self._name: bundle}, use_cache=True)
            for place, logits in zip(places, output.logits.float(), strict=True):
                found[place] = logits
        return found

    def reply_all(
        self, caches: Sequence[CompressedCache], logits: Sequence[Tensor], most: int
    ) -> tuple[list[list[int]], list[list[Tensor]]]:
        """Greedy replies of at most `most` tokens each, and the logits that each token was chosen from.

        logits: [vocabulary] per cache, after the question. The last token of a reply (an end token, or the last one
        allowed) is not fed to the model; the next input starts with it.
        """
        replies: list[list[int]] = [[] for _ in caches]
        chosen_from: list[list[Tensor]] = [[] for _ in caches]
        active, newest = list(range(len(caches))), list(logits)
        while True:
            for place, own in zip(active, newest, strict=True):
                chosen_from[place].append(own.float())
                replies[place].append(int(own.argmax()))
            active = [i for i in active if len(replies[i]) < most and replies[i][-1] not in self.ends]
            if not active:
                return replies, chosen_from
            newest = [out[-1] for out in self.feed_all([caches[i] for i in active], [replies[i][-1:] for i in active])]

    def follow_up(self, question: str, last: int) -> list[int]:
        """Tokens of the next question: the last token of the reply, an end token if the reply was cut, the question."""
        tokens = [last] if last in self.ends else [last, self.ends[0]]
        template = getattr(self.processor, "chat_template", None)
        if template is None or not hasattr(self.processor, "apply_chat_template"):
            return tokens + self._ids(question)
        mark = "\u2042"  # unlikely to occur in a template
        rich = getattr(self.processor, "tokenizer", None) is not None

        def message(role: str, text: str) -> dict[str, Any]:
            return {"role": role, "content": [{"type": "text", "text": text}] if rich else text}

        chat = [message("user", "."), message("assistant", mark), message("user", question)]
        text = str(self.processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
        after = self._ids(text.rpartition(mark)[2])
        return tokens + (after[1:] if after and after[0] in self.ends else after)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
