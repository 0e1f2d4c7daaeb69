"""Full cache without eviction, the baseline of every comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from foveakv.methods.base import Method
from foveakv.methods.views import Further, Granularity


@dataclass
class Full(Method):
    """Keep every slot. Output is token-for-token equal to the plain model's."""

    name: ClassVar[str] = "full"

    @property
    def granularity(self) -> Granularity:
        """ "token": all layers and heads store every token."""
        return "token"

    @property
    def further(self) -> Further:
        """There is nothing to decide."""
        return "keep"
