"""The full cache: nothing is dropped. The yardstick of every comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from foveakv.methods.base import Method


@dataclass
class Full(Method):
    """Keep every slot; equals the plain model token for token."""

    name: ClassVar[str] = "full"
