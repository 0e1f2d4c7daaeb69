"""Where chunks are stored: in memory of the host or the device, or in a file that is mapped into memory."""

from __future__ import annotations

import mmap
import tempfile
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from foveakv.errors import StoreError

Place = Literal["host", "device", "disk"]


class ChunkWriter:
    """Collects rows of one width, at their place of storage.

    A file is written row by row and mapped at the end: it is never in memory as a whole, and the system loads and drops
    its pages as needed. It has no name, so the system removes it with the process.

    StoreError: the file cannot be written.
    """

    def __init__(self, place: Place, rows: int, width: int, like: Tensor, directory: str | Path | None) -> None:
        self.shape, self.dtype, self.next = (rows, width), like.dtype, 0
        self.nbytes = rows * width * like.element_size()
        self.directory = Path(directory if directory is not None else tempfile.gettempdir())
        self.file = None
        if place == "disk" and self.nbytes:
            try:
                self.file = tempfile.TemporaryFile(buffering=0, dir=self.directory)  # noqa: SIM115, closed by finish
            except OSError as error:
                raise self._error(error) from error
            return
        device = like.device if place == "device" else torch.device("cpu")
        pinned = device.type == "cpu" and like.device.type == "cuda"
        with torch.inference_mode(False):
            self.buffer = torch.empty(self.shape, dtype=like.dtype, device=device, pin_memory=pinned)

    def write(self, rows: Tensor) -> None:
        """Append rows [n, width] in the writer's dtype. StoreError: the file cannot be written."""
        if self.file is None:
            self.buffer[self.next : self.next + len(rows)] = rows
            self.next += len(rows)
            return
        try:
            rest = rows.cpu().view(-1).view(torch.uint8).numpy().data
            while rest:
                rest = rest[self.file.write(rest) :]
        except OSError as error:
            self.file.close()
            raise self._error(error) from error

    def skip(self, rows: int) -> None:
        """Leave room for rows; what is in it is undefined. StoreError: as `write`."""
        if self.file is None:
            self.next += rows
            return
        self.write(torch.zeros(rows, self.shape[1], dtype=self.dtype))

    def finish(self) -> Tensor:
        """[rows, width]; from disk a mapping, read on demand, private to this process."""
        if self.file is None:
            return self.buffer
        try:
            with self.file:
                mapped = mmap.mmap(self.file.fileno(), self.nbytes, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise self._error(error) from error
        if hasattr(mmap, "MADV_RANDOM"):  # else reading ahead brings the whole file to memory within a few steps
            mapped.madvise(mmap.MADV_RANDOM)
        return torch.frombuffer(mapped, dtype=torch.uint8).view(self.dtype).view(self.shape)

    def _error(self, error: OSError) -> StoreError:
        return StoreError(
            f"cannot write {self.nbytes:,} bytes to {self.directory}: {error.strerror or error}; choose another "
            'store_dir with more room, or store="host"'
        )


class Staging:
    """Rows of a store in host memory, copied to a CUDA device on a stream of their own.

    The host gathers one piece while the previous one is copied. The result may be used on the current stream.
    """

    PIECE = 4 << 20  # bytes

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def read(self, sources: list[Tensor], index: Tensor) -> list[Tensor]:
        """Rows index [m] of every source [N, W], each as [m, W] on the device."""
        index = index.cpu()
        current = torch.cuda.current_stream(self.device)
        found = []
        for source in sources:
            target = torch.empty(len(index), source.shape[1], dtype=source.dtype, device=self.device)
            self.stream.wait_stream(current)  # the memory of `target` may still be read by what was queued before
            rows = max(1, self.PIECE // max(1, source.shape[1] * source.element_size()))
            for first in range(0, len(index), rows):
                part = index[first : first + rows]
                staged = _pinned(len(part), source)
                torch.index_select(source, 0, part, out=staged)
                with torch.cuda.stream(self.stream):
                    target[first : first + len(part)].copy_(staged, non_blocking=True)
            found.append(target)
        current.wait_stream(self.stream)  # on the device; the host goes on
        return found


def _pinned(rows: int, like: Tensor) -> Tensor:
    """[rows, W] from torch's pool of pinned memory, which reuses it only when copies from it are done."""
    return torch.empty(rows, like.shape[1], dtype=like.dtype, pin_memory=True)
