"""What an engine can carry out, and why it refuses a method."""

from __future__ import annotations

from dataclasses import dataclass

from foveakv.errors import MethodError
from foveakv.methods.base import Method
from foveakv.methods.views import Granularity

_ORDER: tuple[Granularity, ...] = ("token", "layer", "head")
_STORES = {
    "token": "one set of tokens for all layers and heads",
    "layer": "one set of tokens per layer, shared by its heads",
    "head": "a set of tokens per head",
}


@dataclass(frozen=True)
class Capabilities:
    """What an engine, or a mode of one, can do for a method.

    engine: its name in messages. granularity: the finest it can store. The others: whether it evicts while decoding,
    reads chunks of a store, gives attention sums while decoding, runs a second pass over the prompt, stores replaced
    keys and values, and takes tokens out of the residual stream.
    """

    engine: str
    granularity: Granularity = "head"
    decode_eviction: bool = True
    retrieval: bool = True
    attention_sum: bool = True
    second_pass: bool = True
    merging: bool = True
    token_pruning: bool = True

    def refusal(self, method: Method) -> str | None:
        """Why this engine cannot carry out the method; None when it can."""
        if _ORDER.index(method.granularity) > _ORDER.index(self.granularity):
            return f"it stores {_STORES[method.granularity]}, and {self.engine} stores {_STORES[self.granularity]}"
        lacks = {
            "evicts while decoding": method.evicts_while_decoding and not self.decode_eviction,
            "reads chunks from a store in every step": method.retrieves and not self.retrieval,
            "observes the attention of every decode step": (
                (method.observes.attention_sum or method.observes.steps) and not self.attention_sum
            ),
            "needs a second pass over the prompt": method.observes.second_pass and not self.second_pass,
            "replaces keys and values": method.merges and not self.merging,
            "takes tokens out of the residual stream": method.prunes_after is not None and not self.token_pruning,
        }
        found = [what for what, lacking in lacks.items() if lacking]
        return f"it {found[0]}, which {self.engine} cannot do" if found else None

    def check(self, method: Method, advice: str = "") -> None:
        """Raises `MethodError` with the reason, and `advice`, where `refusal` gives one."""
        reason = self.refusal(method)
        if reason is not None:
            raise MethodError(f"{method.name} is not supported here: {reason}{f'; {advice}' if advice else ''}")
