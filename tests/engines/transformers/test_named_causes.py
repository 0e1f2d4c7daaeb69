"""Prompts that a model does not support or that say too little: an error, a warning or a note names the cause."""

from __future__ import annotations

from typing import Any

import families
import matrix
import pytest

import foveakv
from foveakv import errors

pytestmark = pytest.mark.usefixtures("no_gradients")


def embedded(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The same prompt as inputs_embeds, which do not say what each token is."""
    return {
        "inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]),
        "attention_mask": inputs["attention_mask"],
    }


def test_a_context_beyond_the_models_positions_is_a_warning_and_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = matrix.model("llama"), families.prompt("llama")
    monkeypatch.setattr(model.config, "max_position_embeddings", inputs["input_ids"].shape[1] + 1)
    with pytest.warns(UserWarning, match="max_position_embeddings"):
        run = matrix.compressed(model, foveakv.methods.get("full"), inputs)
    assert any("positions: answers may be wrong" in note for note in run.session.report.notes)


@pytest.mark.parametrize("name", [name for name in matrix.METHODS if matrix.method(name).observes.queries != "none"])
def test_activations_that_overflow_are_named(name: str) -> None:
    model, inputs = families.build("llava"), families.prompt("llava")
    model.get_decoder().layers[1].mlp.down_proj.weight.data.fill_(float("inf"))
    with pytest.raises(errors.UnsupportedModeError, match="NaN or infinity"):
        matrix.compressed(model, matrix.method(name), inputs)


@pytest.mark.parametrize("name", [name for name in matrix.METHODS if matrix.method(name).visual_only])
def test_embeddings_without_types_are_no_prompt_without_images(name: str) -> None:
    model = matrix.model("llava")
    with foveakv.compress(model, matrix.method(name)), pytest.raises(errors.NoVisualTokensError, match="mm_token_type"):
        model.generate(**embedded(model, families.prompt("llava")), max_new_tokens=2)


def test_a_report_says_that_embeddings_count_as_text() -> None:
    model = matrix.model("llava")
    with foveakv.compress(model, matrix.method("snapkv")) as session:
        model.generate(**embedded(model, families.prompt("llava")), max_new_tokens=2)
    assert any("all tokens count as text" in note for note in session.report.notes)
