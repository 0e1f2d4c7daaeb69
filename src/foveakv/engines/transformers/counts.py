"""Counters of one layer, for the report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counts:
    """Counters of one layer. `flushes` counts events; all others count slots."""

    evicted: int = 0
    restored: int = 0
    retrieved: int = 0
    hits: int = 0
    flushes: int = 0
