"""What transformers computes if the evicted tokens are dropped from an ordinary cache after the prefill.

It uses nothing of foveakv. The tokens are those of vLLM, so both compute the same function at every step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, DynamicCache


class Reference:
    """A checkpoint in transformers, in float32."""

    def __init__(self, path: Path | str, model: Any = None, processor: Any = None) -> None:
        self.model = model or AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
        self.processor = processor or AutoProcessor.from_pretrained(path)

    def inputs(self, prompt: dict[str, Any]) -> Any:
        """Return the model's inputs for a prompt of vLLM."""
        images: list[Image.Image] | None = prompt.get("multi_modal_data", {}).get("image")
        return self.processor(text=prompt["prompt"], images=images, return_tensors="pt")

    @torch.no_grad()
    def log_probabilities(
        self, prompt: dict[str, Any], kept: list[int] | None, tokens: list[int], cache: Any = None
    ) -> torch.Tensor:
        """Return the log-probabilities of the next token before each of `tokens`: [n, vocabulary].

        kept: prompt tokens that stay in the cache of every layer; None = all. cache: instead of an ordinary cache.
        """
        inputs = self.inputs(prompt)
        length = inputs["input_ids"].shape[1]
        if hasattr(getattr(self.model, "model", None), "rope_deltas"):
            self.model.model.rope_deltas = None  # of an earlier prompt
        cache = DynamicCache(config=self.model.config.get_text_config()) if cache is None else cache
        output = self.model(**inputs, past_key_values=cache, use_cache=True)
        delta = getattr(getattr(self.model, "model", None), "rope_deltas", None)
        if kept is not None:
            index = torch.tensor(kept)
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys[:, :, index].contiguous(), layer.values[:, :, index].contiguous()
        found = [output.logits[0, -1]]
        for step, token in enumerate(tokens[:-1]):
            position = torch.tensor([[length + step]])
            if delta is not None:
                position = (position + delta.reshape(1, 1)).expand(3, 1, 1)
            output = self.model(
                input_ids=torch.tensor([[token]]), past_key_values=cache, position_ids=position, use_cache=True
            )
            found.append(output.logits[0, -1])
        return torch.stack(found).float().log_softmax(-1)


def check(expected: torch.Tensor, tokens: list[int], chosen: list[float], tolerance: float = 1e-4) -> None:
    """Check that vLLM chose the most probable tokens, and with the same log-probabilities."""
    assert len(tokens) == len(chosen) == expected.shape[0]
    of_tokens = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert float((of_tokens - torch.tensor(chosen)).abs().max()) < tolerance
    assert float((expected.amax(1) - of_tokens).max()) < tolerance
