"""Every method: an interrupt inside a layer, and plain calls of another thread, leave nothing behind."""

from __future__ import annotations

import threading
from typing import Any

import families
import matrix
import pytest
import torch
from masked_reference import largest_difference
from test_lifecycle import fingerprint, used

import foveakv

pytestmark = pytest.mark.usefixtures("no_gradients")

SHORT = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
METHODS = [(name, {}) for name in matrix.METHODS] + [
    ("hae", {"drop_hidden_states": True, "budget": None}),
    ("fastv", {"drop_hidden_states": True}),
    ("hybridkv", {"store": "disk"}),
]
every = pytest.mark.parametrize(("name", "options"), METHODS, ids=lambda value: str(value))


@pytest.fixture(scope="module", params=["llava", "qwen2_5_vl"])
def model(request: pytest.FixtureRequest) -> Any:
    built = used(request.param, dtype=torch.float64)
    built.family = request.param
    return built


def tokens(model: Any, method: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    with foveakv.compress(model, method) as session:
        answer = model.generate(**inputs, **SHORT).sequences
        return answer, [session.kept(layer.layer_idx) for layer in session.cache.compressed]


@pytest.mark.parametrize("step", [1, 2, 4])
@pytest.mark.parametrize("layer", [0, 1, 3])
@every
def test_the_next_session_gives_the_same(model: Any, name: str, options: dict[str, Any], layer: int, step: int) -> None:
    """KeyboardInterrupt after layer `layer`'s attention: in the prefill (step 1), or in a decode step."""
    inputs, method, passes = families.prompt(model.family, dtype=torch.float64), matrix.method(name, **options), [0]
    want, answer = fingerprint(model), tokens(model, method, inputs)

    def interrupt(*unused: Any) -> None:
        passes[0] += 1
        if passes[0] == step:
            raise KeyboardInterrupt

    handle = model.get_decoder().layers[layer].self_attn.register_forward_hook(interrupt)
    try:
        with foveakv.compress(model, method):
            with pytest.raises(KeyboardInterrupt):
                model.generate(**inputs, **SHORT)
            again = model.generate(**inputs, **SHORT).sequences  # the same session
    finally:
        handle.remove()
    assert torch.equal(again, answer[0])
    assert fingerprint(model) == want
    second = tokens(model, method, inputs)
    assert torch.equal(second[0], answer[0])
    assert all(torch.equal(*pair) for pair in zip(second[1], answer[1], strict=True))
    assert fingerprint(model) == want


@every
def test_another_thread_generates_plainly_between_two_steps(model: Any, name: str, options: dict[str, Any]) -> None:
    """While this thread's prompt is stored and its call is under way, not only between two calls."""
    inputs, other = (families.prompt(model.family, seed=seed, dtype=torch.float64) for seed in (0, 5))
    method, plain, found = matrix.method(name, **options), matrix.plain(model, other), []
    answer = tokens(model, method, inputs)

    class Meanwhile(families.hf.LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            def work() -> None:
                with torch.no_grad():
                    found.append(matrix.plain(model, other, max_new_tokens=3))

            if len(found) < 2:
                worker = threading.Thread(target=work)
                worker.start()
                worker.join()
            return scores

    with foveakv.compress(model, method) as session:
        mine = model.generate(**inputs, **SHORT, logits_processor=[Meanwhile()])
        assert session.cache is matrix.cache_of(mine)
        kept = [session.kept(layer.layer_idx) for layer in session.cache.compressed]
    assert torch.equal(mine.sequences, answer[0])
    assert all(torch.equal(*pair) for pair in zip(kept, answer[1], strict=True))
    assert len(found) == 2
    for theirs in found:
        assert largest_difference(theirs.logits, plain.logits[:3]) < 1e-9
        assert not isinstance(theirs.cache, foveakv.CompressedCache)
