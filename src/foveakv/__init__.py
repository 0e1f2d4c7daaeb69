"""KV cache compression for vision-language models."""

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
    "Pool": "foveakv.memory.pool",
    "load_cache": "foveakv.engines.transformers.loading",
    "load_stream": "foveakv.streams",
    "stream": "foveakv.streams",
    "FrameStream": "foveakv.streams",
    "StreamReport": "foveakv.streams",
    "load": "foveakv.models",
    "build_inputs": "foveakv.models",
    "read_images": "foveakv.models",
    "sample_prompt": "foveakv.models.embedded",
    "Method": "foveakv.methods",
    "FoveaKVError": "foveakv.errors",
}
__all__ = [
    "CacheOptions",
    "CompressedCache",
    "FoveaKVError",
    "FrameStream",
    "Method",
    "Pool",
    "Report",
    "Session",
    "StreamReport",
    "__version__",
    "build_inputs",
    "cache_for",
    "compress",
    "load",
    "load_cache",
    "load_stream",
    "read_images",
    "sample_prompt",
    "stream",
]

if TYPE_CHECKING:
    from foveakv.engines.transformers.api import cache_for, compress
    from foveakv.engines.transformers.cache import CompressedCache
    from foveakv.engines.transformers.loading import load_cache
    from foveakv.engines.transformers.options import CacheOptions
    from foveakv.engines.transformers.report import Report
    from foveakv.engines.transformers.session import Session
    from foveakv.errors import FoveaKVError
    from foveakv.memory.pool import Pool
    from foveakv.methods import Method
    from foveakv.models.embedded import sample_prompt
    from foveakv.models.images import read_images
    from foveakv.models.inputs import build_inputs
    from foveakv.models.loading import load
    from foveakv.streams import FrameStream, StreamReport, load_stream, stream


def __getattr__(name: str) -> Any:
    home = _HOME.get(name) or _method_classes().get(name)
    if home is not None:
        value = getattr(importlib.import_module(home), name)
        globals()[name] = value
        return value
    if name in ("methods", "errors", "models", "kernels"):
        return importlib.import_module(f"foveakv.{name}")
    raise AttributeError(f"module 'foveakv' has no attribute {name!r}")


def _method_classes() -> dict[str, str]:
    """Class name -> module of every built-in method; the registry finds them in the source files."""
    from foveakv.methods.registry import class_names

    return class_names()


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_method_classes()})
