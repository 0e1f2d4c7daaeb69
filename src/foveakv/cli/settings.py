"""Read `--set key=value`, `--budget` and comma-separated lists into methods and their options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from foveakv.core.budget import parse_budget
from foveakv.errors import MethodError
from foveakv.methods import Method, find, get, near
from foveakv.util.values import field_types, option_types, parse_value

if TYPE_CHECKING:
    from foveakv.evaluation.compare import Candidate


def build_method(name: str, budget: str | None, assignments: Sequence[str]) -> Method:
    """Make a method from its name, `--budget` and `--set` options. MethodError: one of them is invalid."""
    options = parse_assignments(name, assignments)
    if budget is not None:
        if "budget" in options:
            raise MethodError("the budget is given twice, by --budget and by --set budget=...; leave one out")
        options["budget"] = parse_budget_text(name, budget)
    return get(name, **options)


def parse_budget_text(name: str, text: str) -> float | int | str:
    """Check the budget of a method; return a number, or text with a unit ("10%", "512MiB")."""
    if "budget" not in field_types(find(name)):
        raise MethodError(f"{name} takes no budget; leave --budget out{_options_of(name)}")
    parse_budget(text)
    return parse_value("budget", float | int | str, text)


def parse_assignments(name: str, assignments: Sequence[str]) -> dict[str, Any]:
    """Read ["theta=0.85", ...] as {"theta": 0.85, ...}, by the types of the method's fields."""
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
    """The names between commas, without duplicates. MethodError: `--methods` is empty."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names and what == "methods":
        raise MethodError("--methods names no method")
    return list(dict.fromkeys(names))


def parse_options(assignments: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Read ["hae.recent=16", ...] as {"hae": {"recent": 16}}: options of several methods."""
    grouped: dict[str, list[str]] = {}
    for assignment in assignments:
        name, dot, rest = assignment.partition(".")
        if not dot or "=" in name:
            raise MethodError(f"--set {assignment!r} is not of the form method.key=value")
        grouped.setdefault(name, []).append(rest)
    return {name: parse_assignments(name, own) for name, own in grouped.items()}


def parse_budgets(texts: Sequence[str]) -> list[float | int | str]:
    """Check budgets; return numbers, or text with a unit ("10%", "512MiB")."""
    for text in texts:
        parse_budget(text)
    return [parse_value("budget", float | int | str, text) for text in texts]


def parse_candidates(names: Sequence[str], budgets: Sequence[str], assignments: Sequence[str]) -> list[Candidate]:
    """Every method at every budget, with the options of `--set method.key=value`."""
    from foveakv.evaluation.compare import candidates

    values = parse_budgets(budgets)
    return candidates(names, values, parse_options(assignments))


def parse_candidate(text: str, budgets: Sequence[str] = ()) -> list[Candidate]:
    """Read "label=method:key=value,key=value": one candidate, or one per budget if the text has no budget."""
    label, equals, rest = (part.strip() for part in text.partition("="))
    name, _, settings = (part.strip() for part in rest.partition(":"))
    if not equals or not label or not name or ":" in label:
        raise MethodError(f"--candidate {text!r} is not of the form label=method:key=value,key=value")
    own = [f"{name}.{setting.strip()}" for setting in settings.split(",") if setting.strip()]
    try:
        found = parse_candidates([name], list(budgets), own)
    except MethodError as error:
        raise MethodError(f"--candidate {label}: {error}") from error
    return [replace(each, label=label + each.label.removeprefix(name)) for each in found]


def _options_of(name: str) -> str:
    known = list(option_types(find(name)))
    return f"; its options: {', '.join(known)}" if known else "; it has no options"
