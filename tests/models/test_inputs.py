"""Building model inputs: where pictures go, and every way in which files and marks can be wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import pytest
import tiny_folder
import torch
from PIL import Image

from foveakv.errors import InputError
from foveakv.models.images import read_image
from foveakv.models.inputs import _split, build_inputs

IMAGE_TOKENS = 16


@pytest.fixture(scope="module")
def plain() -> Any:
    return tiny_folder.processor()


@pytest.fixture(scope="module")
def chat() -> Any:
    return tiny_folder.processor(chat=True)


def text_of(processor: Any, inputs: dict[str, Any]) -> str:
    text = processor.tokenizer.decode(inputs["input_ids"][0])
    return text.replace("<image>" * IMAGE_TOKENS, "[I]")


def test_pictures_come_first_without_marks(plain: Any) -> None:
    inputs = build_inputs(plain, "What differs?", [tiny_folder.picture(0), tiny_folder.picture(1)])
    assert text_of(plain, inputs) == "[I]\n[I]\nWhat differs?"
    assert inputs["pixel_values"].shape[0] == 2


def test_marks_place_pictures(plain: Any) -> None:
    inputs = build_inputs(plain, "Ann: <image>\nBob: <image>\nWho?", [tiny_folder.picture(i) for i in range(2)])
    assert text_of(plain, inputs) == "Ann: [I]\nBob: [I]\nWho?"


def test_one_picture_at_the_end_of_the_prompt(plain: Any) -> None:
    assert text_of(plain, build_inputs(plain, "Look: <image>", [tiny_folder.picture()])) == "Look: [I]"


def test_a_chat_template_gets_one_user_message(chat: Any) -> None:
    inputs = build_inputs(chat, "Ann: <image>, and?", [tiny_folder.picture()])
    assert text_of(chat, inputs) == "<s>user: Ann: [I], and?\nassistant: "
    inputs = build_inputs(chat, "And?", [tiny_folder.picture(), tiny_folder.picture()])
    assert text_of(chat, inputs) == "<s>user: [I][I]And?\nassistant: "


def test_text_without_pictures(plain: Any, chat: Any) -> None:
    assert text_of(plain, build_inputs(plain, "Hello")) == "Hello"
    assert "pixel_values" not in build_inputs(plain, "Hello")
    assert text_of(chat, build_inputs(chat, "Hello")) == "<s>user: Hello\nassistant: "


def test_a_tokenizer_alone_takes_text_and_no_pictures(plain: Any) -> None:
    assert build_inputs(plain.tokenizer, "Hello")["input_ids"].shape == (1, 5)
    with pytest.raises(InputError, match=r"takes no images, and 1 were given"):
        build_inputs(plain.tokenizer, "Hello", [tiny_folder.picture()])


def test_tensors_follow_the_model(plain: Any) -> None:
    model = families.build("llava", dtype=torch.bfloat16)
    inputs = build_inputs(plain, "Hello", [tiny_folder.picture()], model=model)
    assert inputs["pixel_values"].dtype == torch.bfloat16
    assert inputs["input_ids"].dtype == torch.int64


def test_the_model_answers(plain: Any) -> None:
    model = families.build("llava")
    inputs = build_inputs(plain, "Hello", [tiny_folder.picture()], model=model)
    assert model.generate(**inputs, max_new_tokens=3).shape[1] == inputs["input_ids"].shape[1] + 3


@pytest.mark.parametrize(("prompt", "given", "message"), [
    ("<image> and <image>", 1, r"2 <image> marks and 1 image was given"),
    ("<image> only", 2, r"1 <image> mark and 2 images were given"),
    ("<image> only", 0, r"1 <image> mark and 0 images were given"),
])  # fmt: skip
def test_marks_and_pictures_must_agree(plain: Any, prompt: str, given: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_inputs(plain, prompt, [tiny_folder.picture(i) for i in range(given)])


def test_marks_go_by_the_models_own_name_too() -> None:
    class Renamed:
        image_token = "<pic>"

    assert _split(Renamed(), "a <image> b <pic> c", 2) == ["a ", " b ", " c"]


def test_an_empty_prompt(plain: Any) -> None:
    with pytest.raises(InputError, match="prompt is empty"):
        build_inputs(plain, "  \n")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"image file not found: .*nothing\.png"):
        read_image(tmp_path / "nothing.png")


def test_folder_in_place_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder"):
        read_image(tmp_path)


def test_file_that_is_no_picture(tmp_path: Path) -> None:
    file = tmp_path / "notes.png"
    file.write_text("just text")
    with pytest.raises(InputError, match=r"notes\.png is not an image"):
        read_image(file)


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_truncated_picture(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"cut.{suffix}"
    tiny_folder.picture(size=(200, 200)).save(file)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(InputError, match=rf"cut\.{suffix} is damaged or truncated"):
        read_image(file)


def test_grey_and_transparent_pictures_become_rgb(tmp_path: Path) -> None:
    for mode in ("L", "RGBA", "P", "1"):
        file = tmp_path / f"{mode}.png"
        Image.new(mode, (8, 8)).save(file)
        assert read_image(file).mode == "RGB"


def test_a_prompt_that_is_no_text(plain: Any) -> None:
    with pytest.raises(InputError, match="not valid Unicode"):
        build_inputs(plain, "what is \udcff?")


def test_helpers_at_the_top_level() -> None:
    import foveakv
    from foveakv.models.embedded import sample_prompt
    from foveakv.models.images import read_images

    assert foveakv.build_inputs is build_inputs
    assert foveakv.read_images is read_images
    assert foveakv.sample_prompt is sample_prompt
    assert {"build_inputs", "read_images", "sample_prompt"} <= set(foveakv.__all__)


def test_a_template_that_fails_is_named(plain: Any) -> None:
    broken = tiny_folder.processor(chat=True)
    broken.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InputError, match=r"chat template of LlavaProcessor failed.*roles must alternate"):
        build_inputs(broken, "Hello")
