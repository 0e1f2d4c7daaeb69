"""Stored bytes by method and budget: device storage (free room, positions, side tensors and digests included) and host.

Bytes do not depend on the machine's load and are the same in every run.
"""

from __future__ import annotations

import torch

from benchmarks.common import Recorder
from benchmarks.layers import Driver, dtype_of, peaked, shape_of
from benchmarks.methods import at_budget
from foveakv.engines.transformers.report import Report

BY = ("geometry", "context", "budget", "method")


@torch.inference_mode()
def run(recorder: Recorder) -> None:
    """Measure one group of rows per context and budget."""
    settings = recorder.settings
    shape, layers, digest_dtype = shape_of(settings["geometry"]), settings["layers"], settings["digest_dtype"]
    for context in settings["contexts"]:
        tensors = peaked(shape, context, settings["seed"], dtype=dtype_of(settings["dtype"]))
        for budget in settings["budgets"]:
            if recorder.has(geometry=settings["geometry"], context=context, budget=budget):
                continue
            rows = []
            methods = at_budget(budget, context, names=settings["methods"], digest_dtype=digest_dtype)
            for name, method in methods.items():
                recorder.method(f"{name} {budget:g} at {context}", method)
                driver = Driver(shape, method, context, layers=layers)
                driver.prefill(tensors)
                report = Report.of(driver.cache)
                rows.append(
                    {
                        "geometry": settings["geometry"],
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
            recorder.add(rows)
