"""Read a prompt without holding up the answers that are being decoded.

A prompt is read in one forward pass, or in chunks of tokens. Before each layer of a pass (of the vision tower too) and
between chunks `pause` is called, which may run decode steps of other requests, or stop the reading with an exception.
A pass inside of a pass is exact: it changes nothing that the outer one uses.

Chunks: images cannot be cut, so the first chunk ends after the last visual token at the earliest. What is stored is
decided when the last chunk has been read, from the same queries and keys as in one pass. Until then all layers hold all
tokens; the caller says whether there is room for that.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from foveakv.core.prompt import PAD, TEXT, PromptMap
from foveakv.engines.transformers import compat
from foveakv.engines.transformers.api import compress
from foveakv.engines.transformers.cache import CompressedCache
from foveakv.methods import Method
from foveakv.methods.full import Full

PER_TOKEN = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
"""Inputs with a column for each token."""


class PromptReader:
    """Reads prompts with one model.

    chunk: tokens of a chunk; None: prompts are read in one pass each.
    """

    def __init__(self, model: Any, chunk: int | None = None) -> None:
        self.model = model
        self.chunk = chunk
        self._name = compat.cache_argument(model)
        takes = inspect.signature(type(model).forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self._stages = list(stages(model))

    def ends(self, inputs: Mapping[str, Any], method: Method) -> list[int]:
        """The token numbers at which the chunks of a prompt end; one for a prompt that is read in one pass."""
        ids: Tensor = inputs["input_ids"]
        total = ids.shape[1]
        if self.chunk is None or total <= self.chunk or not chunkable(method) or len(ids) > 1:
            return [total]
        types = inputs.get("mm_token_type_ids"), inputs.get("token_type_ids")
        kinds = PromptMap.from_inputs(self.model.config, ids, inputs.get("attention_mask"), *types).kinds[0]
        if bool((kinds == PAD).any()) or inputs.get("position_ids") is not None or _both_ways(inputs):
            return [total]
        media = (kinds != TEXT).nonzero().flatten()
        first = max(self.chunk, int(media[-1]) + 1 if len(media) else 0)
        return [*range(first, total, self.chunk), total]

    def read(
        self, inputs: Mapping[str, Any], cache: CompressedCache, ends: list[int], pause: Callable[[bool], None]
    ) -> Tensor:
        """Read a prompt of one sequence into an empty cache; return the logits of its last token, [vocabulary].

        pause: called with True inside of a pass, and with False between chunks. An exception of it ends the reading.
        """
        if len(ends) == 1:
            return self._pass(dict(inputs), cache, pause)
        start = 0
        # Any method: the session only says when the prompt is complete.
        with compress(self.model, Full()) as session, session.chunked_prefill(ends[-1]):
            for end in ends:
                if start:
                    pause(False)
                    part = {"input_ids": inputs["input_ids"][:, start:end]}  # text without padding
                else:
                    part = {**inputs, **{key: inputs[key][:, :end] for key in PER_TOKEN if key in inputs}}
                logits = self._pass(part, cache, pause)
                start = end
        return logits

    def _pass(self, inputs: dict[str, Any], cache: CompressedCache, pause: Callable[[bool], None]) -> Tensor:
        with _before_each(self._stages, lambda: pause(True)):
            output = self.model(**inputs, **{self._name: cache}, use_cache=True, **self._last_only)
        logits: Tensor = output.logits[0, -1]
        return logits


def _both_ways(inputs: Mapping[str, Any]) -> bool:
    """Whether images may attend to tokens after them (Gemma 3): only their own pass knows which they are, and methods
    that score all rows of a prompt ask when the last chunk has been read."""
    types = inputs.get("token_type_ids")
    return types is not None and bool(types.any())


def chunkable(method: Method) -> bool:
    """Whether a method takes a prompt in chunks."""
    return method.prunes_after is None and not method.observes.second_pass


def stages(module: nn.Module) -> Iterator[nn.Module]:
    """The layers of a model's towers and of its decoder, none inside of another."""
    for child in module.children():
        if isinstance(child, nn.ModuleList) and len(child) > 1:
            yield from child
        else:
            yield from stages(child)


@contextlib.contextmanager
def _before_each(modules: list[nn.Module], call: Callable[[], None]) -> Iterator[None]:
    """Call `call` before each of the modules runs, but not from within itself."""
    inside = False

    def hook(*unused: Any) -> None:
        nonlocal inside
        if inside:
            return
        inside = True
        try:
            call()
        finally:
            inside = False

    handles = [module.register_forward_pre_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def fork(cache: CompressedCache, count: int) -> list[CompressedCache]:
    """Caches for `count` answers to one prompt, the first of which is `cache` itself.

    The one place where requests, or answers, may come to share memory.
    """
    return [cache, *(cache.fork() for _ in range(count - 1))]
