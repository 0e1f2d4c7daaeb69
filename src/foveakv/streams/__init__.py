"""Streams of frames in fixed memory."""

from foveakv.streams.loading import load_stream
from foveakv.streams.report import StreamReport
from foveakv.streams.session import FrameStream, stream

__all__ = ["FrameStream", "StreamReport", "load_stream", "stream"]
