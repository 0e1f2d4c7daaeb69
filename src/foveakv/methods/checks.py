"""Checks of option values. Every error names the method, the option, the allowed values and the value given."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from torch import Tensor

from foveakv.errors import MethodError


def whole_number(name: str, option: str, value: Any, least: int, meaning: str = "") -> None:
    """Raise `MethodError` unless `value` is an integer (bool and float are rejected) of at least `least`.

    Args:
        name: name of the method.
        option: name of the option.
        value: the value to check.
        least: lowest allowed value.
        meaning: what the number stands for; added to the message.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise MethodError(_message(name, option, value, f"a whole number, at least {least}", meaning))


def number(
    name: str, option: str, value: Any, least: float = -math.inf, most: float = math.inf, meaning: str = ""
) -> None:
    """Raise `MethodError` unless `value` is a finite number (bool is rejected) from `least` to `most`."""
    if _real(value) and least <= value <= most:
        return
    if math.isfinite(least) and math.isfinite(most):
        expected = f"a number between {least:g} and {most:g}"
    elif math.isfinite(least):
        expected = f"a number, at least {least:g}"
    else:
        expected = "a number" if not math.isfinite(most) else f"a number, at most {most:g}"
    raise MethodError(_message(name, option, value, expected, meaning))


def share(name: str, option: str, value: Any, *, above_zero: bool = False, meaning: str = "") -> None:
    """Raise `MethodError` unless `value` is a number in [0, 1], or in (0, 1] with `above_zero`."""
    if not _real(value) or not 0 <= value <= 1 or (above_zero and value == 0):
        expected = "a number in (0, 1]" if above_zero else "a number between 0 and 1"
        raise MethodError(_message(name, option, value, expected, meaning))


def choice(name: str, option: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise `MethodError` unless `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        *others, last = (repr(choice) for choice in choices)
        raise MethodError(_message(name, option, value, f"one of {', '.join(others)} or {last}" if others else last))


def flag(name: str, option: str, value: Any) -> None:
    """Raise `MethodError` unless `value` is True or False."""
    if not isinstance(value, bool):
        raise MethodError(_message(name, option, value, "True or False"))


def check_room(name: str, steady: Tensor, contexts: Tensor, protected: int, what: str) -> None:
    """Check that the steady size holds the `protected` tokens; name, what: the method and options, for messages.

    steady, contexts: int64 [B]. Sequences no longer than `protected` keep all their tokens and are not checked.

    Raises:
        MethodError: the steady size of every longer sequence is below `protected`.
    """
    room = steady[contexts.to(steady.device) > protected]
    if room.numel() and int(room.max()) < protected:
        raise MethodError(
            f"{name}: the budget gives a sequence {int(room.max())} tokens per head, fewer than the {protected} that "
            f"{what} protects; raise the budget or lower them"
        )


def _real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _message(name: str, option: str, value: Any, expected: str, meaning: str = "") -> str:
    return f"{name}: {option} must be {expected}{f' ({meaning})' if meaning else ''}; got {value!r}"
