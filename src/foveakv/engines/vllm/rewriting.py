"""What the plugin adds to attention backends of vLLM: kernels see the stored tokens of compressed requests.

The classes stand in front of vLLM's in the order of bases. Without the connector they only pass on.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

from foveakv.engines.vllm.block_layout import entries_of, slots_of
from foveakv.engines.vllm.plan import Chunk
from foveakv.engines.vllm.replay import Segment
from foveakv.engines.vllm.settings import check_connector
from foveakv.engines.vllm.stored import Step
from foveakv.engines.vllm.worker_side import WorkerSide, compressed_row

_WORK = "foveakv_work"


@dataclass
class Work:
    """What the plugin does in each layer of a step; an attribute of the step's attention metadata.

    chunks: chunks of prompts to compress, with their first row in the batch. steps: later steps whose queries a method
    sees. replays: segments to attend to again, with their rows and the metadata of a batch of one (None: no tokens).
    """

    chunks: list[tuple[int, Chunk]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    replays: list[tuple[Segment, slice, Any]] = field(default_factory=list)


class RewritingBuilder:
    """In front of a builder of attention metadata."""

    block_size: int

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        """Make vLLM's builder. The connector cannot refuse an engine in which another one has taken its place."""
        check_connector(vllm_config)
        super().__init__(kv_cache_spec, layer_names, vllm_config, *args, **kwargs)  # type: ignore[call-arg]

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Build the metadata of a step.

        Sequence lengths and tables are replaced by copies. The slots of new tokens are changed in place, since vLLM
        writes keys and values by the same tensor; they depend on tables and lengths alone, so repeating it is harmless.
        """
        build: Any = super().build  # type: ignore[misc]
        worker = active_worker()
        if worker is None:
            return build(common_prefix_len, common_attn_metadata, fast_build)
        common, work = common_attn_metadata, Work()
        starts, lengths = common.query_start_loc_cpu.tolist(), common.seq_lens.cpu().clone()
        tables, changed = common.block_table_tensor.cpu().clone(), False
        again: list[tuple[Step, bool]] = []
        for i, first in enumerate(tables[: common.num_reqs, 0].tolist()):
            if starts[i + 1] == starts[i]:
                continue  # a row of padding
            chunk = worker.chunk_at(first)
            if chunk is not None:
                work.chunks.append((starts[i], chunk))
                step = worker.chunk_step(chunk, starts[i])
                if step is not None:
                    again.append((step, True))
                continue
            known = worker.compressed_at(first)
            if known is None:
                continue
            length, new = int(lengths[i]), starts[i + 1] - starts[i]
            row = compressed_row(known, tables[i], length, new, self.block_size)
            step = worker.decode_step(known, row.table, length - new, length, starts[i])
            if step is not None:
                again.append((step, False))
            if known.evicted:
                tables[i], lengths[i], changed = row.table, row.length, True
                common.slot_mapping[starts[i] : starts[i + 1]] = row.slots.to(common.slot_mapping.device)
        if changed:
            device = common.block_table_tensor.device
            common = replace(common, block_table_tensor=tables.to(device), seq_lens=lengths.to(device))
        built = build(common_prefix_len, common, fast_build)
        if not work.chunks and not again:
            return built
        for step, compact in again:
            work.steps.append(step)
            for segment in worker.segments_of(step, compact=compact):
                rows = slice(step.row + segment.start - step.start, step.row + segment.stop - step.start)
                alone = self._alone(common_attn_metadata, segment, rows, step.blocks)
                work.replays.append((segment, rows, None if alone is None else build(0, alone, True)))
        own = copy.copy(built)
        setattr(own, _WORK, work)
        return own

    def _alone(self, common: Any, segment: Segment, rows: slice, blocks: Tensor) -> Any:
        """Return a segment of a request that is recomputed as a batch of one; None if it has no tokens."""
        new, length = segment.stop - segment.start, segment.length
        if new == 0:
            return None
        table = blocks[: entries_of(length, self.block_size)]
        slots = slots_of(table, torch.arange(length - new, length), self.block_size)
        device = common.block_table_tensor.device
        ends = torch.tensor([0, new], dtype=common.query_start_loc.dtype)
        return replace(
            common, query_start_loc=ends.to(device), query_start_loc_cpu=ends, num_reqs=1, num_actual_tokens=new,
            seq_lens=torch.tensor([length], dtype=common.seq_lens.dtype, device=device), max_query_len=new,
            max_seq_len=length, block_table_tensor=table[None].to(device, common.block_table_tensor.dtype),
            positions=common.positions[rows], slot_mapping=slots.to(device, common.slot_mapping.dtype),
        )  # fmt: skip


class ObservingImpl:
    """In front of an attention implementation."""

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
        forward: Any = super().forward  # type: ignore[misc]
        found: Tensor = forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        work: Work | None = getattr(attn_metadata, _WORK, None)
        worker = None if work is None else active_worker()
        if work is None or worker is None:
            return found
        idx = worker.stored_at(layer.layer_name)
        for start, chunk in work.chunks:
            if worker.wants(chunk, idx):
                worker.take_queries(chunk, idx, query[start : start + chunk.stop - chunk.start].cpu())
        for step in work.steps:
            worker.take_step_queries(step, idx, query)
        for segment, rows, metadata in work.replays:
            worker.move(idx, segment)
            if metadata is not None:
                forward(layer, query[rows], key[rows], value[rows], kv_cache, metadata, output[rows])
        return found


def active_worker() -> WorkerSide | None:
    """Return the plugin's worker side, if this engine uses the connector."""
    group = get_kv_transfer_group() if has_kv_transfer_group() else None
    worker = getattr(group, "worker", None)
    return worker if isinstance(worker, WorkerSide) else None
