"""Shared by the analyses: their common options, reading prompts, writing files, and tables of figures."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

from rich.markup import escape

from foveakv.cli import common, prompts
from foveakv.util import files
from foveakv.util.tables import Column, FittedTable


@dataclass
class Given:
    """The options that all analyses take: the prompts, the model, and the files to write.

    loaded: the model and its processor, once `measure` has loaded them.
    """

    model: common.ModelOption = "demo"
    image: common.ImagesOption = None
    allow_urls: common.AllowUrlsOption = False
    prompt: prompts.PromptsOption = None
    sample: prompts.SamplesOption = None
    sample_kind: prompts.KindsOption = None
    ask: prompts.AskOption = None
    json: prompts.JsonOption = None
    csv: prompts.CsvOption = None
    plot: prompts.PlotOption = None
    device: common.DeviceOption = None
    dtype: common.DtypeOption = None
    trust_remote_code: common.TrustOption = False
    debug: common.DebugOption = False
    loaded: Any = field(default=None, init=False)

    def check_files(self) -> None:
        """Check that the result can be written. Errors: OutputError, InputError, MissingDependencyError."""
        files.check_output_files(self.json, self.csv, self.plot)
        common.check_plot_files(self.plot)

    def measure(self, work: Callable[..., Any]) -> Any:
        """Load the model and the prompts, and run `work(model, inputs, progress)` with a line on stderr.

        inputs: inputs of `generate`, by label. progress: to be called with the label of the prompt being read.
        """
        every = prompts.tasks(
            self.model, self.image, self.prompt, self.sample, self.sample_kind, self.ask, allow_urls=self.allow_urls
        )
        self.loaded, inputs = prompts.load(
            self.model, every, device=self.device, dtype=self.dtype, trust_remote_code=self.trust_remote_code
        )
        with common.messages().status("reading the prompt") as status:
            return work(self.loaded.model, inputs, lambda label: status.update(f"reading {escape(label)}"))

    def write(self, result: Any, draw: Callable[[Path, Any], None]) -> None:
        """Write the files that were asked for. draw: draws the result."""
        from foveakv.evaluation import environment

        if self.json is not None:
            described = environment.describe(self.loaded.model)
            files.write_json(self.json, {**result.to_dict(), "environment": described})
        if self.csv is not None:
            prompts.write_csv(self.csv, result.rows())
        if self.plot is not None:
            draw(self.plot, result)
        common.say_written(self.json, self.csv, self.plot)


def analysis(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate an analysis: typer sees the options of `Given` and those of the command, which receives a `Given` first.

    Files are checked before the command runs. Errors are handled as in `common.friendly`.
    """
    shared = _options(Given.__init__)[1:]
    own = _options(command)[1:]

    @wraps(command)
    def run(**options: Any) -> None:
        given = Given(**{each.name: options.pop(each.name) for each in shared})
        given.check_files()
        command(given, **options)

    guarded = common.friendly(run)
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in [*shared[:-7], *own, *shared[-7:]]]
    vars(guarded)["__signature__"] = inspect.Signature(parameters)
    guarded.__annotations__ = {each.name: each.annotation for each in parameters}
    return guarded


def _options(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function, with resolved annotations."""
    hints = typing.get_type_hints(function, include_extras=True)
    return [each.replace(annotation=hints.get(each.name)) for each in inspect.signature(function).parameters.values()]


def figures(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> FittedTable:
    """A table of figures; the first column names the rows."""
    first, *others = columns
    table = FittedTable([Column(first, text=True, right=False), *map(Column, others)], title=title)
    for row in rows:
        table.add(*row)
    return table
