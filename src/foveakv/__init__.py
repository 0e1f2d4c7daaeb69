"""FoveaKV: keep what a vision-language model looks at, drop or fetch back the rest of its key-value cache."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Names are loaded on first use, so that `import foveakv` stays light (no torch, no transformers).
_HOME = {
    "compress": "foveakv.engines.transformers.api",
    "cache_for": "foveakv.engines.transformers.api",
    "Session": "foveakv.engines.transformers.session",
    "CacheOptions": "foveakv.engines.transformers.options",
    "CompressedCache": "foveakv.engines.transformers.cache",
    "Report": "foveakv.engines.transformers.report",
    "load": "foveakv.models",
    "build_inputs": "foveakv.models",
    "read_images": "foveakv.models",
    "sample_prompt": "foveakv.models.embedded",
    "Method": "foveakv.methods",
    "Full": "foveakv.methods.full",
    "Random": "foveakv.methods.random",
    "Streaming": "foveakv.methods.streaming",
    "H2O": "foveakv.methods.h2o",
    "SnapKV": "foveakv.methods.snapkv",
    "AdaKV": "foveakv.methods.adakv",
    "PyramidKV": "foveakv.methods.pyramidkv",
    "SparseMM": "foveakv.methods.sparsemm",
    "MixKV": "foveakv.methods.mixkv",
    "Quest": "foveakv.methods.quest",
    "FastV": "foveakv.methods.fastv",
    "MustDrop": "foveakv.methods.mustdrop",
    "LookM": "foveakv.methods.lookm",
    "VLCache": "foveakv.methods.vlcache",
    "PrefixKV": "foveakv.methods.prefixkv",
    "HAE": "foveakv.methods.hae",
    "HybridKV": "foveakv.methods.hybridkv",
    "FoveaKVError": "foveakv.errors",
}
__all__ = [
    "H2O",
    "HAE",
    "AdaKV",
    "CacheOptions",
    "CompressedCache",
    "FastV",
    "FoveaKVError",
    "Full",
    "HybridKV",
    "LookM",
    "Method",
    "MixKV",
    "MustDrop",
    "PrefixKV",
    "PyramidKV",
    "Quest",
    "Random",
    "Report",
    "Session",
    "SnapKV",
    "SparseMM",
    "Streaming",
    "VLCache",
    "__version__",
    "build_inputs",
    "cache_for",
    "compress",
    "load",
    "read_images",
    "sample_prompt",
]

if TYPE_CHECKING:
    from foveakv.engines.transformers.api import cache_for, compress
    from foveakv.engines.transformers.cache import CompressedCache
    from foveakv.engines.transformers.options import CacheOptions
    from foveakv.engines.transformers.report import Report
    from foveakv.engines.transformers.session import Session
    from foveakv.errors import FoveaKVError
    from foveakv.methods import Method
    from foveakv.methods.adakv import AdaKV
    from foveakv.methods.fastv import FastV
    from foveakv.methods.full import Full
    from foveakv.methods.h2o import H2O
    from foveakv.methods.hae import HAE
    from foveakv.methods.hybridkv import HybridKV
    from foveakv.methods.lookm import LookM
    from foveakv.methods.mixkv import MixKV
    from foveakv.methods.mustdrop import MustDrop
    from foveakv.methods.prefixkv import PrefixKV
    from foveakv.methods.pyramidkv import PyramidKV
    from foveakv.methods.quest import Quest
    from foveakv.methods.random import Random
    from foveakv.methods.snapkv import SnapKV
    from foveakv.methods.sparsemm import SparseMM
    from foveakv.methods.streaming import Streaming
    from foveakv.methods.vlcache import VLCache
    from foveakv.models.embedded import sample_prompt
    from foveakv.models.images import read_images
    from foveakv.models.inputs import build_inputs
    from foveakv.models.loading import load


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    if name in ("methods", "errors", "models", "kernels"):
        return importlib.import_module(f"foveakv.{name}")
    raise AttributeError(f"module 'foveakv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
