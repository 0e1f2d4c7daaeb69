"""One decode step of a method that fetches chunks: what `hybridkv` and `quest` share."""

from __future__ import annotations

from foveakv.memory.chunks import ChunkStore
from foveakv.methods.base import DecodeView


def retrieve(store: ChunkStore, view: DecodeView) -> None:
    """Chooses the chunks for the step's queries, and hands them to attention in place or as slots; counts them."""
    if store.in_place:
        asked, hits = store.pick(view.query, view.scaling)
        view.pages = store.pages() if asked else None
    else:
        asked, hits = store.fetch(view.segments, view.query, view.scaling)
    if asked:  # beams and selections may leave no sequence that chooses
        view.count(retrieved=asked, hits=hits)
