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
from foveakv.engines.vllm.plan import Chunk, Freed, Plan
from foveakv.engines.vllm.settings import Choice
from foveakv.engines.vllm.stored import Compressed, Outcome, PagedStore, Ranks, Reading
from foveakv.methods import Method

_log = logging.getLogger("vllm.foveakv")


@dataclass(frozen=True)
class Replay:
    """Decoded tokens of a request that is recomputed after a preemption; they must not see evicted tokens.

    start, stop: their rows among those of the chunk. blocks: of the tokens read so far. stored: int64 [n], tokens that
    are stored. tokens: number of tokens read so far.
    """

    start: int
    stop: int
    blocks: Tensor
    stored: Tensor
    tokens: int


class WorkerSide:
    """Compresses prompts on one rank. All ranks get the same plans and decide alike."""

    def __init__(self, create: Callable[[Choice], Method], sizes: Geometry, scaling: float, ranks: Ranks) -> None:
        self.store: PagedStore | None = None
        self.recent: deque[Outcome] = deque(maxlen=64)
        self._create, self._sizes, self._scaling, self._ranks = create, sizes, scaling, ranks
        self._reading: dict[str, Reading] = {}
        self._compressed: dict[str, Compressed] = {}
        self._by_block: dict[int, Compressed] = {}
        self._chunks: dict[int, Chunk] = {}
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

    def chunk_at(self, first_block: int) -> Chunk | None:
        """Return the chunk of the request whose table starts with a block, if it is read in this step."""
        return self._chunks.get(first_block)

    def compressed_at(self, first_block: int) -> Compressed | None:
        """Return the compressed request whose table starts with a block."""
        return self._by_block.get(first_block)

    def replay_of(self, chunk: Chunk) -> Replay | None:
        """Return what must be replayed after a chunk; None for first prefills and while the prompt is incomplete."""
        known = self._compressed.get(chunk.req_id)
        if known is None or not chunk.completes or known.evicted == 0 or chunk.stop == chunk.prompt:
            return None
        return Replay(
            chunk.prompt - chunk.start, chunk.stop - chunk.start, torch.tensor(chunk.blocks),
            known.stored(chunk.stop), chunk.stop,
        )  # fmt: skip

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

    def end_step(self) -> list[Freed]:
        """Compress the prompts that this step has completed, after the last layer."""
        done = [self._complete(chunk) for chunk in self._chunks.values() if chunk.completes]
        self._chunks = {}
        return [each for each in done if each is not None]

    @property
    def failing_blocks(self) -> set[int]:
        """The first blocks of requests whose method failed in the step before, and which must be ended."""
        return set(self._failing.values())

    # ---- storing

    def compact(self, idx: int, blocks: Tensor, tokens: int, stored: Tensor) -> None:
        """Move the stored tokens of one layer to the first slots.

        Args:
            idx: the layer.
            blocks: int64 [entries], blocks that hold the first `tokens` tokens of the context in order.
            tokens: see `blocks`.
            stored: int64 [n], the tokens to store, ascending.
        """
        assert self.store is not None
        numbers = torch.arange(stored.shape[0])
        moved = stored != numbers
        keys, values = self.store.read(idx, blocks, tokens)
        slots = slots_of(blocks, numbers[moved], self.store.size)
        self.store.write(idx, keys[stored[moved]], values[stored[moved]], slots)

    def _complete(self, chunk: Chunk) -> Freed | None:
        assert self.store is not None
        blocks = torch.tensor(chunk.blocks)
        known = self._compressed.get(chunk.req_id)
        replayed = known is not None and self.replay_of(chunk) is not None
        if known is None:
            reading = self._reading.pop(chunk.req_id)
            try:
                keep = decide(reading, self.store, blocks, self._scaling, self._ranks)
            except Exception:
                _log.exception("FoveaKV: the method failed; request %s ends with an error", chunk.req_id)
                self._broken[chunk.req_id] = chunk.blocks[0]
                return None
            known = Compressed(chunk.req_id, keep.nonzero().flatten(), chunk.prompt)
            self._compressed[chunk.req_id] = known
        if known.evicted and not replayed:
            for idx in range(self._sizes.layers):
                self.compact(idx, blocks, chunk.stop, known.stored(chunk.stop))
        known.freed = freed_entries(chunk.stop, known.evicted, self.store.size)
        known.first_block = chunk.blocks[0]
        self._by_block[chunk.blocks[0]] = known
        self.recent.append(Outcome(chunk.req_id, chunk.prompt, known.kept.tolist(), known.freed))
        return Freed(chunk.req_id, chunk.epoch, known.kept.shape[0], known.freed)

    def _detach(self, req_id: str) -> None:
        """A request has lost its blocks. What was decided about its prompt stays valid."""
        self._reading.pop(req_id, None)
        self._broken.pop(req_id, None)
        known = self._compressed.get(req_id)
        if known is not None and known.first_block is not None:
            self._by_block.pop(known.first_block, None)
            known.first_block = None

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
