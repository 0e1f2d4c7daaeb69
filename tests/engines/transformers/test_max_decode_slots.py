"""`max_decode_slots`: a limit on the stored decoded tokens."""

from __future__ import annotations

import matrix
import pytest
import torch
from masked_reference import masked
from modes import inputs_of

import foveakv
from foveakv import errors

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.mark.parametrize("name", matrix.METHODS)
def test_max_decode_slots(name: str) -> None:
    model, inputs = matrix.model("llava", torch.float64), inputs_of("llava")
    if matrix.method(name).evicts_while_decoding:
        with pytest.raises(errors.MethodError, match="max_decode_slots"):
            foveakv.compress(model, matrix.method(name), max_decode_slots=3)
        return
    with foveakv.compress(model, matrix.method(name), trace=True, max_decode_slots=3) as session:
        output = model.generate(**inputs, **{**matrix.GREEDY, "max_new_tokens": 9})
        run = matrix.Run(output.sequences, [], session.cache, session, list(session.trace))
    if not run.cache.method.merges:
        with masked(model, run.trace):
            assert torch.equal(model.generate(**inputs, max_new_tokens=9, do_sample=False), run.tokens)
    widths = [[positions.shape[-1] for positions in step.values()] for step in run.trace[-3:]]
    assert widths[0] == widths[1] == widths[2]
    matrix.check_storage(run)


def test_a_bound_on_decoded_tokens_cannot_take_drafts_back() -> None:
    model, inputs = matrix.model("llama", torch.float64), inputs_of("llama")
    with foveakv.compress(model, matrix.method("snapkv"), max_decode_slots=4) as session:
        model.generate(**inputs, **matrix.GREEDY)
        with pytest.raises(errors.UnsupportedModeError, match="max_decode_slots evicts"):
            session.cache.crop(-1)
