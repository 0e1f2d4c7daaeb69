"""`foveakv methods`: list the methods and their options."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.markup import escape
from rich.padding import Padding

from foveakv.cli import common


@common.friendly
def methods() -> None:
    """List the methods: what each one does, and its options with their defaults."""
    from foveakv.methods import available, find

    out = common.output()
    for name in available():
        cls = find(name)
        settings = ", ".join(f"{f.name}={_default(f)}" for f in dataclasses.fields(cls) if f.init)
        out.print(f"[bold]{name}[/bold]  {escape(summary(cls))}", highlight=False)
        out.print(Padding(f"[dim]{escape(settings or 'no options')}[/dim]", (0, 0, 1, 2)), highlight=False)


def summary(cls: type) -> str:
    """The first paragraph of a method's docstring, on one line."""
    return " ".join((cls.__doc__ or "").strip().split("\n\n")[0].split())


def _default(setting: dataclasses.Field[Any]) -> str:
    if setting.default is not dataclasses.MISSING:
        return str(setting.default)
    if setting.default_factory is not dataclasses.MISSING:
        return str(setting.default_factory())
    return "must be given"
