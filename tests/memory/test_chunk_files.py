"""Chunks in files, and staged copies to a device."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import resource
import sys
from typing import Any

import pytest
import torch
from offloaded import RAGGED, Layer, fetch

from foveakv.errors import FoveaKVError, StoreError
from foveakv.memory.chunk_files import ChunkWriter, Staging


def test_the_file_has_no_name(tmp_path: Any) -> None:
    layer = Layer(**RAGGED, place="disk", directory=tmp_path)
    layer.store.reserve(layer.segments, torch.full((2, 3), 2))
    fetch(layer, layer.query())
    assert list(tmp_path.iterdir()) == []
    del layer
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the system what it has in memory")
def test_a_file_is_read_page_by_page(tmp_path: Any) -> None:
    """Reading a few pages of a file that is not in memory does not bring the rest of it there."""
    like = torch.zeros(1)
    writer = ChunkWriter("disk", 4096, 1024, like, tmp_path)
    writer.write(torch.arange(4096.0)[:, None].expand(4096, 1024).contiguous())
    assert writer.file is not None
    os.fsync(writer.file.fileno())
    os.posix_fadvise(writer.file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    rows = writer.finish()

    def in_memory() -> int:
        pages = (ctypes.c_ubyte * (rows.nbytes // mmap.PAGESIZE))()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mincore(ctypes.c_void_p(rows.data_ptr()), ctypes.c_size_t(rows.nbytes), pages):
            pytest.skip(f"mincore: {os.strerror(ctypes.get_errno())}")
        return sum(page & 1 for page in pages) * mmap.PAGESIZE

    if in_memory():
        pytest.skip("this file system keeps its files in memory")
    index = torch.arange(17, 4096, 300)
    assert torch.equal(rows.index_select(0, index)[:, 5], index.float())
    assert in_memory() < rows.nbytes / 8


def test_a_missing_directory_is_named(tmp_path: Any) -> None:
    with pytest.raises(StoreError, match=r"nowhere.*choose another store_dir") as caught:
        Layer(**RAGGED, place="disk", directory=tmp_path / "nowhere")
    assert isinstance(caught.value, FoveaKVError)
    assert isinstance(caught.value, OSError)


def test_a_full_disk_is_an_error_that_leaves_nothing(tmp_path: Any) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        with pytest.raises(StoreError, match=r"cannot write .* bytes") as caught:
            Layer(**RAGGED, place="disk", directory=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    del caught
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_staged_copies_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of waits and copies, with streams that only take notes; CUDA itself is not needed."""
    notes: list[str] = []

    class Stream:
        def __init__(self, name: Any) -> None:
            self.name = name if isinstance(name, str) else "copies"

        def wait_stream(self, other: Stream) -> None:
            notes.append(f"{self.name} waits for {other.name}")

        def __enter__(self) -> None:
            notes.append("copy")

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("compute"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr("foveakv.memory.chunk_files._pinned", lambda n, like: like.new_empty(n, like.shape[1]))
    monkeypatch.setattr(Staging, "PIECE", 3 * 32 * 4)
    keys, values = torch.randn(20, 32), torch.randn(20, 24)
    index = torch.tensor([3, 19, 0, 7, 7, 1, 12])
    found = Staging(torch.device("cpu")).read([keys, values], index)
    assert torch.equal(found[0], keys[index])
    assert torch.equal(found[1], values[index])
    fetched = ["copies waits for compute", "copy", "copy"]
    assert notes == [*fetched, "copy", *fetched, "compute waits for copies"]
