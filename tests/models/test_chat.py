"""Inputs from chat messages, with and without a chat template."""

from __future__ import annotations

import pytest
import tiny_folder

import foveakv
from foveakv.errors import InputError
from foveakv.models.chat import Message, build_chat_inputs

CHAT = [
    Message("system", ("Be brief.",)),
    Message("user", ("One: ", None, "\nTwo: ", None)),
    Message("assistant", ("Cards.",)),
    Message("user", ("Which?",)),
]
IMAGES = [tiny_folder.picture(i) for i in range(2)]


def rendered(chat: bool, messages: list[Message]) -> str:
    processor = tiny_folder.processor(chat)
    images = IMAGES[: sum(message.images for message in messages)]
    ids = build_chat_inputs(processor, messages, images)["input_ids"][0]
    text = processor.tokenizer.decode(ids)
    for _ in range(20):
        text = text.replace("<image><image>", "<image>")
    return str(text)


def test_with_a_template() -> None:
    assert rendered(True, CHAT) == (
        "<s>system: Be brief.\n<s>user: One: <image>\nTwo: <image>\n<s>assistant: Cards.\n<s>user: Which?\nassistant: "
    )


def test_without_a_template() -> None:
    assert rendered(False, CHAT) == "Be brief.\nOne: <image>\nTwo: <image>\nCards.</s>Which?"
    assert rendered(False, [Message("user", (None, None, "Which?"))]) == "<image>\n<image>\nWhich?"


def test_one_message_is_what_build_inputs_makes() -> None:
    for chat in (True, False):
        processor = tiny_folder.processor(chat)
        own = build_chat_inputs(processor, [Message("user", ("One: ", None, "\nWhich?"))], IMAGES[:1])
        assert own["input_ids"].equal(foveakv.build_inputs(processor, "One: <image>\nWhich?", IMAGES[:1])["input_ids"])


def test_a_text_model() -> None:
    tokenizer = tiny_folder.tokenizer()
    assert build_chat_inputs(tokenizer, [Message("user", ("Which?",))])["input_ids"].shape[1] == 6
    with pytest.raises(InputError, match="takes no images"):
        build_chat_inputs(tokenizer, [Message("user", (None, "Which?"))], IMAGES[:1])


WRONG = [
    ([], 0, "must be the user's"),
    ([Message("assistant", ("a",))], 0, "must be the user's"),
    ([Message("user", ("a", None))], 2, "number of places"),
    ([Message("user", (" ",))], 0, "empty"),
    ([Message("user", ("a<image>",))], 0, "<image>"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_wrong_chats(number: int) -> None:
    messages, images, message = WRONG[number]
    with pytest.raises(InputError, match=message):
        build_chat_inputs(tiny_folder.processor(True), messages, IMAGES[:images])
