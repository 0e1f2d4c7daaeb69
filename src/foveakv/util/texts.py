"""Text for terminals and tables."""

from __future__ import annotations

import unicodedata


def printable(text: str) -> str:
    """Remove control characters, which a model may generate and a terminal would obey; keep line breaks and tabs."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def one_line(text: str) -> str:
    """Remove control characters and replace every run of white space by one space."""
    return " ".join(printable(text).split())


def size_text(size: float) -> str:
    """Format a number of bytes, such as 12.3 MB, in powers of ten."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"
