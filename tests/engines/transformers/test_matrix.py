"""What the other tests rely on: a run follows another one's tokens and beams, and a wrong library is still noticed."""

from __future__ import annotations

from typing import Any

import families
import matrix
import pytest
import torch
from masked_reference import largest_difference

pytestmark = pytest.mark.usefixtures("no_gradients")


def setting(dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Any]]:
    return matrix.model("llava", dtype), families.batch("llava", dtype=dtype).inputs


def test_a_run_follows_tokens_and_another_choice_is_noticed() -> None:
    model, inputs = setting()
    free = matrix.plain(model, inputs)
    again = matrix.plain(model, inputs, follow=free)
    assert torch.equal(again.tokens, free.tokens)
    matrix.check_choices(again, 1e-5)
    other = free.tokens.clone()
    other[1, -3] = next(token for token in families.TEXT_IDS if token != other[1, -3])
    led = matrix.plain(model, inputs, follow=other)
    assert torch.equal(led.tokens, other)
    with pytest.raises(AssertionError, match="another choice in step 3"):
        matrix.check_choices(led, 1e-5)


@pytest.mark.parametrize("draws", [1, 3])
def test_a_run_follows_drawn_tokens(draws: int) -> None:
    model, inputs = setting()
    options = {"do_sample": True, "temperature": 1.3, "top_k": 20, "num_return_sequences": draws}
    free = matrix.plain(model, inputs, **options)
    torch.manual_seed(1)
    again = matrix.plain(model, inputs, follow=free, **options)
    assert torch.equal(again.tokens, free.tokens)
    assert largest_difference(again.logits, free.logits) < 1e-5


def test_a_run_follows_beams_that_are_not_its_own() -> None:
    model, inputs = setting()
    free = matrix.plain(model, inputs, num_beams=3)
    penalties = {"num_beams": 3, "repetition_penalty": 3.0}
    assert free.choices is not None
    own = matrix.plain(model, inputs, **penalties)
    led = matrix.plain(model, inputs, follow=free, **penalties)
    assert own.choices is not None
    assert led.choices is not None
    assert not torch.equal(own.choices.contexts[-1], free.choices.contexts[-1])
    assert torch.equal(led.choices.contexts[-1], free.choices.contexts[-1])
    assert largest_difference(led.logits, free.logits) < 1e-5


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-4), (torch.float16, 0.03)], ids=str
)
def test_a_token_that_was_not_attended_to_is_noticed(
    dtype: torch.dtype, tolerance: float, options: dict[str, Any]
) -> None:
    model, inputs = setting(dtype)
    run = matrix.compressed(model, matrix.method("snapkv"), inputs, **options)
    matrix.check_against_reference(model, run, inputs, tolerance, **options)
    for positions in run.trace[3].values():
        positions[:, :, :4] = -1
    with pytest.raises(AssertionError):
        matrix.check_against_reference(model, run, inputs, tolerance, **options)
