"""Load models, read images and build inputs; the embedded model."""

from foveakv.models.images import read_image, read_images
from foveakv.models.inputs import build_inputs
from foveakv.models.loading import DEMO, KNOWN, KnownModel, Loaded, load

__all__ = ["DEMO", "KNOWN", "KnownModel", "Loaded", "build_inputs", "load", "read_image", "read_images"]
