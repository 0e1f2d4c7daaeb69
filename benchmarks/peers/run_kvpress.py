"""kvpress' side, run in its own environment: time per token and stored bytes of its presses."""

from __future__ import annotations

import gc
import importlib.metadata
import time
from typing import Any

import kvpress
import torch
import transformers
from text_llama import build, decode, main, prompt, storage
from transformers import DynamicCache

EAGER_UP_TO = 4096  # tokens; the eager attention that ObservedAttention reads takes gigabytes beyond


def presses(budget: float, context: int) -> dict[str, tuple[Any, str]]:
    """Name -> press and the attention implementation that it needs."""
    ratio = 1 - budget
    found = {
        "no press": (None, "sdpa"),
        "SnapKVPress": (kvpress.SnapKVPress(ratio, window_size=32, kernel_size=5), "sdpa"),
        "AdaKVPress(SnapKVPress)": (
            kvpress.AdaKVPress(kvpress.SnapKVPress(ratio, window_size=32, kernel_size=7)),
            "sdpa",
        ),
    }
    if context <= EAGER_UP_TO:
        found["ObservedAttentionPress"] = (kvpress.ObservedAttentionPress(ratio), "eager")
    return found


def measure(spec: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    model, ids = build(spec), prompt(spec)
    model(ids[:, :64], use_cache=True)
    for name, (press, attention) in presses(spec["budget"], spec["context"]).items():
        model.set_attn_implementation(attention)
        cache = DynamicCache()
        start = time.perf_counter()
        if press is None:
            logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
        else:
            with press(model):
                logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
        first = time.perf_counter() - start

        def step(token: torch.Tensor, position: torch.Tensor, cache: Any = cache) -> torch.Tensor:
            return model(token, past_key_values=cache, position_ids=position).logits

        times = decode(step, logits, spec["context"], spec["tokens"])
        rows.append(
            {
                "method": name,
                "first_token_s": first,
                "token_ms": times,
                "stored_bytes": storage(cache),
                "attention": attention,
            }
        )
        for module in model.modules():
            if getattr(module, "masked_key_indices", None) is not None:
                module.masked_key_indices = None
        del cache
        gc.collect()
    return rows


if __name__ == "__main__":
    main(
        measure,
        {
            "kvpress": importlib.metadata.version("kvpress"),
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
    )
