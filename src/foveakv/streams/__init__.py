"""Streams of frames in fixed memory."""

from foveakv.streams.report import StreamReport
from foveakv.streams.session import FrameStream, stream

__all__ = ["FrameStream", "StreamReport", "stream"]
