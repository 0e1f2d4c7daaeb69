"""HAE's deciding layer: which layers are tried, which one is chosen, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from foveakv.errors import InputError, NoVisualTokensError
from foveakv.evaluation import builtin_prompts
from foveakv.evaluation.agreement import Agreement
from foveakv.evaluation.items import Item, Turn
from foveakv.evaluation.score_layers import beside, choose, find_layer, spread
from foveakv.evaluation.trial import Followed

PROMPTS = [Item("prompts", n, 0, (), (Turn("?", ()),)) for n in range(6)]
VISUAL = torch.tensor([False, True, True, True, True, False])


class Fake:
    """A bench whose KL and choice depend on the layer; a method is its layer. Prompts in `fails` raise."""

    def __init__(self, kls: dict[int, float], fails: Sequence[int] = (), scored: int = 5) -> None:
        self.kls, self.fails, self.scored = kls, fails, scored
        self.asked: list[tuple[int, list[int]]] = []

    def follow(self, item: Item, methods: Sequence[Any]) -> list[Followed | Exception]:
        self.asked.append((item.number, list(methods)))
        return [self._one(item.number, layer) for layer in methods]

    def _one(self, number: int, layer: int) -> Followed | Exception:
        if number in self.fails:
            return NoVisualTokensError("no image")
        noise = 0.01 * math.sin(number + layer)
        agreement = Agreement([True] * self.scored, [self.kls.get(layer, 1.0) + noise] * self.scored)
        kept = torch.tensor([1.0, 1, 1, 0, 0, 1] if layer < 4 else [1.0, 0, 1, 1, 0, 1])
        return Followed(agreement, kept, VISUAL)


def find(bench: Any, layers: list[int] | None = None, depth: int = 30, **options: Any) -> Any:
    return find_layer(bench, PROMPTS, depth, layers=layers, make=lambda layer: layer, **options)  # type: ignore[arg-type, return-value]


def test_coarse_then_fine() -> None:
    bench = Fake({layer: 0.1 + 0.02 * abs(layer - 14) for layer in range(30)})
    curve = find(bench)
    assert spread(30) == [0, 4, 8, 12, 16, 20, 24, 28]
    assert [layers for _, layers in bench.asked] == 6 * [spread(30)] + 6 * [[9, 10, 11, 13, 14, 15]]
    assert [found.layer for found in curve.figures] == [0, 4, 8, 9, 10, 11, 12, 13, 14, 15, 16, 20, 24, 28]
    assert curve.chosen == 14
    assert (curve.depth, curve.prompts, curve.at(14).scored) == (30, 6, 30)
    assert curve.at(14).kl.low < curve.at(14).kl.mean < curve.at(14).kl.high


def test_layers_beside_the_first_and_the_last() -> None:
    assert beside(0, [0, 4, 8], 10) == [1, 2, 3]
    assert beside(8, [0, 4, 8], 10) == [5, 6, 7, 9]
    assert spread(3) == [0, 1, 2]
    assert beside(1, [0, 1, 2], 3) == []


def test_given_layers_are_the_only_ones() -> None:
    bench = Fake({2: 0.1})
    assert [found.layer for found in find(bench, [7, 2]).figures] == [2, 7]
    assert len(bench.asked) == 6


def test_of_layers_that_are_as_good_the_earliest_is_chosen() -> None:
    """Noise: layer 5 wins on some prompts and loses on others. A tenth above the lowest is too much, and so is a small
    difference that is there on every prompt."""
    noisy = {5: {n: 0.1 + 0.02 * (-1) ** n for n in range(10)}, 9: dict.fromkeys(range(10), 0.099)}
    assert choose(noisy) == 5
    assert choose({**noisy, 5: {n: 0.12 + 0.2 * (-1) ** n for n in range(10)}}) == 9
    assert choose({5: {n: 0.1 + 0.001 * n for n in range(10)}, 9: {n: 0.098 + 0.001 * n for n in range(10)}}) == 9
    assert choose({3: {0: 0.1, 1: 0.2}, 4: {0: 0.1, 1: 0.2}}) == 3


def test_what_other_layers_would_choose() -> None:
    """Layers 0 and 2 keep the same two visual tokens, layer 8 shares one of them."""
    curve = find(Fake({}), [0, 2, 8])
    assert curve.at(0).own_kept == pytest.approx((1.0 + 0.5) / 2)
    assert curve.at(8).own_kept == pytest.approx(0.5)
    assert math.isnan(find(Fake({}), [0]).at(0).own_kept)


def test_prompts_without_images_are_left_out() -> None:
    curve = find(Fake({}, fails=[1, 4]), [0, 2])
    assert curve.prompts == 4
    assert curve.skipped == ("NoVisualTokensError: no image",) * 2


@pytest.mark.parametrize(
    ("bench", "options", "message"),
    [
        (Fake({}), {"layers": [30]}, "the layers to try are 0 to 29; got 30"),
        (Fake({}), {"layers": []}, "got none"),
        (Fake({}), {"keep": 1.0}, "between 0 and 1"),
        (Fake({}, fails=range(6)), {}, "no prompt can be compared: NoVisualTokensError: no image"),
        (Fake({}, scored=0), {}, "the reply has no token to compare"),
    ],
)
def test_what_is_refused(bench: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        find(bench, **options)


def test_prompts_that_come_with_the_package() -> None:
    embedded, general = builtin_prompts.embedded(2), builtin_prompts.general(5)
    assert [item.task for item in embedded[::2]] == [f"{name}@validation" for name in builtin_prompts.EMBEDDED]
    assert [len(item.images) > 1 for item in general] == [False, False, True, True, False]
    assert all(item.turns[0].text for item in general)
