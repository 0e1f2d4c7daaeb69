"""The offline suite: everything is drawn by seed from data in the package."""

from __future__ import annotations

OFFLINE = [
    "cards-1", "cards-4", "cards-16", "print", "chart", "photos", "row", "reading", "turns", "story", "text",
]  # fmt: skip
SUITES = {"offline": OFFLINE, "validation": [f"{name}@validation" for name in OFFLINE]}
"""`validation` is the same with other handwriting, print and photographs: for choosing settings, so that `offline`
stays unseen."""


def load() -> None:
    """Registers all tasks."""
    from foveakv.evaluation.tasks import chart, needle, photos, printed, reading, text, turns

    for split, mark in (("test", ""), ("validation", "@validation")):
        needle.register_all(split, mark)
        printed.register_all(split, mark)
        chart.register_all(split, mark)
        photos.register_all(split, mark)
        reading.register_all(split, mark)
        turns.register_all(split, mark)
        text.register_all(mark)
