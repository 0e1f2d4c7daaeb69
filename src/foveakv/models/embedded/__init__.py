"""The embedded model: a small vision-language model assembled from packaged weights, without any download.

DINOv2-small and SmolLM2-135M-Instruct, joined by a projector and low-rank updates that this project trained. It reads
handwritten digits and numbers, printed words and a few hundred drawings from prompts of the form

    Alice's card: <image>
    Bob's card: <image>
    Alice's card:

`foveakv.load("demo")` returns the model and its processor.
"""

from __future__ import annotations

from foveakv.models.embedded.assembly import assemble, default_cache
from foveakv.models.embedded.samples import Sample, sample_prompt

__all__ = ["Sample", "assemble", "default_cache", "sample_prompt"]
