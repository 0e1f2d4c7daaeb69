"""`--set key=value`, `--budget` and lists: words on the command line -> the values that a method's fields take."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from foveakv.core.budget import parse_budget
from foveakv.errors import MethodError
from foveakv.methods import Method, find, get, near

if TYPE_CHECKING:
    from foveakv.evaluation.compare import Candidate

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def build_method(name: str, budget: str | None, assignments: Sequence[str]) -> Method:
    """A method by name, with its budget and settings as they were typed."""
    options = parse_assignments(name, assignments)
    if budget is not None:
        if "budget" in options:
            raise MethodError("the budget is given twice: --budget and --set budget=...")
        options["budget"] = parse_budget_text(name, budget)
    return get(name, **options)


def parse_budget_text(name: str, text: str) -> float | int | str:
    """Checks a budget and gives it as the number that it is, or as text ("10%", "512MiB")."""
    if "budget" not in field_types(find(name)):
        raise MethodError(f"{name} takes no budget; leave --budget out{_options_of(name)}")
    parse_budget(text)
    return parse_value("budget", float | int | str, text)


def parse_assignments(name: str, assignments: Sequence[str]) -> dict[str, Any]:
    """["theta=0.85", ...] -> {"theta": 0.85, ...} by the types of the method's fields."""
    known, options = option_types(find(name)), {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        key = key.strip()
        if not equals or not key:
            raise MethodError(f"--set {assignment!r} is not of the form key=value")
        if key not in known:
            raise MethodError(f"{name} has no option {key!r}{near(key, list(known))}{_options_of(name)}")
        if key in options:
            raise MethodError(f"--set gives {key} twice")
        options[key] = parse_value(key, known[key], value.strip())
    return options


def split_names(text: str, what: str) -> list[str]:
    """Names between commas, each once. MethodError: --methods names none."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names and what == "methods":
        raise MethodError("--methods names no method")
    return list(dict.fromkeys(names))


def parse_options(assignments: Sequence[str]) -> dict[str, dict[str, Any]]:
    """["hae.recent=16", ...] -> {"hae": {"recent": 16}}: settings of several methods."""
    grouped: dict[str, list[str]] = {}
    for assignment in assignments:
        name, dot, rest = assignment.partition(".")
        if not dot or "=" in name:
            raise MethodError(f"--set {assignment!r} is not of the form method.key=value")
        grouped.setdefault(name, []).append(rest)
    return {name: parse_assignments(name, own) for name, own in grouped.items()}


def parse_budgets(texts: Sequence[str]) -> list[float | int | str]:
    """Checks budgets and gives them as the numbers that they are, or as text ("10%", "512MiB")."""
    for text in texts:
        parse_budget(text)
    return [parse_value("budget", float | int | str, text) for text in texts]


def parse_candidates(names: Sequence[str], budgets: Sequence[str], assignments: Sequence[str]) -> list[Candidate]:
    """Every method at every budget, with the settings of `--set method.key=value`."""
    from foveakv.evaluation.compare import candidates

    values = parse_budgets(budgets)
    return candidates(names, values, parse_options(assignments))


def field_types(cls: type[Method]) -> dict[str, Any]:
    """The settings of a method and their declared types."""
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}


def option_types(cls: type[Method]) -> dict[str, Any]:
    """The settings of a method, and `preset` where it has settings that go together."""
    return {**field_types(cls), **({"preset": str} if hasattr(cls, "preset") else {})}


def parse_value(key: str, kind: Any, text: str) -> Any:
    """One value as its declared type reads it."""
    for choice in _choices(kind):
        found, value = _read(choice, text)
        if found:
            return value
    raise MethodError(f"{key}={text}: expected {type_text(kind)}")


def type_text(kind: Any) -> str:
    """A declared type in plain words."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "none"}
    texts = [
        " or ".join(repr(value) for value in typing.get_args(choice))
        if typing.get_origin(choice) is typing.Literal
        else words.get(choice, getattr(choice, "__name__", str(choice)))
        for choice in _choices(kind)
    ]
    return " or ".join(dict.fromkeys(texts))


def _choices(kind: Any) -> list[Any]:
    """The members of a union, those that accept least first."""
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


def _options_of(name: str) -> str:
    known = list(option_types(find(name)))
    return f"; its options: {', '.join(known)}" if known else "; it has no options"
