"""Compression methods (one file each), the views they receive, and the registry."""

from foveakv.core.selection import keep_top
from foveakv.methods.base import Method, ModelFacts
from foveakv.methods.registry import available, class_names, find, get, near, register
from foveakv.methods.results import HeadMaps, Results
from foveakv.methods.views import (
    Decision,
    DecodeView,
    Evict,
    Field,
    Observes,
    Offload,
    PrefillView,
    PromptEndView,
    PromptView,
    ReadView,
    ResultView,
    State,
)

__all__ = [
    "Decision",
    "DecodeView",
    "Evict",
    "Field",
    "HeadMaps",
    "Method",
    "ModelFacts",
    "Observes",
    "Offload",
    "PrefillView",
    "PromptEndView",
    "PromptView",
    "ReadView",
    "ResultView",
    "Results",
    "State",
    "available",
    "class_names",
    "find",
    "get",
    "keep_top",
    "near",
    "register",
]
