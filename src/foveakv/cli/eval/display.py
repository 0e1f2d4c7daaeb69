"""The progress of a run: a bar on a terminal, a line per minute elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from foveakv.cli import common

if TYPE_CHECKING:
    from foveakv.evaluation.runner import Status


class Display:
    """Shows the status of a run on stderr. A context manager; `show` is called after every result."""

    EVERY = 60.0
    """Seconds between two lines when stderr is not a terminal."""

    def __init__(self) -> None:
        self.console = common.messages()
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("results, {task.fields[items]}"),
            TextColumn("[red]{task.fields[errors]}"),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            console=self.console,
            speed_estimate_period=1800,  # an item may take minutes
            transient=True,
            disable=not self.console.is_terminal,
        )
        self.first: tuple[float, int] | None = None
        self.last = 0.0

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.bar.live.is_started:
            self.bar.stop()

    def show(self, status: Status) -> None:
        """Show the status; the first call comes before the model is loaded."""
        if not self.console.is_terminal:
            self._line(status)
            return
        items, errors = _items(status), _errors(status)
        if self.first is None:
            # The bar is started later: the embedded model draws its own when it is assembled on first use.
            self.first = (time.monotonic(), status.results)
            self.console.print("loading the model" if status.results < status.total else "nothing to do")
            self.task = self.bar.add_task(
                "running", total=status.total, completed=status.results, items=items, errors=errors
            )
            return
        self.bar.start()
        self.bar.update(self.task, completed=status.results, items=items, errors=errors)

    def _line(self, status: Status) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first = (now, status.results)
        elif now - self.last < self.EVERY:
            return
        self.last = now
        words = [f"{status.results} of {status.total} results", _items(status), _errors(status)]
        made = status.results - self.first[1]
        if made:
            left = (status.total - status.results) * (now - self.first[0]) / made
            words.append(f"about {_duration(left)} left")
        self.console.print(", ".join(word for word in words if word), markup=False, highlight=False, soft_wrap=True)


def _items(status: Status) -> str:
    return f"{status.items} of {status.total_items} items"


def _errors(status: Status) -> str:
    return f"{status.failed} failed" if status.failed else ""


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
