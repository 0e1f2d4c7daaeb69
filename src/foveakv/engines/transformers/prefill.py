"""The end of one layer's prefill: let the method decide, check the decision, and store what it keeps."""

from __future__ import annotations

from typing import Any

from foveakv.engines.transformers import decisions
from foveakv.engines.transformers.decision_checks import check_earlier, check_prefill, returned
from foveakv.memory.chunks import ChunkStore
from foveakv.memory.segments import Segments
from foveakv.methods.views import PrefillView


def store_layer(layer: Any, view: PrefillView) -> tuple[Segments, ChunkStore | None]:
    """Return what the method keeps of a layer's prompt, and its offloaded chunks; evict what it decides elsewhere.

    Raises:
        MethodError: the decision does not fit the view.
        StoreError: chunks cannot be written to disk.
    """
    cache = layer.cache
    method = cache.method
    if method.observes.queries != "none" and layer is cache.compressed[-1]:
        decisions.check_finite(view)
    decision = returned(method, "prefill", None if cache.undecided else method.prefill(view))
    check_prefill(method.name, decision, view)
    kept = []
    before = cache.compressed[: layer.compressed_idx]
    if decision.earlier is not None:
        shapes = [(len(view.keys), each.segments.heads, cache.prompt_columns) for each in before]
        kept = check_earlier(method.name, decision.earlier, shapes)
    if decision.stream is not None:
        cache.prune_stream(decision.stream, layer.compressed_idx)
    stored = decisions.store_prompt(view, decision, cache.storage)
    layer.segments, layer.store = stored
    # Copies that a method made for merging still exist.
    cache.note_peak(sum(made.nbytes for made in (decision.keys, decision.values) if made is not None))
    for each, columns in zip(before, kept, strict=False):
        each.narrow(columns)
    return stored
