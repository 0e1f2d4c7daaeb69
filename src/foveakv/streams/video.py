"""Frames of video files, through PyAV."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from foveakv.errors import InputError, MissingDependencyError

if TYPE_CHECKING:
    from PIL.Image import Image


def read_video(path: str | os.PathLike[str], fps: float = 1.0) -> Iterator[tuple[Image, float]]:
    """Decode a video file lazily.

    Args:
        path: the file.
        fps: frames to take per second: the first frame at or after each multiple of 1 / fps.

    Yields:
        A frame, 8-bit RGB, and its time in seconds from the first one.

    Raises:
        MissingDependencyError: PyAV is not installed.
        InputError: `fps` is not positive, the file is missing, or it cannot be read as a video.
    """
    if not isinstance(fps, (int, float)) or isinstance(fps, bool) or not math.isfinite(fps) or fps <= 0:
        raise InputError(f"fps must be a positive number of frames per second, got {fps!r}")
    try:
        import av  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise MissingDependencyError(
            'reading video files needs PyAV: pip install "foveakv[video]"; or decode the video elsewhere, and feed its '
            "frames as images"
        ) from error
    if not os.path.isfile(path):
        raise InputError(f"video file not found: {path}")
    return _decoded(av, os.fspath(path), fps)


def _decoded(av: Any, path: str, fps: float) -> Iterator[tuple[Image, float]]:
    taken, first = 0, None
    try:
        with av.open(path) as container:
            for number, frame in enumerate(container.decode(video=0)):
                time = float(frame.time) if frame.time is not None else number / float(frame.rate or fps)
                first = time if first is None else first
                if time - first + 1e-6 >= taken / fps:
                    taken = math.floor((time - first + 1e-6) * fps) + 1
                    yield frame.to_image().convert("RGB"), time - first
    except InputError:
        raise
    except (OSError, ValueError, IndexError) as error:  # PyAV's errors are subclasses of these
        raise InputError(f"{path} cannot be read as a video: {error}") from error
    if first is None:
        raise InputError(f"{path} has no frames")
