"""Which model families are supported, and why the others are not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foveakv.engines.transformers import compat
from foveakv.errors import UnsupportedModelError


@dataclass(frozen=True)
class Family:
    """A tested model family.

    model_type: as in the model's config. title: name for people. note: a limit. reason: why it is unsupported; empty
    where it is supported.
    """

    model_type: str
    title: str
    note: str = ""
    reason: str = ""


FAMILIES: tuple[Family, ...] = (
    Family("qwen2_vl", "Qwen2-VL"),
    Family("qwen2_5_vl", "Qwen2.5-VL"),
    Family("qwen3_vl", "Qwen3-VL", note="no drop_hidden_states (deepstack)"),
    Family("glm4v", "GLM-4V"),
    Family("llava", "LLaVA-1.5, Pixtral"),
    Family("llava_next", "LLaVA-NeXT"),
    Family("llava_onevision", "LLaVA-OneVision"),
    Family("internvl", "InternVL"),
    Family("idefics3", "Idefics3"),
    Family("smolvlm", "SmolVLM"),
    Family("gemma3", "Gemma 3", note="only full-attention layers are compressed, sliding-window layers stay"),
    Family("mistral3", "Mistral 3"),
    Family("phi4_multimodal", "Phi-4-multimodal"),
    Family("qwen3_5", "Qwen3.5", note="only full-attention layers are compressed, linear-attention layers stay"),
    Family("llama", "Llama (text)"),
    Family("qwen2", "Qwen2 (text)"),
    Family("qwen3", "Qwen3 (text)"),
    Family(
        "paligemma", "PaliGemma",
        reason="it builds its attention mask as a tensor before the text decoder runs, which cannot be applied to "
        "stored slots",
    ),
    Family("gemma4", "Gemma 4", reason="its last layers reuse earlier layers' KV and slice the mask as a tensor"),
    Family("mllama", "Llama 3.2 Vision", reason="its images are in cross-attention layers, not in the prompt"),
    Family("llama4", "Llama 4", reason="its generate() fails in transformers 5.24 itself, so nothing can be verified"),
)  # fmt: skip
# `model_type` of the text decoders of these families; what their attention does with a cache is covered by the tests.
TESTED_DECODERS = frozenset(
    {
        "gemma3_text", "glm4v_text", "llama", "mistral", "phi4_multimodal", "qwen2", "qwen2_5_vl_text", "qwen2_vl_text",
        "qwen3", "qwen3_5_text", "qwen3_vl_text",
    }
)  # fmt: skip
_BY_TYPE = {family.model_type: family for family in FAMILIES}


def family_of(model: Any) -> Family | None:
    """The family of a model; None for a family that has not been tested."""
    return _BY_TYPE.get(getattr(model.config, "model_type", ""))


def check_supported(model: Any) -> None:
    """Raises `UnsupportedModelError` where the model's family, config or cache layers exclude compression.

    Untested families pass here; `probe.check` tries out their attention.
    """
    family = family_of(model)
    if family is not None and family.reason:
        raise UnsupportedModelError(f"{family.title} is not supported: {family.reason}")
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{type(model).__name__} is an encoder-decoder model; only decoders are supported")
    if compat.own_cache_class(model):
        raise UnsupportedModelError(f"{type(model).__name__} is not supported: it needs a cache class of its own")
    config = compat.text_config_of(model)
    if not any(type(layer) is compat.DynamicLayer for layer in compat.default_layers(config)):
        raise UnsupportedModelError(f"{type(model).__name__} has no plain attention layer to compress")
    if getattr(config, "attn_logit_softcapping", None):
        raise UnsupportedModelError(
            f"{type(model).__name__} caps its attention logits (softcap), which is not supported"
        )
