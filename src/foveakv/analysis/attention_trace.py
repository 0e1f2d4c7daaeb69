"""Record what every token of a prompt receives in each decode step of a run with a full cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from foveakv.analysis.passes import run
from foveakv.core.columns import real_first
from foveakv.errors import InputError, MethodError, UnsupportedModeError
from foveakv.methods.base import Method
from foveakv.methods.prompt_scores import prompt_scores
from foveakv.methods.views import DecodeView, Observes, PrefillView, PromptView, State

MAX_TRACE_BYTES = 2**30


@dataclass(frozen=True)
class Trace:
    """Attention in all layers of one run with a full cache, summed over query heads.

    prompt: float32 [L, C], attention that each prompt token received from the prompt's queries (initial value of
    Eq. 5). steps: T tensors float32 [L, C + t + 1], attention that each token received in decode step t, the new token
    last. layers: the model's indices of the layers.
    """

    label: str
    layers: tuple[int, ...]
    prompt: Tensor
    steps: list[Tensor]

    @property
    def tokens(self) -> int:
        """N, all tokens of the run."""
        return self.prompt.shape[1] + len(self.steps)


@dataclass
class _Recorded(State):
    """prompt: [C] per layer. steps: per decode step, [C + t + 1] per layer. size: bytes of the steps."""

    prompt: list[Tensor] = field(default_factory=list)
    steps: list[list[Tensor]] = field(default_factory=list)
    size: int = 0


@dataclass
class TraceProbe(Method):
    """Keep everything and record the attention that every token receives while decoding.

    rows: prompt queries that count for the initial scores, see `foveakv.methods.prompt_scores`. limit: the most bytes
    that the recorded steps may take on the host.
    """

    rows: Literal["all"] | int = "all"
    limit: int = MAX_TRACE_BYTES

    name: ClassVar[str] = "trace-probe"

    @property
    def observes(self) -> Observes:
        """All prompt queries, and the attention sum of every decode step."""
        return Observes(queries="all", attention_sum=True)

    def begin(self, request: PromptView) -> _Recorded:
        """Return an empty record."""
        return _Recorded()

    def prefill(self, view: PrefillView) -> None:
        """Record the initial scores of one layer."""
        columns = real_first(view.prompt.real)[:, : int(view.prompt.lengths.max())]
        sums = prompt_scores(view, self.rows).sum(1).gather(1, columns)
        view.state.prompt.append(sums[0].cpu())

    def decode(self, view: DecodeView) -> None:
        """Record the attention of one step in one layer."""
        trace, attention_sum = view.state, view.attention_sum
        if attention_sum is None:
            raise MethodError(f"{self.name} needs the attention sum of every decode step")
        received = attention_sum[0].sum(0).to("cpu", torch.float32)
        trace.size += received.nbytes
        if trace.size > self.limit:
            raise UnsupportedModeError(
                f"recording this answer takes more than {self.limit / 2**20:.0f} MiB; lower --max-new-tokens "
                "(new_tokens), or shorten the prompt"
            )
        if view.compressed_idx == 0:
            trace.steps.append([])
        trace.steps[-1].append(received.clone())


def record(
    model: Any, label: str, inputs: Any, new_tokens: int, *, rows: Literal["all"] | int = "all", to_the_end: bool = True
) -> Trace:
    """Generate greedily with a full cache and record the attention of new_tokens - 1 decode steps.

    Args:
        model: a model that `foveakv.compress` supports.
        label: label of the prompt.
        inputs, new_tokens, to_the_end: see `passes.run`.
        rows: prompt queries that count for the initial scores, "all" or a number of sampled rows.

    Raises:
        InputError: the answer has one token only, which comes from the prompt's forward pass.
        UnsupportedModeError: the record would take more than 1 GiB.
    """
    cache, _ = run(model, inputs, TraceProbe(rows), new_tokens, to_the_end=to_the_end)
    trace = cache.state
    if not isinstance(trace, _Recorded) or not trace.steps:
        raise InputError(f"{label}: the answer has no decode step to replay; ask for more new tokens")
    return Trace(
        label,
        tuple(layer.layer_idx for layer in cache.compressed),
        torch.stack(trace.prompt).float(),
        [torch.stack(step) for step in trace.steps],
    )
