"""The registry: `get("hae", budget=0.2)`, `available()`, `register(MyMethod)`."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from typing import Any

from foveakv.errors import MethodError
from foveakv.methods.base import DecodeView, Drop, Method, PrefillView, keep_top

__all__ = ["DecodeView", "Drop", "Method", "PrefillView", "available", "find", "get", "keep_top", "register"]

# Targets are strings, so that importing the registry imports no method.
_TARGETS: dict[str, str] = {
    "full": "foveakv.methods.full:Full",
    "random": "foveakv.methods.random:Random",
    "streaming": "foveakv.methods.streaming:Streaming",
    "h2o": "foveakv.methods.h2o:H2O",
    "snapkv": "foveakv.methods.snapkv:SnapKV",
    "adakv": "foveakv.methods.adakv:AdaKV",
    "pyramidkv": "foveakv.methods.pyramidkv:PyramidKV",
    "sparsemm": "foveakv.methods.sparsemm:SparseMM",
    "mixkv": "foveakv.methods.mixkv:MixKV",
    "quest": "foveakv.methods.quest:Quest",
    "fastv": "foveakv.methods.fastv:FastV",
    "mustdrop": "foveakv.methods.mustdrop:MustDrop",
    "lookm": "foveakv.methods.lookm:LookM",
    "vlcache": "foveakv.methods.vlcache:VLCache",
    "prefixkv": "foveakv.methods.prefixkv:PrefixKV",
    "hae": "foveakv.methods.hae:HAE",
    "hybridkv": "foveakv.methods.hybridkv:HybridKV",
}
_REGISTERED: dict[str, type[Method]] = {}


def available() -> list[str]:
    """Names of all methods, built-in and registered, sorted."""
    return sorted({*_TARGETS, *_REGISTERED})


def find(name: str) -> type[Method]:
    """The class behind a name; `MethodError` with the nearest name when there is none."""
    if name in _REGISTERED:
        return _REGISTERED[name]
    if name not in _TARGETS:
        raise MethodError(f"unknown method {name!r}{near(name, available())}; known: {', '.join(available())}")
    module, attribute = _TARGETS[name].split(":")
    return getattr(importlib.import_module(module), attribute)


def get(name: str, **options: Any) -> Method:
    """A method by name with its options; unknown options raise `MethodError` with the nearest option.

    `preset` names settings that go together, which the options change: `get("hybridkv", preset="small", budget=0.1)`.
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
    """Adds a method class under its `name`; usable as a decorator. Built-in names cannot be taken."""
    if not cls.name:
        raise MethodError(f"{cls.__name__} needs a class attribute `name`")
    if cls.name in _TARGETS:
        raise MethodError(f"{cls.name!r} is a built-in method; choose another name for {cls.__name__}")
    _REGISTERED[cls.name] = cls
    return cls


def near(word: str, words: list[str]) -> str:
    match = difflib.get_close_matches(word, words, n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""
