"""Parse `--model_args`: the method, the options of `compress` and of the processor; checked before loading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foveakv.core.budget import parse_budget
from foveakv.engines.transformers.options import CacheOptions, field_types
from foveakv.errors import MethodError
from foveakv.methods import Method, available, find, get, near
from foveakv.util.values import option_types, parse_value

PLAIN = "none"
"""The method name for the plain model."""

# A trace is of no use here, a pool is no text, and a number of slots must not be read as true or false.
_COMPRESS: dict[str, Any] = {
    name: int | None if name == "preallocate" else kind
    for name, kind in field_types().items()
    if name not in ("trace", "pool")
}


@dataclass(frozen=True)
class Arguments:
    """Parsed arguments.

    method: None for the plain model. compress: options of `foveakv.compress`. processor: options of its call.
    """

    method: Method | None
    compress: dict[str, Any] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)


def parse(method: Any, budget: Any, settings: Mapping[str, Any], named: list[str]) -> Arguments:
    """Parses the model arguments that belong to FoveaKV.

    Args:
        method: a name of `foveakv methods`, or "none".
        budget: as on the command line (0.1, 1024, "10%", "512MiB"); None for the default of the method.
        settings: all other arguments: "method.<option>", "processor.<option>", options of `compress`.
        named: arguments of the model class itself, for the error message.

    Raises:
        MethodError: an unknown method or argument, or an invalid value.
        BudgetError: a budget that cannot be read.
    """
    if method is None:
        raise MethodError(
            f"say which method: --model_args ...,method=hybridkv,budget=0.1, or method={PLAIN} for the plain model; "
            f"known: {', '.join(available())}"
        )
    name, options, compress, processor = str(method), {}, {}, {}
    for key, value in settings.items():
        place, dot, option = key.partition(".")
        if dot and place == "method":
            options[option] = str(value)
        elif dot and place == "processor":
            processor[option] = value
        elif key in _COMPRESS:
            compress[key] = parse_value(key, _COMPRESS[key], str(value))
        else:
            known = [*named, *_COMPRESS, "method.<option>", "processor.<option>"]
            raise MethodError(_unknown(key, name, known))
    if budget is not None and "budget" in options:
        raise MethodError("the budget is given twice, as budget=... and as method.budget=...; leave one out")
    if budget is not None:
        options["budget"] = str(budget)
    if name == PLAIN:
        given = ["budget" if option == "budget" else f"method.{option}" for option in options] + list(compress)
        if given:
            raise MethodError(f"method={PLAIN} is the plain model and takes no {', '.join(given)}")
        return Arguments(None, processor=processor)
    built = _build(name, options)
    CacheOptions(**compress).check(built)
    return Arguments(built, compress, processor)


def _build(name: str, options: Mapping[str, str]) -> Method:
    known, values = option_types(find(name)), {}
    for key, text in options.items():
        if key not in known:
            raise MethodError(f"{name} has no option {key!r}{near(key, list(known))}; its options: {_listed(known)}")
        if key == "budget":
            parse_budget(text)
        values[key] = parse_value(f"method.{key}", known[key], text)
    return get(name, **values)


def _unknown(key: str, method: str, known: list[str]) -> str:
    if method != PLAIN and key in option_types(find(method)):
        return f"{key!r} is an option of {method}: write method.{key}=..."
    return f"--model_args has no argument {key!r}{near(key, known)}; arguments: {', '.join(known)}"


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(names) or "none"
