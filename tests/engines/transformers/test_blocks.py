"""Later turns are compressed like the first one: every pass equals a full cache masked to what was stored before it."""

from __future__ import annotations

from typing import Any

import families
import matrix
import pytest
import talks
import torch

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.mark.parametrize("talk", talks.TURNS)
@pytest.mark.parametrize("name", matrix.METHODS)
@pytest.mark.parametrize("family", talks.FAMILIES)
def test_turns(family: str, name: str, talk: str) -> None:
    model = matrix.model(family, torch.float64)
    method = matrix.method(name)
    if method.visual_only and family in families.TEXT:
        pytest.skip("evicts visual tokens only")
    say: Any = lambda: talks.converse(family, model, talks.TURNS[talk])  # noqa: E731
    talks.check(model, talks.compressed(model, method, say), say)
