"""What methods may know of the model that vLLM runs."""

from __future__ import annotations

from typing import Any

from foveakv.methods import ModelFacts


def facts_of(model_config: Any, layers: int) -> ModelFacts:
    """Return the facts of a model. model_config: vLLM's `ModelConfig`. layers: number of decoder layers."""
    return ModelFacts(tuple(range(layers)), layers, str(model_config.hf_text_config.model_type), lambda: "")
