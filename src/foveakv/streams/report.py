"""What a stream holds at one point in time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StreamReport:
    """Report on a stream.

    bytes: what is stored on the compute device now. highest_bytes: the most that was stored, a block that was being
    read included. host_bytes: offloaded chunks (HybridKV). frames: frames read. kept_frames: numbers, from 0, of the
    frames of which some head of some layer still stores a token on the device; offloaded chunks do not count. tokens:
    tokens read, text included. blocks: blocks read. slots: (KV head, token) pairs that are stored, over all layers.
    highest_position, positions: the highest position so far, and the number of positions that the model was made for
    (0: unknown). failed: whether a block or a kept answer failed: its cache has been dropped, and frames, tokens,
    blocks and positions are those before it.
    """

    bytes: int
    highest_bytes: int
    host_bytes: int
    frames: int
    kept_frames: tuple[int, ...]
    tokens: int
    blocks: int
    slots: int
    highest_position: int
    positions: int
    failed: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {**vars(self), "kept_frames": list(self.kept_frames)}

    def __str__(self) -> str:
        if self.failed:
            return (
                f"failed after {self.frames:,} frames, {self.tokens:,} tokens in {self.blocks:,} blocks; nothing is "
                f"stored any more ({self.highest_bytes:,} bytes at most); open a new stream"
            )
        shown = f"{len(self.kept_frames):,} of {self.frames:,} frames have a token left"
        return (
            f"{self.bytes:,} bytes now, {self.highest_bytes:,} at most"
            + (f", {self.host_bytes:,} on the host" if self.host_bytes else "")
            + f"; {shown}; {self.slots:,} slots of "
            f"{self.tokens:,} tokens in {self.blocks:,} blocks; position {self.highest_position:,}"
            + (f" of {self.positions:,}" if self.positions else "")
        )
