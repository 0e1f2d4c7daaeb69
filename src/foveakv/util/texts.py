"""Texts for terminals and tables."""

from __future__ import annotations

import unicodedata


def printable(text: str) -> str:
    """Without control characters, which a model may write and a terminal would obey; line breaks and tabs stay."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def one_line(text: str) -> str:
    return " ".join(printable(text).split())


def size_text(size: float) -> str:
    """12.3 MB and the like, powers of ten."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"
