"""MustDrop by hand: the dual-attention filter in several layers, key tokens, and what each layer stores."""

from __future__ import annotations

import math
from typing import Any

import families
import matrix
import pytest
import torch
from torch import Tensor

from foveakv.core.prompt import IMAGE, PAD, TEXT, VIDEO, PromptMap
from foveakv.errors import MethodError, NoVisualTokensError
from foveakv.methods.mustdrop import MustDrop, image_numbers, numbers, stage_counts

FAMILY = "llava"
STAGES = (1, 3)


@pytest.fixture(scope="module")
def setting() -> tuple[Any, dict[str, Any], list[Tensor], list[list[int]]]:
    """A model, a prompt, the head-mean eager attention of every layer [C, C], and the columns of its images."""
    model = families.build(FAMILY, dtype=torch.float64)
    inputs = families.prompt(FAMILY, images=2, dtype=torch.float64)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        layers = model(**inputs, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    images: list[list[int]] = []
    for c, token in enumerate(inputs["input_ids"][0].tolist()):
        if token == families.IMAGE:
            if not images or images[-1][-1] != c - 1:
                images.append([])
            images[-1].append(c)
    assert len(images) == 2
    return model, inputs, [weights[0].mean(0) for weights in layers], images


def key_tokens(attention: Tensor, images: list[list[int]], portion: float) -> set[int]:
    keys: set[int] = set()
    for image in images:
        ranked = sorted(image, key=lambda c: (-float(attention[image[-1], c]), c))
        keys |= set(ranked[: math.ceil(portion * len(image) - 1e-9)])
    return keys


def by_hand(attention: list[Tensor], images: list[list[int]], columns: int, r: float, alpha: float, portion: float):
    """What is left of the visual tokens after each stage."""
    visual = [c for image in images for c in image]
    text = [c for c in range(columns) if c not in visual]
    keys = key_tokens(attention[STAGES[0]], images, portion)
    left, after = set(visual), []
    for layer in STAGES:
        sums = {c: sum(float(attention[layer][i, c]) for i in text if i > c) for c in left}
        maxima = {c: max(float(attention[layer][i, c]) for i in text if i > c) for c in left}
        total = sum(sums.values())
        left = {c for c in left if c in keys or sums[c] >= r * total or maxima[c] >= alpha}
        after.append(left)
    return after


@pytest.mark.parametrize("decode_stage", [True, False])
@pytest.mark.parametrize("portion", [0.0, 0.3])
def test_by_hand(setting: Any, portion: float, decode_stage: bool) -> None:
    model, inputs, attention, images = setting
    columns = inputs["input_ids"].shape[1]
    count = sum(map(len, images))
    r, alpha = 1.05 / count, 1.0
    first, second = by_hand(attention, images, columns, r, alpha, portion)
    assert count > len(first) > len(second) > 0
    text = set(range(columns)) - {c for image in images for c in image}
    method = MustDrop(STAGES, r=r, alpha=alpha, protect=portion, decode_stage=decode_stage)
    run = matrix.compressed(model, method, inputs, max_new_tokens=1)
    everything = set(range(columns))
    want = (
        [everything] + [text | second] * 3
        if decode_stage  # all from the first filtering layer on end with the last one's tokens
        else [everything, everything, text | first, text | first]  # a layer stores what it would have read
    )
    for layer, kept in enumerate(want):
        assert run.cache.kept(layer)[0].tolist() == [sorted(kept)] * families.KV_HEADS
    assert run.cache.results.figures == {"kept_visual": [len(second)]}


def test_the_individual_test_alone_keeps_a_token(setting: Any) -> None:
    model, inputs, attention, images = setting
    columns = inputs["input_ids"].shape[1]
    alpha = 0.04
    first, second = by_hand(attention, images, columns, 1.0, alpha, 0.0)
    assert sum(map(len, images)) > len(first) >= len(second) > 0
    run = matrix.compressed(model, MustDrop(STAGES, r=1.0, alpha=alpha, protect=0.0), inputs, max_new_tokens=1)
    assert run.cache.results.figures == {"kept_visual": [len(second)]}


@pytest.mark.parametrize(("target", "portion"), [(7, 0.0), (0.25, 0.1), (3, 0.5), (0, 0.08)])
def test_target_visual_tokens(setting: Any, target: float, portion: float) -> None:
    model, inputs, attention, images = setting
    columns = inputs["input_ids"].shape[1]
    visual = [c for image in images for c in image]
    text = [c for c in range(columns) if c not in visual]
    keys = key_tokens(attention[STAGES[0]], images, portion)
    least = target if isinstance(target, int) else round(target * len(visual))
    left = list(visual)
    for stage, layer in enumerate(STAGES, 1):
        wanted = len(visual) - (len(visual) - least) * stage // 2
        sums = {c: sum(float(attention[layer][i, c]) for i in text if i > c) for c in left}
        left = sorted(left, key=lambda c: (c not in keys, -sums[c], c))[:wanted]
    run = matrix.compressed(
        model, MustDrop(STAGES, protect=portion, target_visual_tokens=target), inputs, max_new_tokens=1
    )
    assert run.cache.kept(2)[0, 0].tolist() == sorted(text + left)
    assert len(left) == least


def test_layers_that_the_model_has_not_are_passed_over(setting: Any) -> None:
    model, inputs, _, _ = setting
    run = matrix.compressed(model, MustDrop("2,6,10,14", target_visual_tokens=5), inputs, max_new_tokens=1)
    assert run.cache.results.figures == {"kept_visual": [5]}
    with pytest.raises(MethodError, match="compresses 4; name one of 0 to 3"):
        matrix.compressed(model, MustDrop((4, 9)), inputs, max_new_tokens=1)
    with pytest.raises(NoVisualTokensError, match="mustdrop"):
        matrix.compressed(model, MustDrop(), families.prompt(FAMILY, images=0), max_new_tokens=1)


@families.images_in_chunks
def test_a_prompt_in_chunks_keeps_the_same() -> None:
    model, inputs = matrix.model("qwen2_5_vl", torch.float64), families.batch("qwen2_5_vl", dtype=torch.float64).inputs
    whole = matrix.compressed(model, matrix.method("mustdrop"), inputs)
    chunked = matrix.compressed(model, matrix.method("mustdrop"), inputs, prefill_chunk_size=16)
    assert torch.equal(whole.tokens, chunked.tokens)
    for one, other in zip(matrix.positions_held(whole), matrix.positions_held(chunked), strict=True):
        assert torch.equal(one, other)


def test_pictures_are_numbered() -> None:
    kinds = torch.tensor([[PAD, IMAGE, TEXT, IMAGE, IMAGE, VIDEO], [TEXT, TEXT, VIDEO, VIDEO, TEXT, IMAGE]])
    index = torch.tensor([[-1, 0, -1, 1, 1, 0], [-1, -1, 0, 0, -1, 0]])
    got = image_numbers(PromptMap(kinds, index))
    assert [len({n for n in row if n >= 0}) for row in got.tolist()] == [3, 2]
    assert ((got < 0) == (index < 0)).all()
    assert got[0, 3] == got[0, 4]
    assert got.max() == 2
    whole = image_numbers(PromptMap(torch.full((1, 3), IMAGE)))
    assert whole.tolist() == [[0, 0, 0]]


def test_stage_counts() -> None:
    visual = torch.tensor([576, 10, 0])
    assert stage_counts(visual, 192, 1, 4).tolist() == [480, 10, 0]
    assert stage_counts(visual, 192, 4, 4).tolist() == [192, 10, 0]
    assert stage_counts(visual, 0.5, 2, 2).tolist() == [288, 5, 0]


@pytest.mark.parametrize("layers", ["", "a", "1,,2", (1, 1), (-1,), (), (True,), (1.5,), 3, None])
def test_layers_are_checked(layers: Any) -> None:
    with pytest.raises(MethodError, match="layers must be different whole numbers"):
        MustDrop(layers)
    assert numbers(" 6, 2") == numbers((6, 2)) == [2, 6]


@pytest.mark.parametrize("target", [-1, 1.5, True, "3", math.nan])
def test_targets_are_checked(target: Any) -> None:
    with pytest.raises(MethodError, match="target_visual_tokens"):
        MustDrop(target_visual_tokens=target)


@pytest.mark.parametrize(("shares", "layers"), [("0.0,0.5", (0, 2)), ((0.25, 0.8), (1, 3)), ("(1, 2)", (1, 2))])
def test_layers_as_shares_of_the_depth(shares: Any, layers: tuple[int, ...]) -> None:
    model, inputs = matrix.model("llava", torch.float64), families.prompt("llava", dtype=torch.float64)
    options = {"target_visual_tokens": 0.3}
    runs = [matrix.compressed(model, MustDrop(each, **options), inputs) for each in (shares, layers)]
    for a, b in zip(*map(matrix.positions_held, runs), strict=True):
        assert torch.equal(a, b)
    matrix.check_against_reference(model, runs[0], inputs, 1e-9)


@pytest.mark.parametrize("layers", ["0.1,2", (0.5, 0.5), (1.0,), "-0.5", (float("nan"),)])
def test_shares_are_checked(layers: Any) -> None:
    with pytest.raises(MethodError, match="or shares of the depth"):
        MustDrop(layers)
