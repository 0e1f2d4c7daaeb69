"""The base class of all methods.

A method is a data class of settings and holds no state: what it remembers of a request is a `State` that it makes in
`begin` and finds in every view, so one object serves any number of requests.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import Tensor

from foveakv.methods.results import Results
from foveakv.methods.views import (
    Decision,
    DecodeView,
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


@dataclass
class Method:
    """Override `prefill`, and the others only where the method acts there.

    Rules that hold for every method: padding is never kept, tokens keep their positions, and evictions take effect
    after the current step.
    """

    name: ClassVar[str] = ""
    visual_only: ClassVar[bool] = False
    """Evicts visual tokens only, so that a prompt without any is an error."""

    @property
    def granularity(self) -> Granularity:
        """Which slots may differ; an engine that cannot store that refuses the method."""
        return "head"

    @property
    def observes(self) -> Observes:
        """What the method reads beyond keys and values."""
        return Observes()

    @property
    def decides(self) -> tuple[When, ...]:
        """When the method acts. A method without "decode" never evicts while decoding, so its cache can be cropped."""
        return ("prefill",)

    @property
    def evicts_while_decoding(self) -> bool:
        """Whether `decode` may evict; such a cache cannot be cropped (no assisted decoding)."""
        return "decode" in self.decides

    @property
    def retrieves(self) -> bool:
        """Whether steps read chunks of a store."""
        return "read" in self.decides

    @property
    def merges(self) -> bool:
        """Whether decisions replace keys and values, so that what is stored is not what the model computed."""
        return False

    @property
    def prunes_after(self) -> int | None:
        """Index among the compressed layers after which tokens may leave the residual stream; None = they never do."""
        return None

    def needs_queries(self, compressed_idx: int) -> bool:
        """Whether `prefill` of this layer reads query rows before the last chunk of a chunked prefill."""
        return self.observes.queries != "none"

    def begin(self, request: PromptView) -> State | None:
        """Called once per prompt, before layer 0: validates settings against it and returns the request's state."""
        return None

    def prefill(self, view: PrefillView) -> Decision | None:
        """Called for each layer when it has read the prompt; None keeps everything."""
        return None

    def after_prefill(self, view: PromptEndView) -> list[Decision] | None:
        """Called once per prompt, after the last layer's `prefill`: one decision per compressed layer, or None."""
        return None

    def read(self, view: ReadView) -> Tensor:
        """Relevance of every offloaded chunk to a step's queries, [n, P]: the highest are read."""
        return view.chunks.relevance(view.query, view.scaling)

    def decode(self, view: DecodeView) -> Decision | None:
        """Called after each decode step's attention if the method evicts there or observes steps; None keeps all."""
        return None

    def results(self, view: ResultView) -> Results:
        """What the method did to this request beyond the counts that every report has."""
        return Results()

    def describe(self) -> dict[str, Any]:
        """Settings as plain values, for reports and result files."""
        return {"method": self.name, **{f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.init}}


def _plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)
