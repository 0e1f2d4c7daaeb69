"""A tiny model whose attention is uneven, its prompt, and its plain attention."""

from __future__ import annotations

from typing import Any

import families
import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="module")
def model() -> Any:
    """Attention of random weights is nearly even; sharper queries make some of it smaller than 1e-4.

    In fp64: two runs that choose for themselves are compared here, and no near tie can part them.
    """
    model = families.build("llava", dtype=torch.float64)
    with torch.no_grad():
        for layer in model.model.language_model.layers:
            layer.self_attn.q_proj.weight.mul_(8)
    return model


@pytest.fixture(scope="module")
def inputs() -> dict[str, Tensor]:
    return families.prompt("llava", images=2, dtype=torch.float64)


@pytest.fixture(scope="module")
def visual(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    return inputs["input_ids"][0] == model.config.image_token_id


@pytest.fixture(scope="module")
def attention(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Of the plain model, per layer [query heads, C, C]."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found = [layer[0] for layer in model(**inputs, output_attentions=True).attentions]
    model.set_attn_implementation(implementation)
    return found
