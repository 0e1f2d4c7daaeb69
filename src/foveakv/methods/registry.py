"""Registry of methods: `get("hae", budget=0.2)`, `available()`, `register(MyMethod)`.

Built-in methods are discovered from the source files of this package: a class with a line `name: ClassVar[str] = "..."`
is a method. Discovery imports nothing, and there is no list to maintain.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import re
from pathlib import Path
from typing import Any

from foveakv.errors import MethodError
from foveakv.methods.base import Method

_CLASS = re.compile(r'^class (\w+)\b.*?^    name: ClassVar\[str\] = "([^"]+)"', re.MULTILINE | re.DOTALL)
_REGISTERED: dict[str, type[Method]] = {}


@functools.cache
def _built_in() -> dict[str, tuple[str, str]]:
    """Map the name of every built-in method to its module and class."""
    found = {}
    for file in sorted(Path(__file__).parent.glob("*.py")):
        text = file.read_text(encoding="utf8")
        for part in re.split(r"(?m)^(?=@dataclass|class )", text):
            match = _CLASS.search(part)
            if match is not None:
                found[match[2]] = f"foveakv.methods.{file.stem}", match[1]
    return found


def class_names() -> dict[str, str]:
    """Map the class name of every built-in method to its module, for `from foveakv import HAE`."""
    return {cls: module for module, cls in _built_in().values()}


def available() -> list[str]:
    """Return the names of all methods, built-in and registered, sorted."""
    return sorted({*_built_in(), *_REGISTERED})


def find(name: str) -> type[Method]:
    """Return the class of the method `name`.

    Raises:
        MethodError: there is no such method; the message suggests the closest name.
    """
    if name in _REGISTERED:
        return _REGISTERED[name]
    if name not in _built_in():
        raise MethodError(f"unknown method {name!r}{near(name, available())}; known: {', '.join(available())}")
    module, attribute = _built_in()[name]
    return getattr(importlib.import_module(module), attribute)


def get(name: str, /, **options: Any) -> Method:
    """Create a method by name, with its options.

    `preset` selects a set of options, which other options override: `get("hybridkv", preset="small", budget=0.1)`.

    Raises:
        MethodError: the name, the preset or an option is unknown or invalid, or a required option is missing.
    """
    cls = find(name)
    fields = [f.name for f in dataclasses.fields(cls) if f.init]
    preset = options.pop("preset", None) if "preset" not in fields else None
    for option in options:
        if option not in fields:
            known = ", ".join(fields) or "none"
            raise MethodError(f"{name} has no option {option!r}{near(option, fields)}; its options: {known}")
    if preset is not None:
        if not hasattr(cls, "preset"):
            raise MethodError(f"{name} has no presets; give it options: {', '.join(fields) or 'none'}")
        if not isinstance(preset, str):
            raise MethodError(f"{name}: preset must be the name of a preset, got {preset!r}")
        made: Method = cls.preset(preset, **options)
        return made
    needed = [f.name for f in dataclasses.fields(cls) if f.init and not _has_default(f)]
    missing = [option for option in needed if option not in options]
    if missing:
        raise MethodError(f"{name} needs a value for {missing[0]!r}, which has no default")
    return cls(**options)


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def register(cls: type[Method]) -> type[Method]:
    """Register a method class under its `name`; usable as a decorator.

    Raises:
        MethodError: the class has no `name`, or it is the name of a built-in method.
    """
    if not cls.name:
        raise MethodError(f"{cls.__name__} needs a class attribute `name`")
    if cls.name in _built_in():
        raise MethodError(f"{cls.name!r} is a built-in method; choose another name for {cls.__name__}")
    _REGISTERED[cls.name] = cls
    return cls


def near(word: str, words: list[str]) -> str:
    """Return a hint such as " (did you mean 'hae'?)" with the closest of `words`; empty if none is close."""
    match = difflib.get_close_matches(word, words, n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""
