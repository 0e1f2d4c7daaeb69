"""Capabilities of an engine, and the reasons for which it refuses a method."""

from __future__ import annotations

from dataclasses import dataclass

from foveakv.errors import MethodError
from foveakv.methods.base import Method
from foveakv.methods.views import Granularity

_WHEN = ("prefill", "after_prefill", "decode", "read")
_ORDER: tuple[Granularity, ...] = ("token", "layer", "head")
_STORES = {
    "token": "one set of tokens for all layers and heads",
    "layer": "one set of tokens per layer, shared by its heads",
    "head": "a set of tokens per head",
}


@dataclass(frozen=True)
class Capabilities:
    """What an engine, or one of its modes, supports.

    Args:
        engine: name used in messages.
        granularity: the finest granularity that it can store.
        decode_eviction: evicts slots while decoding.
        retrieval: reads offloaded chunks in decode steps.
        attention_sum: returns the attention sum of every slot while decoding.
        second_pass: runs a second pass over the prompt.
        merging: stores keys and values that a method replaced.
        token_pruning: prunes tokens from the residual stream.
    """

    engine: str
    granularity: Granularity = "head"
    decode_eviction: bool = True
    retrieval: bool = True
    attention_sum: bool = True
    second_pass: bool = True
    merging: bool = True
    token_pruning: bool = True
    decode_and_read: bool = True

    def refusal(self, method: Method) -> str | None:
        """Return why this engine cannot run the method; None if it can."""
        if method.granularity not in _ORDER:
            return f"it declares granularity={method.granularity!r}, which must be one of {', '.join(_ORDER)}"
        unknown = [when for when in method.decides if when not in _WHEN]
        if unknown:
            return f"it declares that it decides {unknown[0]!r}, which must be one of {', '.join(_WHEN)}"
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
            "evicts while decoding and reads chunks from a store": (
                method.evicts_while_decoding and method.retrieves and not self.decode_and_read
            ),
            "prunes tokens from the residual stream": method.prunes_after is not None and not self.token_pruning,
        }
        found = [what for what, lacking in lacks.items() if lacking]
        return f"it {found[0]}, which {self.engine} cannot do" if found else None

    def check(self, method: Method, advice: str = "") -> None:
        """Check that this engine can run the method.

        Raises:
            MethodError: it cannot; the message has the reason from `refusal`, followed by `advice`.
        """
        reason = self.refusal(method)
        if reason is not None:
            raise MethodError(f"{method.name} is not supported here: {reason}{f'; {advice}' if advice else ''}")
