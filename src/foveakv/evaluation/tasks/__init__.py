"""The offline suite: everything is drawn by seed from data in the package."""

from __future__ import annotations

OFFLINE = ["cards-1", "cards-4", "cards-16", "reading", "turns", "story", "text"]
SUITES = {"offline": OFFLINE, "validation": [f"{name}@validation" for name in OFFLINE]}
"""`validation` is the same with other handwriting: for choosing settings, so that `offline` stays unseen."""


def load() -> None:
    """Registers all tasks."""
    from foveakv.evaluation.tasks import needle, reading, text, turns

    for split, mark in (("test", ""), ("validation", "@validation")):
        needle.register_all(split, mark)
        reading.register_all(split, mark)
        turns.register_all(split, mark)
        text.register_all(mark)
