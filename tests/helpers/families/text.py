"""Families without images."""

from __future__ import annotations

from typing import Any

import transformers as hf

from families.registry import language, register


@register("llama", "LlamaForCausalLM")
def _llama() -> Any:
    return hf.LlamaConfig(**language())


@register("qwen2", "Qwen2ForCausalLM")
def _qwen2() -> Any:
    return hf.Qwen2Config(**language())


@register("qwen3", "Qwen3ForCausalLM")
def _qwen3() -> Any:
    return hf.Qwen3Config(**language(head_dim=16))
