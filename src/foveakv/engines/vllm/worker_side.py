"""The part of the plugin in vLLM's workers: collect queries, run the method, rewrite the stored slots.

Nothing here depends on vLLM or on the layout of its cache, see `stored.PagedStore`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from foveakv.core.budget import Geometry
from foveakv.core.prompt import PromptMap
from foveakv.engines.vllm.block_layout import entries_of, freed_entries, slots_of, without_entries
from foveakv.engines.vllm.deciding import decide, read_prompt
from foveakv.engines.vllm.decoding import decide_step, is_called
from foveakv.engines.vllm.plan import Chunk, Freed, Plan
from foveakv.engines.vllm.replay import Segment, segments
from foveakv.engines.vllm.settings import Choice
from foveakv.engines.vllm.stored import Compressed, Outcome, PagedStore, Ranks, Reading, Step
from foveakv.methods import Method

_log = logging.getLogger("vllm.foveakv")


class WorkerSide:
    """Compresses prompts on one rank. All ranks get the same plans and decide alike."""

    def __init__(
        self,
        create: Callable[[Choice], Method],
        sizes: Geometry,
        scaling: float,
        ranks: Ranks,
        attention_every: int = 1,
    ) -> None:
        self.store: PagedStore | None = None
        self.recent: deque[Outcome] = deque(maxlen=64)
        self._create, self._sizes, self._scaling, self._ranks = create, sizes, scaling, ranks
        self._attention_every = attention_every
        self._reading: dict[str, Reading] = {}
        self._compressed: dict[str, Compressed] = {}
        self._by_block: dict[int, Compressed] = {}
        self._chunks: dict[int, Chunk] = {}
        self._steps: dict[str, Step] = {}
        self._failing: dict[str, int] = {}
        self._broken: dict[str, int] = {}

    # ---- one step

    def start_step(self, plan: Plan) -> None:
        """Take over a plan, before the attention metadata of its step is built."""
        for req_id in plan.finished:
            self._forget(req_id)
        for req_id in plan.preempted:
            self._detach(req_id)
        self._failing, self._broken = self._broken, {}
        for each in plan.begin:
            self._detach(each.req_id)
            if each.req_id not in self._compressed:
                prompt = PromptMap(each.kinds, each.index)
                self._reading[each.req_id] = read_prompt(self._create(each.choice), prompt, self._sizes)
        self._chunks = {chunk.blocks[0]: chunk for chunk in plan.chunks}
        self._steps = {}

    def chunk_at(self, first_block: int) -> Chunk | None:
        """Return the chunk of the request whose table starts with a block, if it is read in this step."""
        return self._chunks.get(first_block)

    def compressed_at(self, first_block: int) -> Compressed | None:
        """Return the compressed request whose table starts with a block."""
        return self._by_block.get(first_block)

    def chunk_step(self, chunk: Chunk, row: int) -> Step | None:
        """Return the decoded tokens of a chunk that completes the prompt of a recomputed request, to be replayed.

        None: the request is read for the first time, or its prompt is not complete. row: row of the chunk's first token
        in the batch.
        """
        known = self._compressed.get(chunk.req_id)
        if known is None or not chunk.completes:
            return None
        known.epoch, known.first_block = chunk.epoch, chunk.blocks[0]
        self._by_block[chunk.blocks[0]] = known
        step = Step(known, chunk.prompt, chunk.stop, row + chunk.prompt - chunk.start, torch.tensor(chunk.blocks), 0)
        self._steps[chunk.req_id] = step
        return step

    def decode_step(self, known: Compressed, table: Tensor, start: int, stop: int, row: int) -> Step | None:
        """Return a step after the prompt, if it needs more than vLLM's attention; table: int [entries], those in use.

        start, stop: the new tokens of the context. row: row of token `start` in the batch.
        """
        assert self.store is not None
        if known.decoding is None and not known.failed and not known.missing(stop):
            return None
        entries = entries_of(stop, self.store.size) - len(known.freed)
        step = Step(known, start, stop, row, table[:entries].long(), known.evicted)
        self._steps[known.req_id] = step
        return step

    def segments_of(self, step: Step, *, compact: bool) -> list[Segment]:
        """See `replay.segments`."""
        assert self.store is not None
        return segments(step, self.store.size, compact=compact)

    def stored_at(self, layer_name: str) -> int:
        """Return the index of a layer."""
        assert self.store is not None
        return self.store.index[layer_name]

    def wants(self, chunk: Chunk, idx: int) -> bool:
        """Whether the query rows of a layer are needed."""
        reading = self._reading.get(chunk.req_id)
        return reading is not None and reading.method.needs_queries(idx)

    def take_queries(self, chunk: Chunk, idx: int, query: Tensor) -> None:
        """Keep the rows of a chunk that the method observes; query: [stop - start, Hq, D]."""
        reading = self._reading[chunk.req_id]
        reading.take(idx, chunk.start, query[: chunk.prompt - chunk.start])

    def take_step_queries(self, step: Step, idx: int, query: Tensor) -> None:
        """Keep the rows that a method sees after the step; query: [rows of the batch, Hq, D]."""
        if step.known.decoding is not None and step.first_new < step.stop:
            first = step.row + step.first_new - step.start
            step.queries[idx] = query[first : step.row + step.stop - step.start].to("cpu", copy=True)

    def end_step(self) -> list[Freed]:
        """Compress the prompts that this step has completed, and call methods that evict; after the last layer."""
        done = [
            self._complete(chunk)
            for chunk in self._chunks.values()
            if chunk.completes and chunk.req_id not in self._steps
        ]
        done += [self._complete_step(step) for step in self._steps.values()]
        self._chunks, self._steps = {}, {}
        return [each for each in done if each is not None]

    @property
    def failing_blocks(self) -> set[int]:
        """The first blocks of requests whose method failed in the step before, and which must be ended."""
        return set(self._failing.values())

    @property
    def failed(self) -> tuple[str, ...]:
        """The requests whose method failed in this step."""
        return tuple(sorted(self._broken))

    # ---- storing

    def move(self, idx: int, segment: Segment) -> None:
        """Move the tokens of one layer that a segment needs in other slots."""
        assert self.store is not None
        self.store.move(idx, segment.source, segment.target)

    def _move_all(self, blocks: Tensor, source: Tensor, target: Tensor) -> None:
        """Move stored tokens in all layers, by their numbers int64 [n]."""
        assert self.store is not None
        slots = [slots_of(blocks, each, self.store.size) for each in (source, target)]
        for idx in range(self._sizes.layers):
            self.store.move(idx, *slots)

    def _complete(self, chunk: Chunk) -> Freed | None:
        """Compress a prompt that is complete for the first time."""
        assert self.store is not None
        blocks = torch.tensor(chunk.blocks)
        reading = self._reading.pop(chunk.req_id)
        try:
            keep = decide(reading, self.store, blocks, self._scaling, self._ranks)
        except Exception:
            self._fail(chunk.req_id, chunk.blocks[0])
            return None
        decoding = reading if is_called(reading.method) else None
        known = Compressed(chunk.req_id, keep.nonzero().flatten(), chunk.prompt, chunk.epoch, decoding)
        self._compressed[chunk.req_id] = known
        known.first_block = chunk.blocks[0]
        self._by_block[chunk.blocks[0]] = known
        numbers = torch.arange(known.kept.shape[0])
        moved = known.kept != numbers
        self._move_all(blocks, known.kept[moved], numbers[moved])
        freed = self._free(known, chunk.stop)
        self.recent.append(Outcome(chunk.req_id, chunk.prompt, known.kept.tolist(), known.freed))
        return freed

    def _complete_step(self, step: Step) -> Freed | None:
        """Take note of what a step has replayed, and call the method for the tokens that it has not seen."""
        assert self.store is not None
        known = step.known
        for eviction in known.missing(step.stop):
            known.carry_out(eviction)
        if known.failed:  # it was preempted before it ended
            self._broken[known.req_id] = int(step.blocks[0])
            return None
        evicted = None
        if known.decoding is not None and step.first_new < step.stop:
            try:
                evicted = decide_step(
                    step, self.store, self._sizes.layers, self._scaling, self._ranks, self._attention_every
                )
            except Exception:
                self._fail(known.req_id, int(step.blocks[0]))
                known.decoding, known.failed = None, True
                return None
            known.seen = step.stop
        if evicted is not None:
            self._move_all(step.blocks, evicted.source, evicted.target)
            known.history.append(evicted)
            known.carry_out(evicted)
        return self._free(known, step.stop)

    def _free(self, known: Compressed, tokens: int) -> Freed:
        """Give back the blocks that a request of `tokens` tokens does not need any more."""
        assert self.store is not None
        entries = freed_entries(tokens, known.evicted, self.store.size, known.freed)
        known.freed = tuple(sorted((*known.freed, *entries)))
        decoded = known.evicted - (known.prompt - known.kept.shape[0])
        return Freed(known.req_id, known.epoch, known.kept.shape[0], entries, decoded, known.checksum)

    def _fail(self, req_id: str, first_block: int) -> None:
        _log.exception("FoveaKV: the method failed; request %s ends with an error", req_id)
        self._broken[req_id] = first_block

    def _detach(self, req_id: str) -> None:
        """A request has lost its blocks. What was decided about it stays valid."""
        self._reading.pop(req_id, None)
        self._broken.pop(req_id, None)
        known = self._compressed.get(req_id)
        if known is not None:
            if known.first_block is not None:
                self._by_block.pop(known.first_block, None)
            known.reset()

    def _forget(self, req_id: str) -> None:
        self._detach(req_id)
        self._compressed.pop(req_id, None)


@dataclass(frozen=True)
class Row:
    """One request of a batch as the attention kernel sees it: number of stored tokens, table, slots of new tokens."""

    length: int
    table: Tensor
    slots: Tensor


def compressed_row(known: Compressed, table: Tensor, length: int, new: int, size: int) -> Row:
    """Return the row of a compressed request.

    Args:
        known: the request.
        table: int [entries], its block table as vLLM has it.
        length: number of tokens of the context, the new ones included.
        new: number of new tokens.
        size: slots per block.
    """
    rest = without_entries(table, known.freed)
    length -= known.evicted
    return Row(length, rest, slots_of(rest[: entries_of(length, size)], torch.arange(length - new, length), size))
