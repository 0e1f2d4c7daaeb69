"""Save a stream to a file: `FrameStream.save`; `loading.py` reads it.

The file is that of the stream's cache, with what the stream counts beside it in the header.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from foveakv.engines.transformers import saving
from foveakv.errors import InputError

ENTRY = "stream"


def save(stream: Any, path: str | os.PathLike[str]) -> None:
    """See `FrameStream.save`; stream: a `FrameStream`, whose module imports this one."""
    stream._check()
    if stream.cache is None:
        raise InputError("this stream has read nothing yet; there is nothing to save")
    positions, maker = stream._positions, stream._maker
    counted = {
        "block": stream._block,
        "frames": maker.form,
        "timestamps": maker.stamps,
        "open": maker._open,
        "pending": maker.pending,
        "next": positions.next,
        "highest": positions.highest,
        "clip": None if positions._clip is None else dataclasses.asdict(positions._clip),
        "units": stream._units,
        "last_time": stream._last_time,
        "blocks": stream._blocks,
        "warned": stream._warned,
    }
    saving.save(stream.cache, path, {ENTRY: counted})
