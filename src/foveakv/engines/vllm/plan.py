"""What scheduler and workers tell each other: the plan of a step, and what the workers did.

These classes are pickled between vLLM's processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from foveakv.engines.vllm.settings import Choice


@dataclass(frozen=True)
class Begin:
    """A request whose prompt is to be compressed.

    kinds: int8 [1, C], see `PromptMap`. index: int32 [1, C], the number of the image of every visual token.
    """

    req_id: str
    choice: Choice
    kinds: Tensor
    index: Tensor


@dataclass(frozen=True)
class Chunk:
    """The tokens [start, stop) of a request, of which some belong to the prompt.

    prompt: number of prompt tokens, C; `stop` exceeds it if a preempted request is recomputed. blocks: ids of the
    blocks that hold tokens [0, stop). epoch: counts the times the request has been started, the first included.
    """

    req_id: str
    start: int
    stop: int
    prompt: int
    blocks: tuple[int, ...]
    epoch: int

    @property
    def completes(self) -> bool:
        """Whether the prompt is complete after this chunk."""
        return self.start < self.prompt <= self.stop


@dataclass
class Plan:
    """One step. finished, preempted: requests that ended or lost their blocks since the last step. refused: to fail."""

    begin: list[Begin] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    finished: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Freed:
    """A compressed request after a step.

    kept: prompt tokens that were stored when the prompt was complete. entries: entries of its block table that are not
    needed any more. evicted: tokens evicted while decoding, so far.
    """

    req_id: str
    epoch: int
    kept: int
    entries: tuple[int, ...]
    evicted: int = 0
