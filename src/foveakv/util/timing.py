"""Time forward passes."""

from __future__ import annotations

import time
from statistics import median
from types import TracebackType
from typing import Any

import torch


class StepClock:
    """Times every forward pass of a model, hooks included. A context manager; synchronizes accelerators.

    seconds: the time of each pass, in order.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.seconds: list[float] = []

    def __enter__(self) -> StepClock:
        self._handles = [
            self.model.register_forward_pre_hook(self._start, prepend=True),
            self.model.register_forward_hook(self._stop),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def prefill_seconds(self) -> float:
        """Time of the first pass, 0 before it."""
        return self.seconds[0] if self.seconds else 0.0

    @property
    def token_seconds(self) -> float | None:
        """Median time of the passes after the first one; None if there are none."""
        return median(self.seconds[1:]) if len(self.seconds) > 1 else None

    def _now(self) -> float:
        if self.model.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    def _start(self, *unused: Any) -> None:
        self._started = self._now()

    def _stop(self, *unused: Any) -> None:
        self.seconds.append(self._now() - self._started)
