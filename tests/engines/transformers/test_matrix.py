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


def test_a_trace_that_says_something_else_than_attention_was_handed_is_noticed() -> None:
    model, inputs = setting(torch.float64)
    run = matrix.compressed(model, matrix.method("snapkv"), inputs)
    next(iter(run.trace[3].values()))[0, 0, 0] = -1
    with pytest.raises(AssertionError, match="step 3, layer 0: the trace is not what attention was handed"):
        matrix.check_against_reference(model, run, inputs)


@pytest.mark.parametrize("number", [1, 2], ids=["keys", "values"])
@pytest.mark.parametrize("name", ["snapkv", "quest"])
def test_a_stored_key_or_value_of_another_token_is_noticed(name: str, number: int) -> None:
    model, inputs = setting(torch.float64)
    run = matrix.compressed(model, matrix.method(name), inputs)
    matrix.check_against_reference(model, run, inputs)
    held = run.stored[3][2][number]
    assert held is not None
    held[1, 1, 1] = held[1, 1, 0]
    with pytest.raises(AssertionError, match="differ from the plain cache"):
        matrix.check_against_reference(model, run, inputs)


@pytest.mark.parametrize("place", ["host", "device"])
def test_a_library_that_agrees_with_itself_and_attends_to_other_tokens_is_noticed(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions and trace stay right while slots of two tokens change places; and a store that reads other chunks."""
    from foveakv.memory.chunks import ChunkStore
    from foveakv.memory.segments import Segments

    model, inputs = setting(torch.float32)  # pages are not read in place in fp64
    append, pages, written = Segments.append, ChunkStore.pages, []

    def swapped(self: Segments, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor) -> None:
        append(self, keys, values, positions)
        if not written:
            row = int(self.runs.start[0])
            self._values[[row, row + 1]] = self._values[[row + 1, row]]
            written.append(row)

    def others(self: ChunkStore) -> object:
        made = pages(self)
        written.append(0)
        return made._replace(table=torch.where(made.table < 0, made.table, (made.table - 1).clamp_min(0)))

    if place == "host":
        monkeypatch.setattr(ChunkStore, "pages", others)
    else:
        monkeypatch.setattr(Segments, "append", swapped)
    run = matrix.compressed(model, matrix.method("hybridkv" if place == "host" else "snapkv"), inputs)
    if not written:
        pytest.skip("this machine's kernel does not read pages in place")
    with pytest.raises(AssertionError, match="differ"):
        matrix.check_against_reference(model, run, inputs, 1e-4)
