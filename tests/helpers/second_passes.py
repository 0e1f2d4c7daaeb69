"""Methods that read the prompt a second time, and what they are refused for."""

from __future__ import annotations

import families
import matrix

from foveakv.engines.transformers import compat


def in_one_pass(name: str) -> bool:
    """Whether the method needs the whole prompt in one forward pass."""
    return matrix.method(name).observes.second_pass


def refused(family: str, name: str) -> bool:
    """Whether the family has layers that the method cannot do without: those of a second pass over the prompt."""
    if not in_one_pass(name):
        return False
    decoder = families.FAMILIES[family].config().get_text_config(decoder=True)
    return any(type(layer) is not compat.DynamicLayer for layer in compat.default_layers(decoder))
