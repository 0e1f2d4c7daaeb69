"""HAE with a budget: which tokens of a longer prompt stay."""

from __future__ import annotations

from typing import Any

import families
import matrix
import pytest
import torch

from foveakv.core.prompt import PromptMap
from foveakv.errors import MethodError
from foveakv.methods.dap import room_for_visual
from foveakv.methods.hae import HAE

FAMILY = "llava"


@pytest.fixture
def model() -> Any:
    return matrix.model(FAMILY, torch.float64)


def stored(model: Any, **options: Any) -> tuple[list[list[int]], list[int], list[int]]:
    """Positions that each layer stores, and the prompt's text and visual columns."""
    inputs = families.prompt(FAMILY, dtype=torch.float64, text=5)
    cache = matrix.compressed(model, HAE(score_layer=2, **options), inputs, max_new_tokens=1).cache
    prompt = cache.full_prompt
    kept = [cache.kept(layer)[0, 0].tolist() for layer in range(len(cache.layers))]
    return kept, *(columns[0].nonzero().flatten().tolist() for columns in (prompt.text, prompt.visual))


def test_the_deciding_layer_chooses_where_text_fits(model):
    _, text, _ = stored(model, ddes=False, target_visual_tokens=1.0)
    room = len(text)  # half of the steady size
    kept, *_ = stored(model, budget=len(text) + room)
    assert all(layer == kept[0] for layer in kept)
    assert set(text) <= set(kept[0])
    assert len(kept[0]) == len(text) + room
    alone, *_ = stored(model, ddes=False, target_visual_tokens=room)
    assert kept == alone


def test_with_little_room_for_images_every_layer_chooses(model):
    _, text, _ = stored(model, ddes=False, target_visual_tokens=1.0)
    little = {"budget": len(text) + 1, "r": 0.0}
    assert stored(model, **little) == stored(model, prompt_ranking="own", **little)
    enough = {"budget": len(text) + len(text), "r": 0.0}
    assert stored(model, **enough) != stored(model, prompt_ranking="own", **enough)


def test_room_at_its_edges():
    prompt = PromptMap(torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, -1], [0, 0, 0, 0, 1, 1, 1, 1, 1]]))
    assert room_for_visual(torch.tensor([4, 7]), prompt, prompt.visual).tolist() == [2, 3]
    assert room_for_visual(torch.tensor([3, 6]), prompt, prompt.visual).tolist() == [9, 9]


def test_an_explicit_number_of_visual_tokens_wins(model):
    kept, text, visual = stored(model, budget=1.0, target_visual_tokens=3)
    assert [len(set(layer) & set(visual)) for layer in kept] == [3] * len(kept)
    assert len(kept[0]) == len(text) + 3


@pytest.mark.parametrize("options", [{"prompt_ranking": "text"}, {"dap": False, "prompt_ranking": "own"}])
def test_errors(options):
    with pytest.raises(MethodError, match="prompt_ranking"):
        HAE(budget=0.5, **options)
