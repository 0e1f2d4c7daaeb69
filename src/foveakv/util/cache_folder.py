"""The folder for what the library keeps between runs: compiled kernels, calibration files."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Return `$FOVEAKV_CACHE/name`, else `$XDG_CACHE_HOME/foveakv/name`, else `~/.cache/foveakv/name`."""
    if own := os.environ.get("FOVEAKV_CACHE"):
        return Path(own).expanduser() / name
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "foveakv" / name
