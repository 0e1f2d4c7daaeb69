"""Progress of `foveakv generate`: a bar during prefill, then the answer as it is generated."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import TextStreamer

from foveakv.cli.common import messages
from foveakv.engines.transformers import compat
from foveakv.util.texts import printable


class PrefillBar:
    """A bar over the decoder layers of the first forward pass, removed after the last one. A context manager.

    While the vision tower runs the bar stays at zero. Nothing is shown if stderr is not a terminal.
    """

    def __init__(self, model: Any) -> None:
        self.layers = list(compat.decoder_of(model).layers)
        self.progress = Progress(
            TextColumn("reading the prompt"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("layers"),
            TimeElapsedColumn(),
            console=messages(),
            transient=True,
        )
        self._handles: list[Any] = []

    def __enter__(self) -> PrefillBar:
        self._task = self.progress.add_task("prefill", total=len(self.layers))
        self._handles = [layer.register_forward_hook(self._layer_done) for layer in self.layers]
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._finish()

    def _layer_done(self, *unused: Any) -> None:
        self.progress.advance(self._task)
        if self.progress.finished:
            self._finish()

    def _finish(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.progress.stop()


class EchoStreamer(TextStreamer):
    """Writes the answer to stdout as it is generated, without control characters."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Called by transformers with the next piece of text."""
        typer.echo(printable(text), nl=stream_end)
