"""Text while it is generated: whole characters, stop strings over token borders, and single tokens as bytes."""

from __future__ import annotations

import served  # noqa: F401  (skips where the extra is missing)
import tiny_folder
from hypothesis import given
from hypothesis import strategies as st

from foveakv.serving.text import TextStream, TokenTexts

TOKENIZER = tiny_folder.tokenizer()
TEXTS = TokenTexts(TOKENIZER)


def tokens_of(text: str) -> list[int]:
    """One token for each byte."""
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def stream(tokens: list[int], stops: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    """The pieces of a reply, and whether a stop string ended it."""
    text = TextStream(TOKENIZER, stops)
    pieces = []
    for token in tokens:
        pieces.append(text.push(token))
        assert text.sent == sum(map(len, pieces))
        if text.stopped:
            return pieces, True
    pieces.append(text.finish())
    assert text.sent == sum(map(len, pieces))
    return pieces, text.stopped


@given(st.text(max_size=30))
def test_pieces_are_whole_characters_and_all_of_the_text(text: str) -> None:
    pieces, stopped = stream(tokens_of(text))
    assert "".join(pieces) == TOKENIZER.decode(tokens_of(text), skip_special_tokens=True)
    assert not stopped
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@given(st.lists(st.sampled_from(sorted(TOKENIZER.get_vocab().values())), max_size=40))
def test_any_tokens_give_what_the_decoder_gives(tokens: list[int]) -> None:
    pieces, _ = stream(tokens)
    assert "".join(pieces) == TOKENIZER.decode(tokens, skip_special_tokens=True)


@given(
    st.text("ab\u00e4\U0001f600", max_size=25),
    st.lists(st.text("ab\u00e4\U0001f600", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings(text: str, stops: list[str]) -> None:
    found = [place for stop in stops if (place := text.find(stop)) >= 0]
    pieces, stopped = stream(tokens_of(text), tuple(stops))
    assert stopped == bool(found)
    assert "".join(pieces) == (text[: min(found)] if stopped else text)


def test_text_is_held_back_only_while_a_stop_string_may_come() -> None:
    pieces, _ = stream(tokens_of("abcabx"), ("abz",))
    assert pieces == ["", "", "abc", "", "", "abx", ""]


@given(st.text(max_size=10))
def test_bytes_of_tokens(text: str) -> None:
    assert b"".join(TEXTS.bytes_of(token) for token in tokens_of(text)) == text.encode("utf8")


def test_entries_of_tokens() -> None:
    (token,) = tokens_of("a")
    assert TEXTS.entry(token, -0.5) == {"token": "a", "logprob": -0.5, "bytes": [97]}
    assert TEXTS.bytes_of(TOKENIZER.eos_token_id) == b"</s>"
    assert TEXTS.entry(tokens_of("\u00e4")[0], 0.0)["bytes"] == [0xC3]
