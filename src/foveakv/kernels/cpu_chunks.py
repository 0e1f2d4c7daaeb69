"""Relevance and choice of chunks on a CPU, by the compiled library (cpu_chunks.cpp); `ChunkStore` is the reference."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from foveakv.kernels import COMPILED
from foveakv.kernels.build import KERNEL
from foveakv.memory.digests import Digests, Summary

_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.uint8: 3}  # uint8: int4, two channels in a byte
MOST_QUERIES = 48  # of a head; matrix products are faster for more
# `struct Chunks` and `struct Choice` of cpu_chunks.cpp, field by field.
CHUNKS = struct.Struct("qqqqqPqPPPPP")
CHOICE = struct.Struct("qqqPPPPP")


class ChunkKernel:
    """What a `ChunkStore` calls in place of tensor operations; see `chunk_kernel`."""

    def relevance(
        self, digests: Digests, query: Tensor, heads: Tensor, count: Tensor, summary: Summary
    ) -> Tensor | None:
        """See `Digests.relevance`: float32 [n, P]. Products of 16-bit numbers are summed in float32."""
        data, scale, library = digests.data, digests.scale, KERNEL.loaded
        rows, queries, dim = query.shape
        kind = _FORMATS.get(data.dtype)
        if library is None or kind is None or query.dtype == torch.float64 or not 0 < queries <= MOST_QUERIES:
            return None
        length = dim * (1 if summary == "mean" else 2)
        rows_of_data = (length + 1) // 2 if data.dtype == torch.uint8 else length
        if data.shape[1] != rows_of_data or digests.length != length or (scale is None) != (kind < 2):
            raise ValueError(f"digests {tuple(data.shape)} do not fit queries {tuple(query.shape)}")
        query, data = query.to(torch.float32).contiguous(), data.contiguous()
        heads, count = heads.contiguous(), count.contiguous()
        found = torch.empty((rows, data.shape[2]), dtype=torch.float32)
        if rows == 0:
            return found
        arguments = CHUNKS.pack(
            rows, queries, dim, summary == "bounds", data.shape[2], query.data_ptr(), kind, data.data_ptr(),
            0 if scale is None else scale.data_ptr(), heads.data_ptr(), count.data_ptr(), found.data_ptr(),
        )  # fmt: skip
        if library.foveakv_relevance(arguments):
            raise ValueError("the relevance of chunks could not be computed: counts do not fit, or memory is short")
        return found

    def choose(self, relevance: Tensor, count: Tensor, share: Tensor, resident: Tensor, table: Tensor) -> int | None:
        """Choose the share[i] most relevant of count[i] chunks of every row; None: not by us.

        Of equals the lower chunk is chosen. Changes `resident` bool [n, P] and `table` int64 [n, K], which gets the
        chosen chunks in ascending order, then -1. Returns how many of them were resident.
        """
        library = KERNEL.loaded
        if library is None or relevance.dtype != torch.float32:
            return None
        relevance = relevance.contiguous()
        arguments = CHOICE.pack(
            *relevance.shape, table.shape[1], relevance.data_ptr(), count.data_ptr(), share.data_ptr(),
            resident.data_ptr(), table.data_ptr(),
        )  # fmt: skip
        stayed = int(library.foveakv_choose(arguments))
        if stayed < 0:
            raise ValueError("chunks could not be chosen: shares do not fit, or memory is short")
        return stayed


_KERNEL = ChunkKernel()


def chunk_kernel(device: torch.device, backend: str = "auto") -> ChunkKernel | None:
    """The kernel for chunks on `device` in a cache with this `backend`; builds nothing, see `kernels.prepare`."""
    return _KERNEL if backend in COMPILED and KERNEL.loaded is not None and device.type == "cpu" else None
