"""The part of the plugin in vLLM's scheduler: which requests are compressed, and what becomes of their blocks.

Nothing here imports vLLM; requests are its `Request` objects.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foveakv.core.budget import Geometry
from foveakv.core.prompt import PromptMap
from foveakv.engines.vllm.deciding import read_prompt
from foveakv.engines.vllm.plan import Begin, Chunk, Freed, Plan
from foveakv.engines.vllm.prompt_map import prompt_map
from foveakv.engines.vllm.settings import Choice, Settings
from foveakv.errors import FoveaKVError, UnsupportedModeError
from foveakv.methods import Method

_log = logging.getLogger("vllm.foveakv")


@dataclass
class Known:
    """A request to compress.

    epoch: how often it has been started. kept: prompt tokens stored when the prompt is complete, once known. evicted:
    tokens evicted while decoding. freed_blocks: of this start.
    """

    request: Any
    choice: Choice
    prompt: PromptMap
    epoch: int = 0
    kept: int | None = None
    evicted: int = 0
    freed_blocks: int = 0


class SchedulerSide:
    """Decides per request and step what the workers do."""

    def __init__(self, settings: Settings, create: Callable[[Choice], Method], sizes: Geometry) -> None:
        self._settings, self._create, self._sizes = settings, create, sizes
        self._known: dict[str, Known] = {}
        self._refused: set[str] = set()

    def add(self, request: Any) -> None:
        """Take note of a new request. Requests that cannot be compressed as they ask are refused, see `refuses`."""
        try:
            choice = self._settings.of_request(getattr(request.sampling_params, "extra_args", None))
            if choice.off or not request.mm_features:
                return
            if getattr(request, "resumable", False):
                raise UnsupportedModeError("prompts that grow while they are read cannot be compressed; choose 'off'")
            prompt = prompt_map(request.mm_features, request.num_prompt_tokens)
            if not prompt.has_visual:
                return
            read_prompt(self._create(choice), prompt, self._sizes)  # the method checks its settings against the prompt
            if request.max_tokens == 1:
                return  # the only token comes from the whole prompt; beam search asks for one token at a time
        except Exception as error:  # whatever a request contains, it must not end the engine
            if isinstance(error, FoveaKVError):
                _log.error("FoveaKV: request %s is refused: %s", request.request_id, error)
            else:
                _log.exception("FoveaKV: request %s is refused", request.request_id)
            self._refused.add(request.request_id)
            return
        self._known[request.request_id] = Known(request, choice, prompt)

    def compresses(self, req_id: str) -> bool:
        """Whether the prompt of a request is compressed."""
        return req_id in self._known

    def refuses(self, req_id: str) -> bool:
        """Whether a request must fail instead of run."""
        return req_id in self._refused

    def plan(
        self,
        scheduled: Mapping[str, int],
        blocks_of: Callable[[str], Sequence[int]],
        finished: Collection[str],
        preempted: Collection[str],
        failing: Iterable[str] = (),
    ) -> Plan:
        """Return the plan of a step.

        Args:
            scheduled: number of tokens by request, before they are added to `num_computed_tokens`.
            blocks_of: returns the block ids of a request.
            finished, preempted: requests that ended or lost their blocks since the last plan.
            failing: refused requests that wait for their failure.
        """
        plan = Plan(finished=tuple(finished), preempted=tuple(preempted), refused=tuple(failing))
        for req_id, count in scheduled.items():
            known = self._known.get(req_id)
            if known is None:
                continue
            start, prompt = known.request.num_computed_tokens, known.prompt.columns
            if start >= prompt:
                continue
            if start == 0:
                known.epoch += 1
                known.freed_blocks = 0
                plan.begin.append(Begin(req_id, known.choice, known.prompt.kinds, known.prompt.index))
            blocks = tuple(blocks_of(req_id))
            plan.chunks.append(Chunk(req_id, start, start + count, prompt, blocks, known.epoch))
        return plan

    def done(self, freed: Iterable[Freed]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Return the requests whose blocks are free now, with the entries of their tables.

        A request that has lost its blocks or ended in the meantime is left out.
        """
        for each in freed:
            known = self._known.get(each.req_id)
            if known is None or known.epoch != each.epoch or known.request.num_computed_tokens == 0:
                continue
            known.kept, known.evicted = each.kept, each.evicted
            known.freed_blocks += len(each.entries)
            if each.entries:
                yield each.req_id, each.entries

    def end(self, req_id: str) -> dict[str, Any] | None:
        """Forget a request; return what is reported with its output as `kv_transfer_params`."""
        self._refused.discard(req_id)
        known = self._known.pop(req_id, None)
        if known is None or known.kept is None:
            return None
        return {
            "foveakv": {
                "method": known.choice.method,
                "prompt_tokens": known.prompt.columns,
                "stored_prompt_tokens": known.kept,
                "evicted_while_decoding": known.evicted,
                "freed_blocks": known.freed_blocks,
            }
        }
