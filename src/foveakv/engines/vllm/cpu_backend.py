"""vLLM's CPU attention backend, which also reads compressed requests.

Without the connector, everything here passes on to vLLM's own classes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from foveakv.engines.vllm.block_layout import entries_of, slots_of
from foveakv.engines.vllm.connector import FoveaKVConnector
from foveakv.engines.vllm.plan import Chunk
from foveakv.engines.vllm.replay import Segment
from foveakv.engines.vllm.stored import Step
from foveakv.engines.vllm.worker_side import WorkerSide, compressed_row


@dataclass
class Metadata(CPUAttentionMetadata):
    """Adds what the plugin does in each layer.

    chunks: chunks of prompts to compress, with their first row in the batch. steps: later steps whose queries a method
    sees. replays: segments to attend to again, with their rows and the metadata of a batch of one (None: no tokens).
    """

    chunks: list[tuple[int, Chunk]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    replays: list[tuple[Segment, slice, CPUAttentionMetadata | None]] = field(default_factory=list)


class Builder(CPUAttentionMetadataBuilder):
    """Presents compressed requests to the kernel by their stored tokens."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Build the metadata of a step.

        Sequence lengths and tables are replaced by copies. The slots of new tokens are changed in place, since vLLM
        writes keys and values by the same tensor; they depend on tables and lengths alone, so repeating it is harmless.
        """
        worker = active_worker()
        if worker is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        common = common_attn_metadata
        starts, lengths = common.query_start_loc_cpu.tolist(), common.seq_lens.tolist()
        tables, changed = common.block_table_tensor, False
        chunks: list[tuple[int, Chunk]] = []
        steps: list[tuple[int, Step, bool]] = []
        for i, first in enumerate(tables[: common.num_reqs, 0].tolist()):
            chunk = worker.chunk_at(first)
            if chunk is not None:
                chunks.append((starts[i], chunk))
                again = worker.chunk_step(chunk, starts[i])
                if again is not None:
                    steps.append((i, again, True))
                continue
            known = worker.compressed_at(first)
            if known is None:
                continue
            new = starts[i + 1] - starts[i]
            row = compressed_row(known, tables[i], lengths[i], new, self.block_size)
            step = worker.decode_step(known, row.table, lengths[i] - new, lengths[i], starts[i])
            if step is not None:
                steps.append((i, step, False))
            if known.evicted == 0:
                continue
            if not changed:
                tables, new_lengths, changed = tables.clone(), common.seq_lens.clone(), True
            tables[i], new_lengths[i] = row.table, row.length
            common.slot_mapping[starts[i] : starts[i + 1]] = row.slots
        if changed:
            common = replace(common, block_table_tensor=tables, seq_lens=new_lengths)
        built = super().build(common_prefix_len, common, fast_build)
        if not chunks and not steps:
            return built
        own = Metadata(**{each.name: getattr(built, each.name) for each in fields(built)})
        own.chunks, own.steps = chunks, [step for _, step, _ in steps]
        for i, step, compact in steps:
            for segment in worker.segments_of(step, compact=compact):
                rows = slice(step.row + segment.start - step.start, step.row + segment.stop - step.start)
                alone = self._alone(common_attn_metadata, i, segment, rows, step.blocks)
                own.replays.append((segment, rows, alone))
        return own

    def _alone(self, common: Any, i: int, segment: Segment, rows: slice, blocks: Tensor) -> CPUAttentionMetadata | None:
        """Return the metadata of a segment of request i, as a batch of one."""
        new, length = segment.stop - segment.start, segment.length
        if new == 0:
            return None
        table = blocks[: entries_of(length, self.block_size)][None].to(common.block_table_tensor.dtype)
        ends = torch.tensor([0, new], dtype=common.query_start_loc.dtype)
        alone = replace(
            common, query_start_loc=ends, query_start_loc_cpu=ends, num_reqs=1, num_actual_tokens=new,
            seq_lens=torch.tensor([length], dtype=common.seq_lens.dtype), max_query_len=new, max_seq_len=length,
            block_table_tensor=table, positions=common.positions[rows],
            slot_mapping=slots_of(table[0], torch.arange(length - new, length), self.block_size),
        )  # fmt: skip
        return super().build(0, alone)


class Impl(CPUAttentionBackendImpl):
    """Keeps the query rows that methods observe, and replays decoded tokens of recomputed requests."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Attend as vLLM does, keep queries of prompts, and replay decoded tokens of recomputed requests."""
        found = super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        worker = active_worker() if isinstance(attn_metadata, Metadata) else None
        if worker is None:
            return found
        idx = worker.stored_at(layer.layer_name)
        for start, chunk in attn_metadata.chunks:
            if worker.wants(chunk, idx):
                worker.take_queries(chunk, idx, query[start : start + chunk.stop - chunk.start])
        for step in attn_metadata.steps:
            worker.take_step_queries(step, idx, query)
        for segment, rows, metadata in attn_metadata.replays:
            worker.move(idx, segment)
            if metadata is not None:
                super().forward(layer, query[rows], key[rows], value[rows], kv_cache, metadata, output[rows])
        return found


class Backend(CPUAttentionBackend):
    """Takes the place of vLLM's CPU backend."""

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        """Return the attention implementation."""
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        """Return the builder of the metadata."""
        return Builder


def active_worker() -> WorkerSide | None:
    """Return the plugin's worker side, if this engine uses the connector."""
    group = get_kv_transfer_group() if has_kv_transfer_group() else None
    return group.worker if isinstance(group, FoveaKVConnector) else None
