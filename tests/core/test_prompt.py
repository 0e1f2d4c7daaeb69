"""PromptMap: every family writes its prompt differently; the map must not care."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from foveakv.core.prompt import (
    AUDIO,
    IMAGE,
    PAD,
    TEXT,
    VIDEO,
    PromptMap,
    Span,
    placeholder_ids,
)
from foveakv.errors import InputError

IMG, VID, AUD, START, END = 90, 91, 92, 93, 94
QWEN = SimpleNamespace(
    model_type="qwen2_5_vl",
    image_token_id=IMG,
    video_token_id=VID,
    vision_start_token_id=START,
    vision_end_token_id=END,
)
LLAVA = SimpleNamespace(model_type="llava", image_token_index=IMG)
GEMMA3 = SimpleNamespace(
    model_type="gemma3",
    image_token_index=IMG,
    boi_token_index=START,
    eoi_token_index=END,
)
PHI4 = SimpleNamespace(
    model_type="phi4_multimodal",
    vision_config=SimpleNamespace(image_token_id=IMG),
    audio_config=SimpleNamespace(audio_token_id=AUD),
)
GLM = SimpleNamespace(
    model_type="glm4v",
    image_token_id=IMG,
    video_token_id=VID,
    video_start_token_id=START,
    video_end_token_id=END,
)


def ids(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows)


@pytest.mark.parametrize("config", [QWEN, LLAVA, GEMMA3, PHI4], ids=lambda c: c.model_type)
@pytest.mark.parametrize("images", [0, 1, 3])
def test_counts_images(config, images):
    row = [1, 2] + [t for _ in range(images) for t in [START, IMG, IMG, IMG, END, 5]]
    prompt = PromptMap.from_inputs(config, ids(row))
    spans = prompt.spans(0)
    assert [s.index for s in spans] == list(range(images))
    assert [(s.start, s.end) for s in spans] == [(3 + 6 * i, 6 + 6 * i) for i in range(images)]
    assert all(s.kind == IMAGE and s.length == 3 for s in spans)
    assert prompt.first_visual.tolist() == [3 if images else len(row)]
    assert prompt.has_visual is bool(images)
    assert torch.equal(prompt.visual, ids(row) == IMG)
    assert torch.equal(prompt.text, ids(row) != IMG)
    assert prompt.lengths.tolist() == [len(row)]
    assert prompt.kinds.dtype == torch.int8


def test_image_first_and_last():
    prompt = PromptMap.from_inputs(LLAVA, ids([IMG, IMG, 1, 2], [1, 2, IMG, IMG]))
    assert prompt.spans(0) == [Span(IMAGE, 0, 2, 0)]
    assert prompt.spans(1) == [Span(IMAGE, 2, 4, 0)]
    assert prompt.first_visual.tolist() == [0, 2]


def test_adjacent_images():
    touching = ids([1, IMG, IMG, IMG, IMG, IMG, 2])
    assert PromptMap.from_inputs(LLAVA, touching).spans(0) == [Span(IMAGE, 1, 6, 0)]
    told = PromptMap.from_inputs(LLAVA, touching, image_lengths=[[2, 3]])
    assert told.spans(0) == [Span(IMAGE, 1, 3, 0), Span(IMAGE, 3, 6, 1)]
    marked = PromptMap.from_inputs(QWEN, ids([START, IMG, IMG, END, START, IMG, END]))
    assert marked.spans(0) == [Span(IMAGE, 1, 3, 0), Span(IMAGE, 5, 6, 1)]


def test_markers_counted_as_image_by_the_processor_stay_text():
    row = ids([START, IMG, IMG, END, START, IMG, IMG, END, 3])
    types = ids([1, 1, 1, 1, 1, 1, 1, 1, 0])
    prompt = PromptMap.from_inputs(QWEN, row, mm_token_type_ids=types)
    assert prompt.spans(0) == [Span(IMAGE, 1, 3, 0), Span(IMAGE, 5, 7, 1)]
    assert torch.equal(prompt.kinds, PromptMap.from_inputs(QWEN, row).kinds)


def test_image_lengths_join_the_rows_of_one_image():
    row = ids([1, IMG, IMG, 7, IMG, IMG, 8, IMG, IMG, 8])  # Pixtral: 7 = row break, 8 = image end
    prompt = PromptMap.from_inputs(LLAVA, row, image_lengths=[[4, 2]])
    assert prompt.spans(0) == [
        Span(IMAGE, 1, 3, 0),
        Span(IMAGE, 4, 6, 0),
        Span(IMAGE, 7, 9, 1),
    ]


@pytest.mark.parametrize("lengths", [[[2]], [[3, 3]], [[0, 3]], [[3], [3]], [[-1, 4]]])
def test_wrong_image_lengths(lengths):
    with pytest.raises(InputError, match="image_lengths"):
        PromptMap.from_inputs(LLAVA, ids([1, IMG, IMG, IMG]), image_lengths=lengths)


def test_video_and_image():
    row = ids([1, START, VID, VID, END, START, IMG, END, START, VID, END])
    prompt = PromptMap.from_inputs(QWEN, row)
    assert prompt.spans(0) == [
        Span(VIDEO, 2, 4, 0),
        Span(IMAGE, 6, 7, 0),
        Span(VIDEO, 9, 10, 1),
    ]
    assert int(prompt.visual.sum()) == 4


def test_glm_writes_frames_as_image_tokens():
    prompt = PromptMap.from_inputs(GLM, ids([IMG, 1, START, 5, IMG, IMG, 6, 5, IMG, 6, END, IMG]))
    assert [s.kind for s in prompt.spans(0)] == [IMAGE, VIDEO, VIDEO, IMAGE]
    assert [s.index for s in prompt.spans(0)] == [0, 0, 1, 1]


def test_modalities_take_precedence():
    row = ids([1, IMG, IMG, 2, IMG])
    prompt = PromptMap.from_inputs(QWEN, row, mm_token_type_ids=ids([0, 2, 2, 0, 0]))
    assert prompt.kinds.tolist() == [[TEXT, VIDEO, VIDEO, TEXT, TEXT]]
    unknown = PromptMap.from_inputs(None, row, mm_token_type_ids=ids([0, 1, 1, 3, 2]))
    assert unknown.kinds.tolist() == [[TEXT, IMAGE, IMAGE, AUDIO, VIDEO]]
    with pytest.raises(InputError, match="mm_token_type_ids"):
        PromptMap.from_inputs(QWEN, row, mm_token_type_ids=ids([0, 4, 0, 0, 0]))
    with pytest.raises(InputError, match="mm_token_type_ids"):
        PromptMap.from_inputs(QWEN, row, mm_token_type_ids=ids([0, 1]))


def test_token_type_ids_are_modalities_for_gemma3_only():
    row, types = ids([1, START, IMG, IMG, END, 4]), ids([0, 0, 1, 1, 0, 0])
    assert PromptMap.from_inputs(GEMMA3, row, token_type_ids=types).spans(0) == [Span(IMAGE, 2, 4, 0)]
    unnamed = SimpleNamespace(model_type="gemma3")
    assert PromptMap.from_inputs(unnamed, row, token_type_ids=types).spans(0) == [Span(IMAGE, 2, 4, 0)]
    pali = SimpleNamespace(model_type="paligemma", image_token_index=IMG)  # 1 = suffix there
    suffix = PromptMap.from_inputs(pali, ids([IMG, IMG, 1, 2]), token_type_ids=ids([0, 0, 0, 1]))
    assert suffix.kinds.tolist() == [[IMAGE, IMAGE, TEXT, TEXT]]


def test_phi4_names_its_ids_in_the_parts():
    assert placeholder_ids(PHI4) == {IMAGE: {IMG}, VIDEO: set(), AUDIO: {AUD}}
    prompt = PromptMap.from_inputs(PHI4, ids([1, IMG, AUD, 2]))
    assert prompt.kinds.tolist() == [[TEXT, IMAGE, AUDIO, TEXT]]
    assert not prompt.text[0, 2]
    assert not prompt.visual[0, 2]


def test_padding_left_right_and_a_longer_mask():
    row = ids([0, 0, 1, IMG, IMG], [1, IMG, 3, 0, 0], [1, 2, 3, IMG, 5])
    mask = ids([0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1])
    prompt = PromptMap.from_inputs(LLAVA, row, mask)
    assert prompt.lengths.tolist() == [3, 3, 5]
    assert prompt.first_visual.tolist() == [3, 1, 3]
    assert prompt.kinds[0].tolist() == [PAD, PAD, TEXT, IMAGE, IMAGE]
    assert prompt.kinds[1].tolist() == [TEXT, IMAGE, TEXT, PAD, PAD]
    longer = torch.cat([torch.ones(3, 4, dtype=torch.long), mask], 1)
    assert torch.equal(PromptMap.from_inputs(LLAVA, row, longer).kinds, prompt.kinds)
    assert torch.equal(PromptMap.from_inputs(LLAVA, row, mask.bool()).kinds, prompt.kinds)
    assert torch.equal(PromptMap.from_inputs(LLAVA, row, mask.float()).kinds, prompt.kinds)


def test_padding_with_the_image_token_is_padding():
    prompt = PromptMap.from_inputs(LLAVA, ids([IMG, IMG, 1, IMG]), ids([0, 0, 1, 1]))
    assert prompt.spans(0) == [Span(IMAGE, 3, 4, 0)]


@pytest.mark.parametrize("shape", [(1, 3), (2, 5), (1, 1, 5, 5), (5,)])
def test_wrong_masks(shape):
    with pytest.raises(InputError, match="attention_mask"):
        PromptMap.from_inputs(LLAVA, ids([1, 2, 3, IMG, 5]), torch.ones(shape))


def test_text_model_has_no_visual_tokens():
    prompt = PromptMap.from_inputs(SimpleNamespace(model_type="llama"), ids([1, IMG, 3]))
    assert prompt.spans(0) == []
    assert not prompt.has_visual
    assert prompt.first_visual.tolist() == [3]


def test_take_gathers_and_pads():
    prompt = PromptMap.from_inputs(QWEN, ids([1, IMG, IMG, 2, IMG, VID], [1, 2, 3, 4, 5, IMG]))
    index = ids([0, 2, 4, 5], [1, 5, 0, 0])
    valid = torch.tensor([[True] * 4, [True, True, False, False]])
    taken = prompt.take(index, valid)
    assert taken.kinds.tolist() == [
        [TEXT, IMAGE, IMAGE, VIDEO],
        [TEXT, IMAGE, PAD, PAD],
    ]
    assert taken.spans(0) == [
        Span(IMAGE, 1, 2, 0),
        Span(IMAGE, 2, 3, 1),
        Span(VIDEO, 3, 4, 0),
    ]  # still two images
    assert taken.lengths.tolist() == [4, 2]


def test_concat_counts_on():
    first = PromptMap.from_inputs(LLAVA, ids([1, IMG, 2], [1, 2, 3]))
    second = PromptMap.from_inputs(LLAVA, ids([4, IMG], [IMG, 4]))
    both = first.concat(second)
    assert both.spans(0) == [Span(IMAGE, 1, 2, 0), Span(IMAGE, 4, 5, 1)]
    assert both.spans(1) == [Span(IMAGE, 3, 4, 0)]
    with pytest.raises(InputError):
        first.concat(PromptMap(second.kinds[:1]))


@pytest.mark.parametrize("cut", range(9))
def test_concat_of_chunks_is_the_whole(cut):
    row = ids([1, IMG, IMG, 2, VID, VID, IMG, IMG, 3])
    whole = PromptMap.from_inputs(QWEN, row)
    parts = [PromptMap.from_inputs(QWEN, part) for part in (row[:, :cut], row[:, cut:])]
    joined = parts[0].concat(parts[1])
    assert torch.equal(joined.kinds, whole.kinds)
    assert joined.spans(0) == whole.spans(0)


def test_append_crop_expand_select():
    prompt = PromptMap.from_inputs(LLAVA, ids([1, IMG], [IMG, 1]))
    longer = prompt.append(2, torch.tensor([[True, True], [True, False]]))
    assert longer.kinds.tolist() == [
        [TEXT, IMAGE, TEXT, TEXT],
        [IMAGE, TEXT, TEXT, PAD],
    ]
    assert prompt.expand(2).kinds.tolist() == [[TEXT, IMAGE]] * 2 + [[IMAGE, TEXT]] * 2
    assert prompt.select(torch.tensor([1, 1, 0])).first_visual.tolist() == [0, 0, 1]


def test_shapes_are_checked():
    with pytest.raises(InputError, match="input_ids"):
        PromptMap.from_inputs(LLAVA, torch.tensor([1, 2, 3]))
    with pytest.raises(InputError):
        PromptMap(torch.zeros(3))
    with pytest.raises(InputError):
        PromptMap(torch.zeros(1, 3), torch.zeros(1, 2))


def test_real_configs():
    transformers = pytest.importorskip("transformers")
    names = {
        "Qwen2VLConfig": "image_token_id",
        "Qwen2_5_VLConfig": "image_token_id",
        "Qwen3VLConfig": "image_token_id",
        "LlavaConfig": "image_token_index",
        "LlavaOnevisionConfig": "image_token_index",
        "InternVLConfig": "image_token_id",
        "Idefics3Config": "image_token_id",
        "Gemma3Config": "image_token_index",
        "PaliGemmaConfig": "image_token_index",
    }
    for name, attribute in names.items():
        config = getattr(transformers, name)()
        token = getattr(config, attribute)
        prompt = PromptMap.from_inputs(config, torch.tensor([[1, token, token, 2]]))
        assert prompt.spans(0) == [Span(IMAGE, 1, 3, 0)], name
    config = transformers.Phi4MultimodalConfig()
    token = config.vision_config.image_token_id
    assert PromptMap.from_inputs(config, torch.tensor([[1, token]])).spans(0) == [Span(IMAGE, 1, 2, 0)]
