"""Read option values from text, by the declared types of a data class's fields."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from foveakv.errors import MethodError

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def field_types(cls: type[Any]) -> dict[str, Any]:
    """The names and declared types of a data class's init fields."""
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}


def option_types(cls: type[Any]) -> dict[str, Any]:
    """As `field_types`, with `preset` (text) for classes that have presets."""
    return {**field_types(cls), **({"preset": str} if hasattr(cls, "preset") else {})}


def parse_value(key: str, kind: Any, text: str) -> Any:
    """Read one value as the declared type `kind`: the first member of a union that accepts the text.

    Raises:
        MethodError: the text fits none; the message names `key` and the types.
    """
    for choice in _choices(kind):
        found, value = _read(choice, text)
        if found:
            return value
    raise MethodError(f"{key}={text}: expected {type_text(kind)}")


def type_text(kind: Any) -> str:
    """Describe a declared type in words: "none or a whole number"."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "none"}
    texts = [
        " or ".join(repr(value) for value in typing.get_args(choice))
        if typing.get_origin(choice) is typing.Literal
        else words.get(choice, getattr(choice, "__name__", str(choice)))
        for choice in _choices(kind)
    ]
    return " or ".join(dict.fromkeys(texts))


def _choices(kind: Any) -> list[Any]:
    """The members of a union, the ones that accept the fewest texts first."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return sorted(typing.get_args(kind), key=_breadth)
    return [kind]


def _breadth(kind: Any) -> int:
    narrow_first = [type(None), typing.Literal, bool, int, float, str]
    kind = typing.get_origin(kind) or kind
    return narrow_first.index(kind) if kind in narrow_first else len(narrow_first)


def _read(kind: Any, text: str) -> tuple[bool, Any]:
    word = text.lower()
    if kind is type(None):
        return word in ("none", "null"), None
    if typing.get_origin(kind) is typing.Literal:
        matches = [value for value in typing.get_args(kind) if str(value) == text]
        return bool(matches), matches[0] if matches else None
    if kind is bool:
        return word in _TRUE + _FALSE, word in _TRUE
    if kind in (int, float):
        try:
            return True, kind(text)
        except ValueError:
            return False, None
    if kind is str or kind is Any:
        return True, text
    return False, None
