"""`foveakv methods`, `foveakv models`, `foveakv doctor`: what there is, and whether this machine is ready for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from foveakv.cli import common

if TYPE_CHECKING:
    from foveakv.engines.transformers.families import Family


@common.friendly
def methods() -> None:
    """List the methods, what each keeps, and its settings with their defaults."""
    from foveakv.methods import available, find

    out = common.output()
    for name in available():
        cls = find(name)
        settings = ", ".join(f"{f.name}={_default(f)}" for f in dataclasses.fields(cls) if f.init)
        out.print(f"[bold]{name}[/bold]  {escape(summary(cls))}", highlight=False)
        out.print(Padding(f"[dim]{escape(settings or 'no settings')}[/dim]", (0, 0, 1, 2)), highlight=False)


def summary(cls: type) -> str:
    """The first paragraph of a class's docstring, on one line."""
    return " ".join((cls.__doc__ or "").strip().split("\n\n")[0].split())


def _default(setting: dataclasses.Field[Any]) -> str:
    if setting.default is not dataclasses.MISSING:
        return str(setting.default)
    if setting.default_factory is not dataclasses.MISSING:
        return str(setting.default_factory())
    return "must be given"


@common.friendly
def models(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="As a Markdown table (docs/supported-models.md).")
    ] = False,
) -> None:
    """List the model families that are tested, and those that cannot be compressed, with the reason."""
    common.quiet_transformers()
    from foveakv.engines.transformers.families import FAMILIES
    from foveakv.models.loading import KNOWN

    rows = [(family.model_type, family.title, family_status(family)) for family in FAMILIES]
    titles = ("model type", "family", "status")
    if markdown:
        rule = ("---",) * len(titles)
        typer.echo("\n".join("| " + " | ".join(row) + " |" for row in (titles, rule, *rows)))
        return
    out = common.output()
    known = [(model.name, f"{model.size:.2g} B", model.what, model.needs) for model in KNOWN]
    out.print(_table("models to begin with", ("name for --model", "size", "what", "needs"), known))
    out.print(_table("families; any folder or hub id of one of them loads", titles, rows))


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column(columns[0], no_wrap=True)
    for column in columns[1:]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def family_status(family: Family) -> str:
    if family.reason:
        return f"not supported: {family.reason}"
    return f"tested; {family.note}" if family.note else "tested"


@common.friendly
def doctor() -> None:
    """Show versions, device, kernels and optional packages, and what to do about what is missing."""
    common.quiet_transformers()
    import torch

    from foveakv.evaluation import environment

    tested = _self_test(torch)  # first: it builds the CPU kernel where that was not done
    found = environment.describe()
    table = Table(show_header=False)
    for name, version in found["versions"].items():
        table.add_row(name, version or f"not installed{_remedy(name)}")
    table.add_row("cpu", f"{found['cpu']}, {found['threads']} threads")
    table.add_row("accelerator", found["accelerator"] or "none; models run on the CPU")
    for name, state in found["kernels"].items():
        table.add_row(f"kernel {name}", state)
    table.add_row("decode attention", tested)
    common.output().print(table, markup=False, highlight=False)


def _remedy(name: str) -> str:
    if name == "torchvision":
        return " (not needed; image processors then use Pillow, and video processors are unavailable)"
    if name in ("onnx", "gguf", "matplotlib"):
        return " (needed for the embedded model and plots: pip install 'foveakv[demo]')"
    return ""


def _self_test(torch: Any) -> str:
    """Every kernel that can run here, once on a ragged cache against the reference; and which one is the default."""
    from foveakv.kernels import BACKENDS, choose, decode_attention, problem
    from foveakv.memory.segments import Segments

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(1, 2, 64, 16, generator=generator).to(device) for _ in range(2))
    query = torch.randn(1, 4, 1, 16, generator=generator).to(device)
    keep = torch.rand(1, 2, 64, generator=generator) < 0.5
    positions = torch.arange(64)[None]
    runs = Segments.from_dense(keys, values, keep.to(device), positions.to(device)).runs
    beside = Segments.from_dense(keys.cpu(), values.cpu(), keep, positions).runs
    reference, _ = decode_attention(query.cpu(), beside, 0.25, backend="reference")
    results = []
    for name in BACKENDS:
        if problem(name) is not None:
            continue
        here = (query.cpu(), beside) if name == "cpu" else (query, runs)
        error = float((decode_attention(*here, 0.25, backend=name)[0].cpu() - reference).abs().max())
        results.append(f"{name} {'ok' if error < 1e-4 else f'WRONG by {error:.1e}'}")
    return f"{', '.join(results)}; auto is {choose(query, runs)} on {device}"
