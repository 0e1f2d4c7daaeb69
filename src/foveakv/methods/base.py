"""The base class of all methods.

A method is a dataclass of settings and is stateless. Per-request data is in a `State` that the method creates in
`begin` and receives with every view, so one object can serve any number of requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import Tensor

from foveakv.methods.results import Results
from foveakv.methods.views import (
    Decision,
    DecodeView,
    Further,
    Granularity,
    Observes,
    PrefillView,
    PromptEndView,
    PromptView,
    ReadView,
    ResultView,
    State,
    When,
)


@dataclass(frozen=True)
class ModelFacts:
    """What a method may know of the model before the first prompt.

    layers: the model's indices of the compressed layers. decoder_layers: number of all decoder layers, compressed or
    not. model_type: transformers' name of the architecture. digest: computes what calibration files identify the model
    by, see `foveakv.methods.calibration`; it reads weights, so call it only where it is needed.
    """

    layers: tuple[int, ...]
    decoder_layers: int
    model_type: str
    digest: Callable[[], str]


@dataclass
class Method:
    """Base class of compression methods. Override `prefill`, and the other hooks only where they are needed.

    Three rules hold for every method: padding is never kept, tokens keep their positions, and evictions take effect
    after the current step.
    """

    name: ClassVar[str] = ""
    visual_only: ClassVar[bool] = False
    """Whether the method evicts visual tokens only. A prompt without visual tokens then raises an error."""

    @property
    def granularity(self) -> Granularity:
        """How finely the stored tokens may differ; engines that cannot store this refuse the method."""
        return "head"

    @property
    def observes(self) -> Observes:
        """What the method reads in addition to keys and values."""
        return Observes()

    @property
    def decides(self) -> tuple[When, ...]:
        """The hooks that make decisions. Without "decode" nothing is evicted while decoding, so crops are supported."""
        return ("prefill",)

    @property
    def evicts_while_decoding(self) -> bool:
        """Whether `decode` may evict. Such a cache cannot be cropped, which rules out assisted decoding."""
        return "decode" in self.decides

    @property
    def retrieves(self) -> bool:
        """Whether decode steps read offloaded chunks."""
        return "read" in self.decides

    @property
    def merges(self) -> bool:
        """Whether decisions replace keys and values, so that stored slots differ from what the model computed."""
        return False

    @property
    def prunes_after(self) -> int | None:
        """Index among the compressed layers after which tokens are pruned from the residual stream; None = never."""
        return None

    @property
    def further(self) -> Further:
        """What happens to a further block; see `Further`."""
        return "context"

    def for_model(self, model: ModelFacts) -> Method:
        """Return the method with which the caches of a model are made; called when a session is opened or a cache made.

        Declarations (`observes`, `granularity`, ...) may be read before that.

        Override it if settings depend on the model, such as shares of its depth: return a changed copy, whose
        `describe` still shows what the user asked for.

        Raises:
            MethodError: the settings do not suit the model.
        """
        return self

    def needs_queries(self, compressed_idx: int) -> bool:
        """Whether `prefill` of this layer reads query rows from all chunks of a chunked prefill, not only the last."""
        return self.observes.queries != "none"

    def begin(self, request: PromptView) -> State | None:
        """Validate the settings against the prompt and return the state of the request.

        Called once per prompt, before layer 0.
        """
        return None

    def continue_context(self, request: PromptView, state: State | None) -> State | None:
        """Return the state with which a further block is read; state: that of the context so far.

        Called once per further block, before layer 0, unless `further` is "keep". The default starts anew.
        """
        return self.begin(request)

    def prefill(self, view: PrefillView) -> Decision | None:
        """Decide what one layer keeps. Called for each layer at the end of its prefill; None keeps everything.

        Also called for every further block, unless `further` is "keep".
        """
        return None

    def after_prefill(self, view: PromptEndView) -> list[Decision] | None:
        """Decide for all layers at once. Called once per prompt or block, after the last layer's `prefill`.

        Returns:
            One decision per compressed layer, or None to keep everything.
        """
        return None

    def read(self, view: ReadView) -> Tensor:
        """Score every offloaded chunk for the queries of a decode step: [n, P]. The highest-scored chunks are read."""
        return view.chunks.relevance(view.query, view.scaling)

    def decode(self, view: DecodeView) -> Decision | None:
        """Decide what one layer evicts. Called after the attention of a decode step; None keeps everything.

        Called only if the method evicts while decoding or observes steps or attention sums.
        """
        return None

    def results(self, view: ResultView) -> Results:
        """Return what the method did to this request, in addition to the counts that every report has."""
        return Results()

    def describe(self) -> dict[str, Any]:
        """Return the settings as plain values, for reports and result files."""
        return {"method": self.name, **{f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.init}}


def _plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)
