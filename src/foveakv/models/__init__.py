"""Models and their inputs: loading, image reading, and the embedded demo model."""

from foveakv.models.loading import DEMO, KNOWN, KnownModel, Loaded, load

__all__ = ["DEMO", "KNOWN", "KnownModel", "Loaded", "load"]
