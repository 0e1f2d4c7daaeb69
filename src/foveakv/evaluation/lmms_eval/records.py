"""Bytes and times of every batch, as a JSON file and as means for lmms-eval's results."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from foveakv.engines.transformers.report import Report
from foveakv.util import files

_BYTES = ("stored_bytes", "full_bytes", "peak_bytes", "host_bytes")


class Records:
    """The figures of a run. head: its model, method, options and versions."""

    def __init__(self, head: dict[str, Any]) -> None:
        self.head = head
        self.batches: list[dict[str, Any]] = []

    def add(self, where: dict[str, Any], counts: dict[str, Any], report: Report | None) -> None:
        """Adds a batch.

        where: task, split and documents. counts: tokens and seconds. report: of its cache (None: the plain model).
        """
        entry = {**where, **counts}
        if report is not None:
            entry |= {name: getattr(report, name) for name in _BYTES}
            entry |= {
                "compression": report.compression,
                "prefill_seconds": report.prefill_seconds,
                "token_seconds": report.token_seconds,
                "evicted": report.evicted,
                "retrieved": report.retrieved,
                "notes": report.notes,
            }
        self.batches.append(entry)

    def means(self) -> dict[str, float]:
        """Bytes per request (padding included) and seconds per batch; empty for the plain model."""
        counted = [batch for batch in self.batches if "stored_bytes" in batch]
        if not counted:
            return {}
        requests = sum(len(batch["doc_ids"]) for batch in counted)
        sums = {name: sum(batch[name] for batch in counted) for name in _BYTES}
        means = {name: total / requests for name, total in sums.items()}
        means["compression"] = sums["full_bytes"] / sums["stored_bytes"]
        for name in ("prefill_seconds", "token_seconds"):
            seconds = [batch[name] for batch in counted if batch[name] is not None]
            if seconds:
                means[name] = fmean(seconds)
        return means

    def write(self, path: str | Path) -> None:
        """Writes head, means and batches as JSON; creates missing folders."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {**self.head, "means": self.means(), "batches": self.batches}
        files.write_text(path, json.dumps(content, indent=1, default=str) + "\n")
