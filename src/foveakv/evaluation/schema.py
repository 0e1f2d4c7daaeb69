"""Checks JSON values against the type hints of a data class or TypedDict, with errors that name the field.

    values = read(Result, {"task": "cards-4", "score": 7.5, ...})  # InputError: score must be from 0 to 1, got 7.5

Supported types: data classes, TypedDicts, tuples and lists of one type, dicts with text keys, unions, `Annotated` with
`Between`, str, int, float, bool, None and Any. A data class takes no unknown fields; a TypedDict does, since the
machines of other versions may describe themselves with more.
"""

from __future__ import annotations

import json
import math
import reprlib
import types
import typing
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from foveakv.errors import BudgetError, InputError

T = TypeVar("T")

_NAMES = {
    str: "a text", bool: "true or false", int: "a whole number", float: "a number", type(None): "null",
    list: "a list", dict: "an object",
}  # fmt: skip


@dataclass(frozen=True)
class Between:
    """Bounds of a number, inclusive."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"from {self.low:g} to {self.high:g}" if self.high < 1e9 else f"{self.low:g} or more"


Share = Annotated[float, Between(0, 1)]
Count = Annotated[int, Between(0, 2**62)]
Real = Annotated[float, Between(-1e30, 1e30)]
"""Any number whose sums stay finite."""


def loads(text: str | bytes) -> Any:
    """JSON in UTF-8, without NaN and infinity, which JSON does not have. ValueError: it is something else."""
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        return json.loads(text, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos + 1}") from error
    except RecursionError as error:
        raise ValueError("not JSON that can be read: too deeply nested") from error


def load_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. InputError: it cannot be read, or holds something else."""
    try:
        data = loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise InputError(f"{path} is damaged: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"{path} is damaged: expected a JSON object, got {_shown(data)}")
    return data


def read_file(kind: type[T], path: Path) -> T:
    """An instance of a data class or TypedDict from a JSON file. InputError: as in `load_object` and `read`."""
    data = load_object(path)
    try:
        return read(kind, data)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def read(kind: type[T], data: Any) -> T:
    """An instance of a data class or TypedDict from a JSON object.

    Raises:
        InputError: a field is missing, unknown or has a wrong value; the message names it.
    """
    found: T = _check(kind, data, "")
    return found


def _check(kind: Any, value: Any, name: str) -> Any:
    """The value as `kind` has it: a list becomes a tuple where a tuple is expected, a whole number a float."""
    if kind is Any:
        return value
    members = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    fitting = [member for member in members if _fits(_json_type(member), value)]
    if not fitting:
        wanted = dict.fromkeys(_NAMES[_json_type(member)] for member in members)
        raise InputError(f"{name or 'the value'} must be {' or '.join(wanted)}, got {_shown(value)}")
    return _convert(min(fitting, key=lambda member: _json_type(member) is float), value, name)  # 1 stays an int


def _json_type(kind: Any) -> Any:
    """The JSON type of a type: str, bool, int, float, NoneType, list or dict."""
    origin = typing.get_origin(kind)
    if origin is Annotated:
        return _json_type(typing.get_args(kind)[0])
    if origin in (tuple, list):
        return list
    return kind if kind in _NAMES else dict


def _fits(wanted: Any, value: Any) -> bool:
    if isinstance(value, bool):
        return wanted is bool
    if wanted is float:
        return isinstance(value, int | float)
    return isinstance(value, list | tuple if wanted is list else wanted)


def _convert(kind: Any, value: Any, name: str) -> Any:
    """The value, whose JSON type fits, with everything in it checked."""
    origin = typing.get_origin(kind)
    if origin is Annotated:
        plain, bounds = typing.get_args(kind)
        found = _convert(plain, value, name)
        if not bounds.low <= found <= bounds.high:
            raise InputError(f"{name} must be {bounds}, got {_shown(value)}")
        return found
    if origin in (tuple, list):
        inner = typing.get_args(kind)[0]
        return origin(_check(inner, each, f"{name}[{place}]") for place, each in enumerate(value))
    if origin is dict:
        return {key: _check(typing.get_args(kind)[1], each, _join(name, key)) for key, each in value.items()}
    if typing.is_typeddict(kind) or is_dataclass(kind):
        return _with_fields(kind, value, name)
    if kind is float:
        return _finite(value, name)
    return value


def _finite(value: int | float, name: str) -> float:
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise InputError(f"{name} is too large a number")
    return found


def _with_fields(kind: Any, value: dict[str, Any], name: str) -> Any:
    hints = typing.get_type_hints(kind, include_extras=True)
    if typing.is_typeddict(kind):
        return {key: _check(hints.get(key, Any), each, _join(name, key)) for key, each in value.items()}
    known = [field for field in fields(kind) if field.init]
    names = [field.name for field in known]
    for key in value:
        if key not in names:
            raise InputError(f"unknown field {_shown(_join(name, key))}; the fields are {', '.join(names)}")
    for field in known:
        if field.name not in value and field.default is MISSING and field.default_factory is MISSING:
            raise InputError(f"the field {_join(name, field.name)!r} is missing")
    return kind(**{key: _check(hints[key], each, _join(name, key)) for key, each in value.items()})


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _shown(value: Any) -> str:
    """A value on one short line."""
    if isinstance(value, dict | list | tuple):
        return _NAMES[dict if isinstance(value, dict) else list]
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return reprlib.repr(value)


def _no_constant(text: str) -> Any:
    raise ValueError(f"not JSON: it has the value {text}")


def check_budget(value: Any, name: str = "budget") -> None:
    """InputError: the value is not a budget (see `foveakv.core.budget.parse_budget`), or None."""
    if value is None:
        return
    from foveakv.core.budget import parse_budget

    _check(float | int | str, value, name)
    try:
        sized = float(parse_budget(value).value)
    except (BudgetError, OverflowError) as error:
        raise InputError(f"{name}: {error}") from error
    if not 1e-9 <= sized <= 2**62:
        raise InputError(f"{name} is out of range, got {_shown(value)}")


def check_matrix(value: Any, name: str) -> None:
    """InputError: the value is not a list of equally long rows of numbers from 0 to 1."""
    rows = _check(list[list[Share]], value, name)
    if not rows or not rows[0] or any(len(row) != len(rows[0]) for row in rows):
        raise InputError(f"{name} must have rows of equal length")
