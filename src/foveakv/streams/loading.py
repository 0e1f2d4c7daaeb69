"""Resume a stream that `FrameStream.save` has written: `foveakv.load_stream`."""

from __future__ import annotations

import json
import os
from typing import Any

from safetensors import SafetensorError, safe_open

from foveakv.engines.transformers import saving
from foveakv.engines.transformers.loading import load_cache
from foveakv.engines.transformers.positions import Clip
from foveakv.engines.transformers.session import resumed
from foveakv.errors import FoveaKVError, StoreError
from foveakv.memory.pool import Pool
from foveakv.streams.saving import ENTRY
from foveakv.streams.session import FrameStream


def load_stream(path: str | os.PathLike[str], model: Any, processor: Any, *, pool: Pool | None = None) -> FrameStream:
    """Load a stream that `FrameStream.save` has written, and go on where it was saved.

    While the stream exists, the model stays attached; calls that do not belong to it are passed on unchanged.

    Args:
        path: the file.
        model: the model that the stream was made with.
        processor: its processor; it is not compared with that of the saved stream.
        pool: a pool for the slots; None: buffers of its own.

    Raises:
        StoreError: the file cannot be read, or is no stream.
        InputError: the file is of another model, version of transformers or device, or the processor takes no images.
        MethodError, UnsupportedModelError, PoolFullError: as `foveakv.load_cache`.
    """
    counted = _counted(path)
    cache = load_cache(path, model, pool=pool)
    try:
        made = FrameStream(
            model, processor, cache.method, None, counted["block"], counted["frames"], counted["timestamps"], "gaps", {}
        )
        made._session = resumed(model, cache)
        positions, maker = made._positions, made._maker
        maker._began, maker._open = True, bool(counted["open"])
        maker.pending = [int(token) for token in counted["pending"]]
        positions.next, positions.highest = int(counted["next"]), int(counted["highest"])
        positions._clip = None if counted["clip"] is None else Clip(**counted["clip"])
        made._units = [(int(first), int(last)) for first, last in counted["units"]]
        made._last_time = None if counted["last_time"] is None else float(counted["last_time"])
        made._blocks, made._warned = int(counted["blocks"]), bool(counted["warned"])
    except FoveaKVError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{os.fspath(path)} is damaged, or was not written by this version: {error}") from error
    return made


def _counted(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What the file says of the stream."""
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get(saving.HEADER, "{}"))
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise StoreError(f"cannot read {os.fspath(path)}: {error}") from error
    found = header.get(ENTRY) if isinstance(header, dict) else None
    if not isinstance(found, dict):
        raise StoreError(f"{os.fspath(path)} is not a saved stream; foveakv.load_cache reads saved caches")
    return found
