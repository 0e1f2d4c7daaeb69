"""`foveakv methods`: list the methods and their options."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.padding import Padding

from foveakv.cli import common

if TYPE_CHECKING:
    from foveakv.methods import Method


@common.friendly
def methods() -> None:
    """List the methods: what each one does, and its options with their defaults."""
    from foveakv.methods import available, find

    out = common.output()
    for name in available():
        cls = find(name)
        settings = ", ".join(f"{f.name}={_default(f)}" for f in dataclasses.fields(cls) if f.init)
        out.print(f"[bold]{name}[/bold]  {escape(summary(cls))}", highlight=False)
        out.print(Padding(escape(declared(cls)), (0, 0, 0, 2)), highlight=False)
        presets = presets_of(cls)
        below = 0 if presets else 1
        out.print(Padding(f"[dim]{escape(settings or 'no options')}[/dim]", (0, 0, below, 2)), highlight=False)
        for i, line in enumerate(presets, 1):
            out.print(Padding(f"[dim]{escape(line)}[/dim]", (0, 0, int(i == len(presets)), 2)), highlight=False)


def summary(cls: type) -> str:
    """The first paragraph of a method's docstring, on one line."""
    return " ".join((cls.__doc__ or "").strip().split("\n\n")[0].split())


def presets_of(cls: type) -> list[str]:
    """The presets of a method, one line each, with their options."""
    named = getattr(cls, "presets", {})
    return [
        f"preset={name}: {', '.join(f'{key}={value}' for key, value in own.items())}" for name, own in named.items()
    ]


def declared(cls: type[Method]) -> str:
    """What a method declares with its default options: which slots may differ, what it observes, when it acts."""
    method = object.__new__(cls)  # options keep their defaults, and required ones need no value
    try:
        observes, decides = method.observes, method.decides
        queries = {"none": "no queries", "window": "queries at the end of the prompt", "text": "text queries"}
        seen = [queries.get(observes.queries, "all queries of the prompt")]
        seen += ["attention sums while decoding"] if observes.attention_sum else []
        seen += ["a second pass over the prompt"] if observes.second_pass else []
        acts = ", ".join(_WHEN[when] for when in decides)
        further = _FURTHER[method.further]
        return (
            f"slots differ per {method.granularity}; observes {', '.join(seen)}; acts {acts}; further blocks: {further}"
        )
    except AttributeError:  # depends on an option without a default
        return "what it declares depends on its options"


_FURTHER = {"context": "decided anew with the context", "block": "decided alone", "keep": "stored whole"}
_WHEN = {"prefill": "at prefill", "after_prefill": "after prefill", "decode": "while decoding", "read": "on read"}


def _default(setting: dataclasses.Field[Any]) -> str:
    if setting.default is not dataclasses.MISSING:
        return str(setting.default)
    if setting.default_factory is not dataclasses.MISSING:
        return str(setting.default_factory())
    return "must be given"
