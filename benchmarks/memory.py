"""Stored bytes by method and budget: device storage (slack, positions, side tensors, digests included) and host."""

from __future__ import annotations

from typing import Any

from benchmarks.layers import SHAPES, Driver, peaked
from benchmarks.methods import at_budget
from foveakv.report import Report


def run(geometry: str, contexts: list[int], budgets: list[float], layers: int) -> list[dict[str, Any]]:
    rows = []
    shape = SHAPES[geometry]
    for context in contexts:
        tensors = peaked(shape, context)
        for budget in budgets:
            for name, method in at_budget(budget, context).items():
                driver = Driver(shape, method, context, layers=layers)
                driver.prefill(tensors)
                report = Report.of(driver.cache)
                rows.append(
                    {
                        "geometry": geometry,
                        "context": context,
                        "budget": budget,
                        "method": name,
                        "layers": layers,
                        "full_bytes": report.full_bytes,
                        "stored_bytes": report.stored_bytes,
                        "host_bytes": report.host_bytes,
                        "peak_bytes": report.peak_bytes,
                        "full_over_stored": report.compression,
                        "peak_over_layer_plus_stored": report.peak_bytes
                        / (report.full_bytes / layers + report.stored_bytes),
                    }
                )
    return rows
