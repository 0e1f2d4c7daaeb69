"""Segments as plain tensors, and back: what a saved cache holds of a layer.

Only slots in use are part of it, in the order of runs. Quantized slots stay bytes.
"""

from __future__ import annotations

from typing import Any

import torch

from foveakv.memory.paged import PagedSegments
from foveakv.memory.pool import Pool
from foveakv.memory.quantized import QuantizedRows
from foveakv.memory.quantizer import Quantizer
from foveakv.memory.residual import ResidualWindow
from foveakv.memory.segments import Segments


def to_parts(segments: Segments) -> dict[str, Any]:
    """Take segments apart into plain values and tensors.

    Returns:
        batch, heads; lengths int64 [R]; keys, values, positions and fields of all stored slots in run order; fills of
        the fields; quantized: scales and full-precision copies, or None.
    """
    layout, quantized = segments._layout, segments._quantized
    stored = layout.stored_rows()
    at = segments._at(stored)
    return {
        "batch": segments.batch,
        "heads": segments.heads,
        "lengths": layout.length,
        "keys": segments._keys.index_select(0, at),
        "values": segments._values.index_select(0, at),
        "positions": segments._positions.index_select(0, stored),
        "fields": {name: buffer.index_select(0, stored) for name, buffer in segments._fields.items()},
        "fills": dict(segments._fills),
        "quantized": None if quantized is None else _quantized_parts(quantized),
    }


def from_parts(parts: dict[str, Any], device: torch.device, pool: Pool | None = None) -> Segments:
    """Make segments of what `to_parts` returned, on a device, in a pool or in buffers of their own.

    Raises:
        PoolFullError: the pool has too little memory.
    """
    batch, heads, quantized = parts["batch"], parts["heads"], parts["quantized"]
    keys, values = parts["keys"].to(device), parts["values"].to(device)
    quantizer, length = None, 0
    like_keys, like_values = keys[:0], values[:0]
    if quantized is not None:
        quantizer = Quantizer(
            quantized["kind"], quantized["dim"], quantized["value_dim"],
            quantized["key_scale"].to(device), quantized["key_zero"].to(device),
        )  # fmt: skip
        window = quantized["window"]
        length = 0 if window is None else window["length"]
        like_keys, like_values = (
            torch.empty(0, width, dtype=quantized["dtype"], device=device)
            for width in (quantizer.dim, quantizer.value_dim)
        )
    segments = (
        Segments(batch, heads, like_keys, like_values, quantizer, length)
        if pool is None
        else PagedSegments(batch, heads, like_keys, like_values, quantizer, length, pool=pool)
    )
    lengths = parts["lengths"]
    segments._reserve(lengths)
    segments._allocate(lengths)
    segments._set_lengths(lengths)
    stored = segments._layout.stored_rows()
    at = segments._at(stored)
    segments._keys.index_copy_(0, at, keys)
    segments._values.index_copy_(0, at, values)
    segments._positions.index_copy_(0, stored, parts["positions"].to(device))
    for name, values_of_slots in parts["fields"].items():
        segments.add_field(name, dtype=values_of_slots.dtype, fill=parts["fills"][name])
        segments._fields[name].index_copy_(0, stored, values_of_slots.to(device))
    if quantized is not None and segments._quantized is not None:
        _fill_window(segments._quantized.window, quantized["window"])
    return segments


def _quantized_parts(quantized: QuantizedRows) -> dict[str, Any]:
    quantizer, window = quantized.quantizer, quantized.window
    return {
        "kind": quantizer.kind,
        "dim": quantizer.dim,
        "value_dim": quantizer.value_dim,
        "key_scale": quantizer.key_scale,
        "key_zero": quantizer.key_zero,
        "dtype": quantized.dtype,
        "window": None
        if window is None
        else {
            "length": window.length,
            "next": window.next,
            "settled": window.settled,
            "keys": window.keys,
            "values": window.values,
        },
    }


def _fill_window(window: ResidualWindow | None, parts: dict[str, Any] | None) -> None:
    """Give an empty window of the same length its copies back."""
    if window is None or parts is None:
        return
    window.next, window.settled = parts["next"], parts["settled"]
    for mine, theirs in ((window.keys, parts["keys"]), (window.values, parts["values"])):
        mine.copy_(theirs.to(mine.device))
