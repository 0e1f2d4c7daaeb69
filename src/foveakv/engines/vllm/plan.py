"""What scheduler and workers tell each other: the plan of a step, and what the workers did.

These classes are pickled between vLLM's processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from foveakv.engines.vllm.settings import Choice
from foveakv.errors import MethodError


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
    needed any more. evicted: tokens evicted while decoding, so far. checksum: of the stored tokens, in their order.
    """

    req_id: str
    epoch: int
    kept: int
    entries: tuple[int, ...]
    evicted: int = 0
    checksum: int = 0


@dataclass
class Done:
    """What one rank did in a step. failed: requests whose method failed."""

    freed: list[Freed] = field(default_factory=list)
    failed: tuple[str, ...] = ()

    def check_same(self, other: Done) -> None:
        """Compare with another tensor-parallel rank.

        Raises:
            MethodError: the ranks have stored different tokens.
        """
        if self == other:
            return
        mine, others = ({each.req_id: each for each in done.freed} for done in (self, other))
        differ = [each for each in {**mine, **others} if mine.get(each) != others.get(each)]
        raise MethodError(
            "the method decides differently on two tensor-parallel ranks, for requests "
            f"{', '.join(sorted({*differ, *self.failed, *other.failed}))}; it must decide by its views alone, with a "
            "seed for random numbers"
        )
