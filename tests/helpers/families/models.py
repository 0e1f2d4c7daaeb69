"""Tiny models with random weights."""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any

import torch
import transformers as hf

from families.registry import FAMILIES
from families.rows import HEADS, HIDDEN, KV_HEADS, PAD, TEXT_IDS, VOCABULARY


def build(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **text_changes: Any) -> Any:
    """A model in evaluation mode with fresh random weights; the same seed gives the same weights.

    `text_changes` are set on the language model's config, for instance `num_hidden_layers=2`.
    """
    family = FAMILIES[name]
    config = family.config()
    text = config.get_text_config(decoder=True)
    for key, value in text_changes.items():
        if not hasattr(text, key):
            raise AttributeError(f"{name}'s language model config has no {key!r}")
        setattr(text, key, value)
    config.tie_word_embeddings = False  # a tied head makes such a small model repeat its last token
    with _quiet(), torch.device("cpu"), _generator(seed):
        model = getattr(hf, family.model_class)(config)
        _strong_weights(model)
    model.generation_config.suppress_tokens = [i for i in range(VOCABULARY) if i not in TEXT_IDS]
    model.generation_config.pad_token_id = PAD
    model.generation_config.eos_token_id = None
    return model.eval().to(dtype)


def _strong_weights(model: torch.nn.Module) -> None:
    """Draw weights under which attention matters: far from uniform, and felt in the logits.

    The default of 0.02 at a width of 64 gives almost uniform attention, and tests of eviction would pass by accident.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2 or not parameter.is_floating_point():
                continue
            if "embed" in name or "newline" in name or "position" in name:
                parameter.normal_(0.0, 0.7)
            else:
                fan_in = parameter[0].numel() if parameter.dim() != 3 else parameter.shape[-2]
                gain = 1.6 if name.endswith(("q_proj.weight", "k_proj.weight", "qkv_proj.weight")) else 1.0
                parameter.normal_(0.0, gain / max(fan_in, 1) ** 0.5)
                if name.endswith("k_proj.weight") and len(parameter) == KV_HEADS * HIDDEN // HEADS:
                    parameter[: len(parameter) // KV_HEADS] *= 0.4  # one KV head looks around more than the other


class _generator:
    """Seed torch for a block and put its state back."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __enter__(self) -> None:
        self.state = torch.get_rng_state()
        torch.manual_seed(self.seed)

    def __exit__(self, *unused: object) -> None:
        torch.set_rng_state(self.state)


class _quiet:
    """Silence transformers' notices about tiny configs for a block."""

    def __enter__(self) -> None:
        self.logger = logging.getLogger("transformers")
        self.level = self.logger.level
        self.logger.setLevel(logging.CRITICAL)

    def __exit__(self, *unused: object) -> None:
        self.logger.setLevel(self.level)


@functools.cache
def accepts(name: str, argument: str) -> bool:
    """Whether the forward of this family's model has this argument (versions of transformers differ)."""
    return argument in inspect.signature(getattr(hf, FAMILIES[name].model_class).forward).parameters
