"""Visual head scores against the model's own eager attention, with boxes, without, and with nothing to name."""

from __future__ import annotations

from typing import Any

import families
import pytest
import tiny_folder
import torch

from foveakv import errors
from foveakv.analysis.head_scores import HeadSample, Target, target_places, visual_head_scores
from foveakv.core.prompt import PromptMap
from foveakv.models.inputs import build_inputs

TEXT, STEPS = "<image> and <image> what?", 8


@pytest.fixture(scope="module")
def setting() -> tuple[Any, Any, list[Any], list[int], list[torch.Tensor], torch.Tensor]:
    """A model, its processor, pictures, what it generates, and for each step [L, Hq] the most attended column."""
    model, processor = families.build("llava", dtype=torch.float64), tiny_folder.processor()
    pictures = [tiny_folder.picture(0), tiny_folder.picture(1)]
    inputs = build_inputs(processor, TEXT, pictures, model=model)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model.generate(
            **inputs, max_new_tokens=STEPS, do_sample=False, return_dict_in_generate=True, output_attentions=True
        )
    model.set_attn_implementation("sdpa")
    tokens = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    tops = [torch.stack([layer[0, :, -1].argmax(-1) for layer in step]) for step in output.attentions]
    columns = (inputs["input_ids"][0] == families.IMAGE).nonzero().flatten()
    return model, processor, pictures, tokens, tops, columns


def test_every_token_where_there_are_no_targets(setting: Any) -> None:
    model, processor, pictures, tokens, tops, columns = setting
    scores = visual_head_scores(model, processor, [HeadSample(TEXT, pictures)], max_new_tokens=STEPS)
    want = torch.zeros(families.LAYERS, families.HEADS)
    for step in range(len(tokens)):
        want += torch.isin(tops[step], columns) / len(columns)
    assert scores.shape == (families.LAYERS, families.KV_HEADS)
    assert torch.allclose(scores, want.view(families.LAYERS, families.KV_HEADS, -1).sum(-1))
    assert float(scores.max()) > 0


def test_the_place_that_a_token_names(setting: Any) -> None:
    """The first generated token names picture 1; the mean runs over samples, of which the second names nothing."""
    model, processor, pictures, tokens, tops, columns = setting
    words = [processor.tokenizer.decode([token]).strip() for token in tokens]
    word = next(word for word in words if word)
    samples = [
        HeadSample(TEXT, pictures, [Target(f"<{word}>", image=1)]),
        HeadSample(TEXT, pictures, [Target("\u2603" * 3)]),
    ]
    scores = visual_head_scores(model, processor, samples, max_new_tokens=STEPS)
    own = columns[len(columns) // 2 :]
    want = torch.zeros(families.LAYERS, families.HEADS)
    for step, said in enumerate(words):
        if said and said in f"<{word}>":
            want += torch.isin(tops[step], own) / len(own) / 2
    assert torch.allclose(scores, want.view(families.LAYERS, families.KV_HEADS, -1).sum(-1))


def test_a_token_that_fits_two_targets_counts_for_none(setting: Any) -> None:
    model, processor, pictures, tokens, _, _ = setting
    everything = "".join(processor.tokenizer.decode([token]) for token in tokens)
    samples = [HeadSample(TEXT, pictures, [Target(everything, image=0), Target(everything, image=1)])]
    with pytest.raises(errors.InputError, match="none of the tokens"):
        visual_head_scores(model, processor, samples, max_new_tokens=STEPS)


def test_boxes_are_patches() -> None:
    """Sixteen tokens of a square picture, 4 x 4: the box touches rows 0 and 1 of columns 2 and 3."""
    prompt = PromptMap(torch.tensor([[0] * 3 + [1] * 16 + [0] * 2]))
    picture = tiny_folder.picture(0, size=(64, 64))
    places = target_places(prompt, [picture], [Target("a", box=(0.5, 0.1, 0.9, 0.4)), Target("b")])
    assert places[0].tolist() == [3 + 2, 3 + 3, 3 + 6, 3 + 7]
    assert places[1].tolist() == list(range(3, 19))


@pytest.mark.parametrize(("target", "message"), [
    (Target("a", image=1), "image=1 of target 'a' is out of range"),
    (Target("a", box=(0.5, 0.0, 0.5, 1.0)), "in shares of the image"),
    (Target("a", box=(0.0, 0.0, 64.0, 64.0)), "in shares of the image"),
])  # fmt: skip
def test_targets_that_are_nowhere(target: Target, message: str) -> None:
    prompt = PromptMap(torch.tensor([[0] + [1] * 16]))
    with pytest.raises(errors.InputError, match=message):
        target_places(prompt, [tiny_folder.picture(0, size=(64, 64))], [target])


def test_boxes_over_tokens_without_a_grid() -> None:
    prompt = PromptMap(torch.tensor([[0] + [1] * 7]))
    with pytest.raises(errors.InputError, match="no grid"):
        target_places(prompt, [tiny_folder.picture(0, size=(64, 64))], [Target("a", box=(0.0, 0.0, 0.5, 0.5))])


def test_no_samples(setting: Any) -> None:
    with pytest.raises(errors.InputError, match="0 samples"):
        visual_head_scores(setting[0], setting[1], [])
